"""`localllm top` on a screen, with a scripted server."""

import dataclasses

import pytest

from localllm.errors import ServerUnreachable
from localllm.metrics import Slot
from localllm.tui.top_app import ModelBoard, TopApp
from localllm.tui.top_board import ModelSnapshot, ServerSnapshot

COUNTS = {
    "steps": 100,
    "prompt_tokens": 1000,
    "cached_tokens": 620,
    "output_tokens": 500,
    "draft_tokens": 50,
    "accepted_tokens": 20,
}
TIMES = {"p50_s": 0.0123, "p95_s": 0.25, "p99_s": 1.5}
RECENT = {"window_s": 300.0, "answers": 42, "ttft": TIMES, "itl": TIMES, "queue": TIMES}
SLOTS = (
    Slot(7, 12.5, 4096, 1024, 4400, 305, 276, 7.6, False),
    Slot(8, 1.25, 4096, 0, 1024, 0, 64, None, False),
    Slot(9, 0.2, 12, 0, 0, 0, 0, None, True),
)
MODEL = ModelSnapshot(
    "qwen3:8b", "cpu", "bfloat16", 8192, 5_200_000_000, None, 3, 2, 1, 1024, 440, 512, COUNTS, RECENT, SLOTS
)


class FakeServer:
    """A server whose counters advance with every snapshot, and which does not respond if `gone`."""

    def __init__(self, model=MODEL, *others):
        self.models = (model, *others)
        self.looks = 0
        self.gone = False

    def __call__(self):
        if self.gone:
            raise ServerUnreachable("no server answers", "start one")
        self.looks += 1
        return self.at(self.looks)

    version = "0.1.0"

    def at(self, second):
        further = {"output_tokens": sum(60 * (k % 7) for k in range(second)), "prompt_tokens": 300 * second}
        counts = {name: count + further.get(name, 0) for name, count in COUNTS.items()}
        models = tuple(dataclasses.replace(model, counts=counts) for model in self.models)
        return ServerSnapshot(self.version, float(second), {"cpu": 18_000_000_000}, models, ())


def app_of(look):
    return TopApp(look, "http://127.0.0.1:11434", interval_s=0.01)


async def settle(pilot):
    """Take thirty snapshots, after discarding earlier ones."""
    app = pilot.app
    app.paused = True
    await pilot.pause(0.1)
    board = app.query_one(ModelBoard)
    board.decode.clear()
    board.prefill.clear()
    app.previous = None
    for second in range(30):
        app.show_snapshot(app.fetch_snapshot.at(second))


def test_at_80_columns(snap_compare):
    assert snap_compare(app_of(FakeServer()), terminal_size=(80, 24), run_before=settle)


async def test_activity_is_shown(until):
    app = app_of(FakeServer())
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.query(ModelBoard))
        shown = str(app.query_one(ModelBoard).render())
        for part in ("qwen3:8b", "running 2, waiting 1", "12.3 ms", "43% of 1,024", "prefill 25%", "waiting"):
            assert part in shown


async def test_a_lost_server_is_reported_and_polled_again(until):
    look = FakeServer()
    app = app_of(look)
    async with app.run_test() as pilot:
        await until(pilot, lambda: app.query(ModelBoard))
        look.gone = True
        await until(pilot, lambda: app.query_one("#error").display)
        look.gone = False
        await until(pilot, lambda: not app.query_one("#error").display)


async def test_server_text_cannot_move_the_cursor(until):
    look = FakeServer(dataclasses.replace(MODEL, name="[/a]\x1b[2J", device="\x1b]0;title\x07"))
    look.version = "\x9b1m"
    app = app_of(look)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.query(ModelBoard))
        app.paused = True
        await pilot.pause(0.1)
        app.show_error("[/b] \x1b[3J")
        await pilot.pause(0.1)
        text = "".join(strip.text for strip in app.screen._compositor.render_strips())
        assert not {"\x1b", "\x07", "\x9b"} & set(text)
        assert "[/a]␛[2J" in text and "[/b] ␛[3J" in text


async def test_models_come_and_go(until):
    look = FakeServer()
    app = app_of(look)
    async with app.run_test() as pilot:
        await until(pilot, lambda: len(app.query(ModelBoard)) == 1)
        look.models = (MODEL, dataclasses.replace(MODEL, name="[bold]other"))
        await until(pilot, lambda: len(app.query(ModelBoard)) == 2)
        look.models = ()
        await until(pilot, lambda: not app.query(ModelBoard) and app.query_one("#error").display)


@pytest.mark.slow
async def test_it_pauses_and_changes_its_pace(until):
    look = FakeServer()
    app = app_of(look)
    async with app.run_test() as pilot:
        await until(pilot, lambda: look.looks > 2)
        await pilot.press("space")
        await pilot.pause(0.1)
        looks = look.looks
        await pilot.pause(0.1)
        assert look.looks == looks
        await pilot.press("space")
        await until(pilot, lambda: look.looks > looks)
        await pilot.press("minus")
        assert app.interval_s > 0.01
        await pilot.press("q")
    assert app.return_value == 0


@pytest.mark.slow
async def test_a_wide_screen_has_more_room(until):
    app = app_of(FakeServer())
    async with app.run_test(size=(160, 50)) as pilot:
        await until(pilot, lambda: app.query(ModelBoard) and len(app.query_one(ModelBoard).decode) > 50)
        assert max(map(len, str(app.query_one(ModelBoard).render()).splitlines())) > 80
