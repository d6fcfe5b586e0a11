"""The page at /ui in a real browser with a real model."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from localllm import LLM
from localllm.metrics import percentile
from localllm.server.access import AccessPolicy
from tests.server.conftest import CHROMIUM, serving

STORY = "Tell me a story about a fox"
SAID = ".turn.assistant .said > .prose"

expect.set_options(timeout=60_000)  # of a machine that does other things besides
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@contextmanager
def opened(page: Page, demo_url: str) -> Iterator[Page]:
    """Load the page. Fails if anything is written to the console or requested from another host."""
    page.set_default_timeout(60_000)
    troubles: list[str] = []
    listeners: dict[Any, Callable[[Any], object]] = {
        "console": lambda said: troubles.append(said.text),
        "pageerror": lambda error: troubles.append(str(error)),
        "request": lambda asked: asked.url.startswith(demo_url) or troubles.append(asked.url),
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    page.goto(f"{demo_url}/ui")
    until(page, "document.getElementById('model').value === 'demo'")
    page.allowed = []  # pyright: ignore[reportAttributeAccessIssue]
    yield page
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    assert troubles == page.allowed  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def new_page(browser: Browser, demo_url: str) -> Iterator[Page]:
    """The page in a context of its own, for tests that change more of the browser than what the page stores."""
    with (
        browser.new_context(viewport={"width": 1280, "height": 800}) as context,
        opened(context.new_page(), demo_url) as page,
    ):
        yield page


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        yield context.new_page()


@pytest.fixture
def page(tab: Page, demo_url: str) -> Iterator[Page]:
    """The page, loaded again without what it had stored: a new context would take half a second."""
    try:
        with opened(tab, demo_url) as page:
            yield page
    finally:
        tab.goto("about:blank")
        devtools = tab.context.new_cdp_session(tab)
        devtools.send("Storage.clearDataForOrigin", {"origin": demo_url, "storageTypes": "all"})
        devtools.detach()


def until(page: Page, condition: str) -> None:
    """Look for a condition in each frame, until it is true: `expect` looks only two or three times a second."""
    wait = "const wait = () => new Promise(requestAnimationFrame)"
    page.evaluate(f"async () => {{ {wait}; while (!({condition})) await wait(); }}")


@contextmanager
def slow_network(page: Page) -> Iterator[None]:
    """Answers arrive in seconds, so that a busy machine does not draw all of one at once."""
    network = {"offline": False, "latency": 0, "downloadThroughput": 20_000, "uploadThroughput": -1}
    devtools = page.context.new_cdp_session(page)
    devtools.send("Network.enable")
    devtools.send("Network.emulateNetworkConditions", network)
    yield
    devtools.send("Network.emulateNetworkConditions", network | {"downloadThroughput": -1})
    devtools.detach()


def send(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def ended(page: Page) -> dict[str, Any]:
    """Wait for the end of the answer; return the last turn as stored."""
    until(page, "document.getElementById('send').checkVisibility()")
    return turns(page)[-1]


def turns(page: Page) -> list[dict[str, Any]]:
    kept = page.evaluate("Object.entries(localStorage).filter(([name]) => name.includes('conversation'))")
    return max((json.loads(text) for _, text in kept), key=lambda chat: chat["changed"])["turns"]


def setting(page: Page, **values: str) -> None:
    """Set values in the settings panel."""
    if not page.locator("#settings").is_visible():
        page.click("#toggle-settings")
    for name, value in values.items():
        field = page.locator(f"#settings [name={name}]")
        if not field.is_visible():
            page.locator("#settings details", has=page.locator(f"[name={name}]")).locator("summary").click()
        field.fill(value)


def test_an_answer_grows_on_the_page_with_a_tick_for_each_token(page):
    page.evaluate(
        """selector => {
            const lengths = [0];
            new MutationObserver(() => {
                const { length } = document.querySelector(selector)?.textContent ?? "";
                if (length !== lengths.at(-1)) lengths.push(length);
            }).observe(document.body, { subtree: true, childList: true, characterData: true });
            window.lengths = lengths;
        }""",
        SAID,
    )
    with slow_network(page):
        send(page, STORY)
        until(page, "window.lengths.length > 3")
    turn = ended(page)
    lengths = page.evaluate("window.lengths")
    assert lengths == sorted(lengths)
    tokens = turn["usage"]["completion_tokens"]
    assert tokens > 30 and int(page.get_attribute("#ticks", "data-tokens") or 0) == tokens
    assert turn["told"]["predicted_n"] == tokens
    drawn = " ".join(path.get_attribute("d") or "" for path in page.locator("#ticks path").all())
    assert drawn.count("M") == tokens  # all fit into the strip
    assert re.fullmatch(r"[\d.]+ m?s", page.inner_text("#ttft")) and page.inner_text("#tokens") == str(tokens)
    assert all("server" in page.inner_text(f"#server-{name}") for name in ("ttft", "tps", "p50", "p99"))
    assert page.inner_text("#context").startswith(str(turn["usage"]["total_tokens"]))


def test_settings_apply_to_the_answer(page):
    setting(page, seed="7", temperature="0.9", top_k="40", max_tokens="24", system="Be short.")
    send(page, STORY)
    first = ended(page)
    assert (first["ended"], first["usage"]["completion_tokens"]) == ("length", 24)
    page.click("#new")
    setting(page, seed="7")
    send(page, STORY)
    again = ended(page)
    assert again["content"] == first["content"] != ""
    setting(page, seed="8")
    page.locator("#thread").focus()
    page.keyboard.press("r")
    assert ended(page)["content"] != first["content"]
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    setting(page, schema=json.dumps({**schema, "additionalProperties": False}))
    page.locator("#thread").focus()
    page.keyboard.press("r")
    assert list(json.loads(ended(page)["content"])) == ["a"]


def test_a_number_out_of_bounds_is_not_sent(page):
    setting(page, top_p="2")
    send(page, STORY)
    expect(page.locator("#settings [name=top_p]")).to_be_focused()
    expect(page.locator(".turn")).to_have_count(0)
    assert page.input_value("#prompt") == STORY
    setting(page, top_p="", more="{")
    send(page, STORY)
    expect(page.locator("#toast")).to_contain_text("is not JSON")


def test_stop_keeps_the_partial_answer(page):
    setting(page, more='{"ignore_eos": true}')
    with slow_network(page):
        send(page, STORY)
        expect(page.locator(SAID)).to_contain_text("a")
        page.keyboard.press("Escape")
        turn = ended(page)
    assert turn["ended"] == "stopped" and 0 < turn["told"]["predicted_n"] < 900
    expect(page.locator(SAID)).to_contain_text(turn["content"].split("\n")[0].strip()[:20])
    expect(page.locator(".turn.assistant .told")).to_contain_text("stopped")


def test_editing_and_retrying_create_branches(page):
    setting(page, max_tokens="12")
    send(page, "Hello")
    ended(page)
    page.click("[aria-label='Answer again']")
    ended(page)
    expect(page.locator(".turn.assistant .branches")).to_contain_text("2/2")
    page.click(".turn.assistant [aria-label='Branch before']")
    expect(page.locator(".turn.assistant .branches")).to_contain_text("1/2")
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    page.keyboard.type(", who are you?")
    page.keyboard.press("Enter")
    ended(page)
    expect(page.locator(".turn.user .said")).to_have_text("Hello, who are you?")
    page.locator("#thread").focus()
    page.keyboard.press("[")
    expect(page.locator(".turn.user .said")).to_have_text("Hello")
    assert [turn["role"] for turn in turns(page)] == ["user", "assistant", "assistant", "user", "assistant"]


def test_a_chat_is_saved_renamed_exported_and_deleted(page):
    setting(page, max_tokens="8")
    send(page, "Hello")
    said = ended(page)["content"]
    page.fill("#title", "A greeting")
    page.press("#title", "Enter")
    page.reload()
    expect(page.locator(".turn.user .said")).to_have_text("Hello")
    expect(page.locator(SAID)).to_contain_text(said.split("\n")[0].strip())
    expect(page.locator("#title")).to_have_value("A greeting")
    with page.expect_download() as download:
        page.click("#export-markdown")
    assert download.value.suggested_filename == "A-greeting.md"
    assert download.value.path().read_text() == f"# A greeting\n\n## You\n\nHello\n\n## Answer (demo)\n\n{said}\n"
    page.click("[aria-label='Delete A greeting']")
    expect(page.locator(".turn")).to_have_count(0)
    page.click("#toast button")
    expect(page.locator(".turn")).to_have_count(2)


def test_all_can_be_done_with_keys(page):
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    ended(page)
    expect(page.locator(".turn.user .said")).to_have_text("one\ntwo")
    page.keyboard.press("Control+k")
    page.keyboard.type("light or")
    dark = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(dark)
    page.keyboard.press("Enter")
    assert page.evaluate(dark) != before
    page.locator("#thread").focus()
    page.keyboard.press("?")
    expect(page.locator("#help")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.locator("#prompt")).to_be_focused()
    for _ in range(40):  # nothing that can be focused is without a name
        page.keyboard.press("Tab")
        assert page.evaluate(
            "(({ ariaLabel, textContent, labels }) => ariaLabel || textContent || labels)(document.activeElement)"
        )


@pytest.mark.slow
def test_it_is_light_or_dark_as_the_system_is_or_as_the_visitor_wants(new_page: Page) -> None:
    page = new_page
    colour = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(colour)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(colour)
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(21, 25, 27)")
    page.click("#toggle-theme")
    assert page.evaluate(colour) == dark
    page.reload()
    assert page.evaluate(colour) == dark


@pytest.mark.slow
def test_on_a_phone_nothing_is_wider_than_the_screen(new_page: Page) -> None:
    page = new_page
    page.set_viewport_size({"width": 390, "height": 844})
    page.reload()
    setting(page, max_tokens="30")
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    send(page, STORY)
    ended(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    beyond = (
        "[...document.querySelectorAll('#page *')].filter((one) => one.getBoundingClientRect().right > 391).length"
    )
    assert page.evaluate(beyond) == 0


def test_model_output_is_never_html(page):
    bad = (
        "<img src=x onerror=alert(1)> <script>alert(1)</script>\n\n[a](javascript:alert(1)) ![b](//there.com/b)"
        "\n\n<div onclick=alert(1)>c</div>\n\n```html\n<b>d</b>\n```\n\n&lt;i&gt; " + "> " * 20_000
    )
    page.evaluate(
        """async (text) => {
            const { Growing } = await import("/ui/markdown.js");
            const place = document.getElementById("turns");
            new Growing(place).show(text);
        }""",
        bad,
    )
    tags = page.evaluate("[...document.querySelectorAll('#turns *')].map(({ localName }) => localName)")
    assert not {"img", "script", "b", "div", "i"} & set(tags)
    text = page.inner_text("#turns")
    assert all(part in text for part in ("<img src=x", "<script>", "<div onclick", "<b>d</b>", "<i>"))
    assert page.evaluate("[...document.querySelectorAll('#turns a')].map(({ href }) => href)") == []


def test_incremental_rendering_matches_complete_rendering(page):
    text = (
        "# A *head*\n\none\ntwo\n# next\n\n- a\n- b\n\n  still b\n\n      code\n\n1. x\n   - y\n\n"
        "```py\n\na = 1\n\n```\npara\n---\n\n| a | b |\n|---|--:|\n| `1` | 2 |\n\n> q\n> - r\n\n"
        "last **bold\nline**\n***\n\n    indented\n\nend\r\n"
    )
    assert (
        page.evaluate(
            """async (text) => {
            const { Growing } = await import("/ui/markdown.js");
            const html = (growing) => new XMLSerializer().serializeToString(growing.node);
            const grown = new Growing(document.createElement("div"));
            const wrong = [];
            for (let end = 1; end <= text.length; end++) {
                const whole = new Growing(document.createElement("div"));
                grown.show(text.slice(0, end));
                whole.show(text.slice(0, end));
                if (html(grown) !== html(whole)) wrong.push(text.slice(0, end));
            }
            return wrong;
        }""",
            text,
        )
        == []
    )


@pytest.mark.slow
def test_two_thousand_turns_render_quickly(page):
    kinds = {"thoughts": "I *think*", "calls": [], "model": "demo", "seed": 1, "ended": "stop", "told": {}}
    said = "Some **text**\n\n- with\n- a list\n\n```py\nand = 'code'\n```\n"
    many = [
        {"parent": place - 1, "role": ("user", "assistant")[place % 2], "content": said, **kinds}
        for place in range(2000)
    ]
    chat = {"id": "long", "title": "", "changed": 1, "settings": {}, "turns": many, "leaf": 1999}
    page.evaluate("(chat) => localStorage.setItem('localllm.conversation.long', JSON.stringify(chat))", chat)
    page.evaluate("localStorage.setItem('localllm.shown', JSON.stringify('long'))")
    page.reload()
    expect(page.locator(".turn")).to_have_count(2000)
    expect(page.locator(".turn").last).to_be_in_viewport()


def test_thoughts_are_folded_and_calls_are_shown_and_answered(page):
    page.allowed = ["Failed to load resource: the server responded with a status of 400 (Bad Request)"]
    call = {"id": "call00001", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    said = {"parent": 0, "role": "assistant", "content": "", "thoughts": "Where is **Oslo**?", "calls": [call]}
    asked = {"parent": -1, "role": "user", "content": "How warm is it in Oslo?"}
    rest = {"model": "demo", "seed": 1, "ended": "tool_calls", "told": {}}
    chat = {"id": "call", "title": "", "changed": 1, "settings": {}, "turns": [asked, {**said, **rest}], "leaf": 1}
    page.evaluate("(chat) => localStorage.setItem('localllm.conversation.call', JSON.stringify(chat))", chat)
    page.evaluate("localStorage.setItem('localllm.shown', JSON.stringify('call'))")
    page.reload()
    expect(page.get_by_text("Where is Oslo?")).to_be_hidden()
    page.click(".thoughts summary")
    expect(page.get_by_text("Where is Oslo?")).to_be_visible()
    expect(page.locator(".call pre")).to_have_text('{\n  "city": "Oslo"\n}')
    page.fill(".results textarea", "4 degrees")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click(".results button")
    assert json.loads(sent.value.post_data or "")["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Where is **Oslo**?",
            "tool_calls": [{**call, "type": "function"}],
        },
        {"role": "tool", "content": "4 degrees", "tool_call_id": "call00001"},
    ]
    expect(page.locator(".trouble").last).to_contain_text("The roles are system, user and assistant, not tool")


def test_a_chat_that_is_too_long_is_reported_in_words(page):
    page.allowed = ["Failed to load resource: the server responded with a status of 400 (Bad Request)"]
    send(page, "word " * 3000)
    expect(page.locator(".trouble")).to_contain_text("and the model has room for 1,024")
    assert ended(page)["ended"] == "failed"


def test_a_busy_or_locked_server_is_retried(new_page: Page) -> None:
    page = new_page
    page.allowed = [
        f"Failed to load resource: the server responded with a status of {s}"
        for s in ("503 (Service Unavailable)", "401 (Unauthorized)")
    ]
    refusals = [(503, {"Retry-After": "1"}), (401, {})]

    def answer(route: Any) -> None:
        if refusals:
            status, headers = refusals.pop(0)
            body = json.dumps({"error": {"message": "512 requests wait"}})
            route.fulfill(status=status, headers=headers, body=body)
        else:
            route.continue_()

    page.route("**/v1/chat/completions", answer)
    send(page, "Hello")
    expect(page.locator(".trouble")).to_contain_text("512 requests wait Asking again in 1 s.")
    expect(page.locator("#key")).to_contain_text("The server asks for a key")
    page.fill("#key-text", "secret")
    page.keyboard.press("Enter")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Try again").click()
    assert sent.value.headers["authorization"] == "Bearer secret"
    assert ended(page)["ended"] == "stop"


def test_a_wrong_key_is_reported_and_the_right_one_accepted(browser: Browser, demo: LLM):
    with (
        browser.new_context() as context,
        serving(demo, AccessPolicy(keys=frozenset([hashlib.sha256(b"right").digest()]))) as url,
    ):
        page = context.new_page()
        page.goto(f"{url}/ui")
        expect(page.locator("#key-title")).to_have_text("The server asks for a key")
        for key, then in (("wrong", "The server does not take this key"), ("right", "")):
            page.fill("#key-text", key)
            page.keyboard.press("Enter")
            if then:
                expect(page.locator("#key-title")).to_have_text(then)
        expect(page.locator("#model")).to_have_value("demo")


@pytest.mark.slow
def test_a_lost_server_is_reported(browser: Browser, demo: LLM):
    with browser.new_context() as context:
        page = context.new_page()
        with serving(demo) as url:
            page.goto(f"{url}/ui")
            expect(page.locator("#model")).to_have_value("demo")
        send(page, "Hello")
        expect(page.locator(".trouble")).to_contain_text("The server does not answer")
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
        expect(page.locator("#gone")).to_be_visible()


def test_every_token_has_a_tick_and_drafts_a_colour(page):
    """Nine tokens arrive in seven steps; the third accepts two draft tokens."""
    measured = page.evaluate(
        """async () => {
            const { Stopwatch } = await import("/ui/stopwatch.js");
            const { Strip } = await import("/ui/strip.js");
            const watch = new Stopwatch();
            watch.restart(1000);
            [[1, 0], [1, 0], [3, 2], [1, 0], [1, 0], [1, 0], [1, 0]].forEach(([tokens, guessed], moment) =>
                watch.arrive(tokens, guessed, 1050 + 10 * moment));
            document.getElementById("strip").hidden = false;
            new Strip().follow(watch);
            return [watch.ttft, watch.rate, watch.gap(50), watch.gap(99)];
        }"""
    )
    gaps = [10, 10, 0, 0, 10, 10, 10, 10]
    assert measured == pytest.approx([50, 8 / 60 * 1e3, percentile(gaps, 50), percentile(gaps, 99)])
    ticks = {name: page.get_attribute(f"#ticks .{name}", "d") or "" for name in ("first", "token", "guessed")}
    assert {name: path.count("M") for name, path in ticks.items()} == {"first": 1, "token": 6, "guessed": 2}


@pytest.mark.slow
def test_a_full_storage_is_reported(page):
    page.evaluate("localStorage.setItem('other', 'x'.repeat(5 * 2 ** 20 - 2000))")
    setting(page, max_tokens="8")
    send(page, "Hello " * 300)
    expect(page.locator("#toast")).to_contain_text("storage is full")
    expect(page.locator("#send")).to_be_visible()


@pytest.mark.slow
def test_the_numbers_of_several_models_are_summed(page):
    text = '# HELP a b\n# TYPE a gauge\na{model="x}"} 2.0\na{model="y"} 3\nb 1e3\n'
    sums = "async (text) => (await import('/ui/gauges.js')).sums(text)"
    assert page.evaluate(sums, text) == {"a": 5, "b": 1000}


@pytest.mark.slow
def test_gauges_show_the_load(page: Page, demo_url: str) -> None:
    """The page looks every two seconds, so two clients keep the server busy for longer."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": STORY}],
        "ignore_eos": True,
        "max_tokens": 400,
    }
    stopped = threading.Event()

    def keep_asking() -> None:
        while not stopped.is_set():
            httpx2.post(f"{demo_url}/v1/chat/completions", json=body, timeout=60).raise_for_status()

    with ThreadPoolExecutor() as clients:
        busy = [clients.submit(keep_asking) for _ in range(2)]
        try:
            expect(page.locator("#running")).to_have_text("2")
            expect(page.locator("#waiting")).to_have_text("0")
            expect(page.locator("#blocks-told")).not_to_have_text("0%")
        finally:
            stopped.set()
        for client in busy:
            client.result()
    expect(page.locator("#running")).to_have_text("0")
