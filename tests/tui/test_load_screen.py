"""A model being pulled and loaded on screen, from a local hub."""

import threading

import pytest
from textual.widgets import Static

from localllm.hub.catalog import PACKAGE_FOLDER
from localllm.hub.partial_file import PARTIAL_SUFFIX
from tests.hub.faults import flipped, refused, stalled
from tests.shared import shared
from tests.tui.host import loads, this_machine

DEMO = PACKAGE_FOLDER / "boxed" / "demo"


def told(app) -> str:
    return "\n".join(str(static.render()) for static in app.screen.query(Static))


def threads_of_models() -> list[str]:
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith(("localllm-open", "ThreadPoolExecutor"))
    ]


@pytest.fixture
def slow(hub, cache):
    """A hub that takes seconds to send a model."""
    hub.add("org/tiny", DEMO)
    hub.rate = 2_000_000
    return hub


async def test_a_downloaded_model_loads(until):
    app = loads(this_machine(), "demo")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.given)
        [model] = app.given
        assert model.name == "demo"
        model.close()


@pytest.mark.slow
async def test_a_model_is_pulled_and_every_phase_is_shown(slow, until):
    app = loads(this_machine(), "org/tiny")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "left" in told(app))
        assert "5.14M parameters · unknown licence · 6.17 MB to download" in told(app)
        assert "fits: " in told(app)
        assert "model.safetensors" in told(app)
        opening = app.screen.load_task
        await until(pilot, lambda: app.given)
        names = [phase.name for phase in opening.phases]
        assert names == [
            "download",
            "import",
            "header",
            "tokenizer",
            "device",
            "weights",
            "cache",
            "compile",
            "prefix cache",
        ]
        assert all(phase.ended >= phase.began for phase in opening.phases)
        weights = next(phase for phase in opening.phases if phase.name == "weights")
        assert weights.done == weights.total > 5_000_000
        assert all(file.verified for file in opening.files.values())
        app.given[0].close()


async def test_escape_confirms_before_stopping_a_download_that_resumes(slow, cache, until):
    app = loads(this_machine(), "org/tiny")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: slow.sent("model.safetensors") > 1_000_000)
        await pilot.press("escape")
        await until(pilot, lambda: "Stop the download?" in told(app))
        await pilot.press("n")
        await until(pilot, lambda: "Esc Cancel" in told(app))
        await pilot.press("escape", "y")
        await until(pilot, lambda: app.given == [None])
        await until(pilot, lambda: not threads_of_models(), 5)
        assert list(cache.rglob(f"*{PARTIAL_SUFFIX}"))
        slow.rate = None
        before = slow.sent("model.safetensors")
        app.show()
        await until(pilot, lambda: len(app.given) == 2)
        assert slow.sent("model.safetensors") - before < 5_500_000  # not the whole of it again
        app.given[1].close()
        assert not list(cache.rglob(f"*{PARTIAL_SUFFIX}"))


async def test_a_stalled_download_can_be_left(slow, until):
    slow.disturb(stalled(1_000_000), "model.safetensors", times=None)
    app = loads(this_machine(), "org/tiny")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: slow.sent("model.safetensors") > 900_000)
        await pilot.press("escape", "y")
        await until(pilot, lambda: app.given == [None], 2)
        await until(pilot, lambda: not threads_of_models(), 10)


async def test_loading_can_be_cancelled_for_another_model(until):
    app = loads(this_machine(), "demo")
    async with app.run_test(size=(80, 24)) as pilot:
        opening = app.screen.load_task
        await pilot.press("escape")
        await until(pilot, lambda: app.given)
        assert app.given == [None]
        assert opening.finished
        app.show()
        await until(pilot, lambda: len(app.given) == 2)
        assert app.given[1].name == "demo"
        app.given[1].close()


async def test_an_unknown_name_lists_close_matches(hub, cache, until):
    app = loads(this_machine(), "qwen3:0.6")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "R Try again" in told(app))
        assert "did you mean" in told(app)
        assert "qwen3:0.6b" in told(app)
        await pilot.press("escape")
        await until(pilot, lambda: app.given == [None])


async def test_a_missing_network_is_reported_and_a_retry_succeeds(hub, cache, until):
    hub.add("org/tiny", DEMO)
    hub.disturb(refused(503), "/api/", times=5)
    app = loads(this_machine(), "org/tiny")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "R Try again" in told(app))
        assert "check the connection" in told(app)
        await pilot.press("r")
        await until(pilot, lambda: app.given)
        app.given[0].close()


async def test_a_model_that_does_not_fit_is_refused_and_nothing_is_loaded(hub, cache, until, monkeypatch):
    monkeypatch.setattr("localllm.cli.loading.free_bytes", lambda device: 1_000_000)
    monkeypatch.setattr("localllm.cli.offers.free_bytes", lambda device: 1_000_000)
    hub.add("org/tiny", DEMO)
    app = loads(this_machine(), "org/tiny")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "R Try again" in told(app))
        assert "does not fit: " in told(app)
        assert "1.00 MB are free" in told(app)
        assert "use a smaller model" in told(app)
        assert hub.sent("model.safetensors") <= 2**17
        assert not app.given


async def test_a_file_that_comes_damaged_twice_is_reported(hub, cache, until):
    hub.add("org/tiny", DEMO)
    hub.disturb(flipped(100_000), "model.safetensors", times=None)
    app = loads(this_machine(), "org/tiny")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "R Try again" in told(app))
        assert "twice had a digest other than the Hub's" in told(app)


async def test_a_full_disk_is_reported_before_the_download(hub, cache, until, monkeypatch):
    monkeypatch.setattr("localllm.hub.pull.SPARE_BYTES", 2**60)
    hub.add("org/tiny", DEMO)
    app = loads(this_machine(), "org/tiny")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "R Try again" in told(app))
        assert "delete files" in told(app)


async def test_a_model_is_quantized_and_saved(until):
    app = loads(this_machine(quant="int8"), str(shared("TinyStories-656K-hf")))
    async with app.run_test(size=(80, 24)) as pilot:
        opening = app.screen.load_task
        await until(pilot, lambda: app.given)
        quantized = next(phase for phase in opening.phases if phase.name == "quantize")
        assert quantized.done == quantized.total > 3
        app.given[0].close()
        app.show()
        again = app.screen.load_task
        await until(pilot, lambda: len(app.given) == 2)
        assert next(phase for phase in again.phases if phase.name == "quantize").total == 0
        app.given[1].close()
