"""The page at /simulate in a real browser with real simulations."""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from localllm import LLM
from localllm.cli.app import main
from localllm.cli.simulate_page import CONTROLS, PRESETS, shell_line
from localllm.formatting import three_digits
from localllm.server.access import AccessPolicy
from localllm.simulate.report import format_time
from tests.server.conftest import CHROMIUM, serving

expect.set_options(timeout=60_000)  # of a machine that does other things besides
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
MEASURES = ("queue", "ttft", "tpot", "e2e")
FAILED = "Failed to load resource: the server responded with a status of"


def open_page(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Yield a page with the first preset simulated. Fails if anything is written to the console or requested from
    another host."""
    with browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}) as context:
        page = context.new_page()
        page.set_default_timeout(60_000)
        troubles: list[str] = []
        page.on("console", lambda said: troubles.append(said.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(url) or troubles.append(asked.url))
        page.goto(f"{url}/simulate")
        expect(page.locator("#text")).not_to_be_empty()
        yield page
        assert troubles == getattr(page, "allowed", [])


@pytest.fixture
def page(browser: Browser, demo_url: str) -> Iterator[Page]:
    yield from open_page(browser, demo_url)


@pytest.fixture
def still(browser: Browser, demo_url: str) -> Iterator[Page]:
    """A page for people who want no motion: it shows the end of a run at once."""
    yield from open_page(browser, demo_url, reduced_motion="reduce")


def simulated(page: Page, line: str) -> None:
    """Wait for the end of the simulation of a command line."""
    expect(page.locator("#command")).to_have_text(line)
    expect(page.locator("#text")).not_to_be_empty()


@pytest.mark.parametrize("number", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6))])
def test_a_preset_shows_the_numbers_of_the_command(still: Page, capsys: Any, number: int) -> None:
    preset = PRESETS[number - 1]
    still.keyboard.press(str(number))
    expect(still.locator("#see")).to_have_text(preset.see)
    words = [word for flag, value in preset.options.items() for word in (flag, str(value))]
    simulated(
        still,
        shell_line(preset.model, {name: preset.options[name] for name in CONTROLS if name in preset.options}),
    )
    outputs = []
    for form in ([], ["--json"]):
        assert main(["simulate", preset.model, *words, *form]) == 0
        outputs.append(capsys.readouterr().out)
    found = json.loads(outputs[1])
    expect(still.locator("#time")).to_contain_text("of")
    assert still.text_content("#text") == outputs[0].rstrip("\n")
    for name in MEASURES:
        for percent in ("p50", "p95", "p99"):
            expect(still.locator(f"#{name}-{percent}")).to_have_text(format_time(found[f"{name}_s"][percent]))
    assert still.inner_text("#requests-per-s") == three_digits(found["requests_per_s"])
    assert still.inner_text("#tokens-per-s") == three_digits(found["output_tokens_per_s"])
    goodput = found["goodput_requests_per_s"]
    assert still.inner_text("#goodput") == ("\N{EN DASH}" if goodput is None else three_digits(goodput))
    assert still.inner_text("#n-done") == f"{found['requests']:,}"
    assert still.inner_text("#n-waiting") == still.inner_text("#n-decode") == "0"
    answer = still.inner_text("#answer")
    assert answer == "" if goodput is None else answer in " ".join(outputs[0].split())
    assert (goodput is None) == (answer == "")


@pytest.mark.slow
def test_requests_move_and_memory_fills(page: Page) -> None:
    page.keyboard.press("6")
    expect(page.locator("#command")).to_contain_text("--rate 60")
    expect(page.locator("#text")).not_to_be_empty()
    page.locator("#scrub").fill("300")
    for stage in ("waiting", "prefill", "decode"):
        assert (page.get_attribute(f"#lanes .{stage}", "d") or "").count("M") > 0, stage
    numbers = [int(page.inner_text(f"#n-{name}").replace(",", "")) for name in ("waiting", "decode", "done")]
    assert all(numbers)
    used = page.inner_text("#blocks-told")
    cells = (page.get_attribute("#blocks .used", "d") or "").count("M")
    page.locator("#scrub").fill("0")
    assert page.inner_text("#blocks-told") != used
    assert (page.get_attribute("#blocks .used", "d") or "").count("M") < cells
    page.locator("#scrub").fill("1000")
    assert page.inner_text("#n-done") == "500" and page.inner_text("#n-decode") == "0"
    assert re.match(r"0 of [\d,]+ blocks \(0%\)", page.inner_text("#blocks-told"))
    drawn = page.get_attribute("#chart .queued", "d") or ""
    assert drawn.count("L") > 100


def test_it_plays_and_pauses(page: Page) -> None:
    position = "Number(document.getElementById('scrub').value)"
    page.keyboard.press("2")
    expect(page.locator("#command")).not_to_contain_text("static")
    expect(page.locator("#text")).not_to_be_empty()  # positions are shares of the run, which grows until then
    expect(page.locator("#play")).to_have_text("Pause")
    expect(page.locator("#scrub")).not_to_have_value(page.locator("#scrub").input_value())
    page.locator("#results").focus()
    page.keyboard.press("Space")
    expect(page.locator("#play")).to_have_text("Play")
    stopped = page.evaluate(position)
    page.wait_for_timeout(300)
    assert page.evaluate(position) == stopped < 1000
    page.keyboard.press("End")
    expect(page.locator("#play")).to_have_text("Play again")
    assert page.evaluate(position) == 1000


@pytest.mark.slow
def test_all_can_be_done_with_keys(page: Page) -> None:
    names = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name = page.evaluate(
            """(({ ariaLabel, textContent, labels }) =>
                ariaLabel || labels?.[0]?.firstChild.textContent || textContent)(document.activeElement)"""
        )
        assert name  # nothing that can be focused is without a name
        names.append(name.strip())
        if "Requests per second, slider" in name:
            break
    assert {"To the results", "Model", "Device", "Requests per second"} <= set(names)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#command")).to_contain_text("--rate 11 ")
    expect(page.locator("#command")).to_contain_text("--batching static")
    page.keyboard.press("Tab")
    page.keyboard.type("12")  # users instead
    page.keyboard.press("Enter")
    expect(page.locator("#command")).to_contain_text("--users 12")
    expect(page.locator("#command")).not_to_contain_text("--rate")
    assert page.input_value("[name='--rate']") == ""
    page.locator("#scrub").focus()
    page.keyboard.press("End")
    expect(page.locator("#n-decode")).to_have_text("0")
    page.keyboard.press("ArrowLeft")
    assert int(page.input_value("#scrub")) < 1000
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.locator("#results").focus()
    page.keyboard.press("d")
    assert page.evaluate(colour) != before
    page.locator("#output summary").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#text")).to_be_visible()


@pytest.mark.slow
def test_it_is_light_or_dark(page: Page) -> None:
    colours = """[["body", "backgroundColor"], ["#controls", "backgroundColor"], ["#lanes .decode", "fill"]].map(
        ([name, property]) => getComputedStyle(document.querySelector(name))[property])"""
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colours)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(colours)
    assert light[0] == "rgb(255, 255, 255)" and dark[0] == "rgb(21, 25, 27)"
    assert all(one != other for one, other in zip(light, dark, strict=True))
    page.click("#toggle-theme")
    assert page.evaluate(colours) == dark
    page.reload()
    assert page.evaluate(colours) == dark


@pytest.mark.slow
def test_on_a_phone_nothing_is_wider_than_the_screen(page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.keyboard.press("6")
    expect(page.locator("#answer")).to_contain_text("requests/s")
    page.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    page.click("#play")
    page.locator("#scrub").fill("400")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    beyond = "(one) => one.getBoundingClientRect().right > 391"
    every = "[...document.querySelectorAll('body *:not(pre)')]"
    assert page.evaluate(f"{every}.filter({beyond}).map((one) => one.outerHTML)") == []


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_words(page: Page) -> None:
    page.allowed = [f"{FAILED} 507 (Insufficient Storage)"]  # pyright: ignore[reportAttributeAccessIssue]
    page.keyboard.press("7")
    expect(page.locator("#facts")).to_contain_text("70b")
    page.select_option("[name='--quant']", "")
    expect(page.locator("#trouble")).to_contain_text("need 141 GB in bfloat16")
    page.select_option("[name='--quant']", "int4")
    expect(page.locator("#trouble")).to_be_hidden()
    expect(page.locator("#facts")).to_contain_text("int4")


@pytest.mark.slow
def test_fields_without_effect_are_off_and_not_sent(page: Page) -> None:
    page.keyboard.press("4")
    expect(page.locator("#command")).to_contain_text("--drafts 4")
    page.fill("[name='--acceptance']", "0.5")
    page.press("[name='--acceptance']", "Enter")
    expect(page.locator("#command")).to_contain_text("--acceptance 0.5")
    page.fill("[name='--drafts']", "0")
    page.press("[name='--drafts']", "Enter")
    expect(page.locator("#command")).not_to_contain_text("--drafts")
    expect(page.locator("#command")).not_to_contain_text("--acceptance")
    expect(page.locator("[name='--acceptance']")).to_be_disabled()
    expect(page.locator("#before-tpot-p50")).to_contain_text("was")
    page.uncheck("[name='--no-prefix-cache']")
    expect(page.locator("#command")).to_contain_text("--no-prefix-cache")


@pytest.mark.slow
def test_an_address_holds_the_options(browser: Browser, demo_url: str) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(
            f"{demo_url}/simulate#model=demo&--device=H100+SXM&--rate=3.0&--requests=50&--no-prefix-cache=True"
        )
        line = "localllm simulate demo --device 'H100 SXM' --rate 3 --requests 50 --no-prefix-cache"
        simulated(page, line)
        assert not page.is_checked("[name='--no-prefix-cache']")
        page.reload()
        simulated(page, line)


@pytest.mark.slow
def test_an_option_that_the_server_describes_appears(browser: Browser, demo_url: str) -> None:
    """The page has no list of options of its own."""
    with browser.new_context() as context:
        page = context.new_page()

        def add_option(route: Any) -> None:
            answer = route.fetch()
            described = answer.json()
            like = next(option for option in described["options"] if option["flag"] == "--turns")
            described["options"].append({**like, "flag": "--wings", "label": "Wings", "is_main": True})
            route.fulfill(response=answer, json=described)

        page.route("**/simulate/options", add_option)
        page.goto(f"{demo_url}/simulate")
        expect(page.get_by_label("Wings", exact=True)).to_be_visible()
        page.get_by_label("Wings", exact=True).fill("2")
        page.get_by_label("Wings", exact=True).press("Enter")
        expect(page.locator("#trouble")).to_contain_text("--wings is not an option of the page")


@pytest.mark.slow
def test_a_busy_or_locked_server_is_retried(browser: Browser, demo: LLM) -> None:
    policy = AccessPolicy(keys=frozenset([hashlib.sha256(b"right").digest()]))
    with serving(demo, policy) as url, browser.new_context() as context:
        page = context.new_page()
        refusals = [503]

        def answer(route: Any) -> None:
            if refusals:
                body = json.dumps({"error": {"message": "2 simulations are running"}})
                route.fulfill(status=refusals.pop(), headers={"Retry-After": "2"}, body=body)
            else:
                route.continue_()

        page.route("**/simulate/run", answer)
        page.goto(f"{url}/simulate")
        expect(page.locator("#key-title")).to_have_text("The server asks for a key")
        page.fill("#key-text", "right")
        page.keyboard.press("Enter")
        expect(page.locator("#text")).not_to_be_empty()
        assert not refusals


@pytest.mark.slow
def test_a_lane_is_free_when_its_request_has_ended(page: Page) -> None:
    """Also if the page has drawn the request before it knew of the end."""
    lanes = page.evaluate(
        """async () => {
            const { Run } = await import("/ui/simulate/run.js");
            const run = new Run();
            const lanes = (to) => run.between(0, to).map(({ number, lane }) => [number, lane]);
            run.take({ t: 1, requests: [[1, 0, 0, 0.5, null, 9, 0, 1], [2, 0.5, null, null, null, 9, 0, 0]] });
            const before = lanes(1);
            run.take({ t: 3, requests: [[1, 0, 0, 0.5, 2, 9, 0, 4], [3, 2.5, null, null, null, 9, 0, 0]] });
            return [before, lanes(3)];
        }"""
    )
    assert lanes == [[[1, 0], [2, 1]], [[1, 0], [2, 1], [3, 0]]]


@pytest.mark.slow
def test_the_pages_link_to_each_other(page: Page, demo_url: str) -> None:
    page.click("#to-chat")
    expect(page.locator("#model")).to_have_value("demo")
    page.keyboard.press("Control+k")
    page.keyboard.type("simulate a load")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(rf"{demo_url}/simulate"))
    expect(page.locator("#text")).not_to_be_empty()
