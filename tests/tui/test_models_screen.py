import pytest
from rich.cells import cell_len

from localllm.errors import NetworkError
from localllm.tui.dialogs import Confirm
from localllm.tui.models_screen import ModelsScreen
from localllm.tui.picker import Rows
from tests.tui.panels import EVIL, OFFERS, FakeMachine, Stage, said


def stage(home, machine=None):
    return Stage(home, lambda stage: ModelsScreen(machine or FakeMachine()))


def listed(app) -> list[str]:
    return [str(option.prompt) for option in app.screen.query_one(Rows).options]


async def test_every_offer_is_listed_with_size_and_speed(tmp_path, until):
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: listed(app))
        rows = listed(app)
        assert len(rows) == len(OFFERS)
        assert [" ".join(rows[place].split()) for place in (0, 3, 4, 5)] == [
            "● demo 656K 2.60 MB ✓ 12.0 MB of 23.5 GB ~2000",
            "↓ best ★ 4B 3.00 GB ✓ 5.00 GB of 23.5 GB ~21.0",
            "↓ giant 70.6B 141 GB ✗ 143 GB of 23.5 GB -",
            "↓ riddle - - ? -",
        ]
        assert {cell_len(row) for row in rows} == {app.screen.query_one(Rows).scrollable_content_region.width}


async def test_the_screen_responds_while_offers_are_computed(tmp_path, until):
    machine = FakeMachine()
    machine.go.clear()
    app = stage(tmp_path, machine)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press(*"gia")
        assert app.screen.query_one("Search").value == "gia" and app.screen.query_one(Rows).loading
        machine.go.set()
        await until(pilot, lambda: len(listed(app)) == 1)
        assert "giant" in listed(app)[0] and not app.screen.query_one(Rows).loading
        assert machine.asked == 1


async def test_leaving_before_the_offers_arrive_is_safe(tmp_path, until):
    machine = FakeMachine()
    machine.go.clear()
    app = stage(tmp_path, machine)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: machine.asked)
        await pilot.press("escape")
        machine.go.set()
        await pilot.pause(0.2)
        assert app.given == [None] and app.is_running


async def test_typing_filters_and_enter_chooses(tmp_path, until):
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: listed(app))
        await pilot.press(*"apache 4b")
        await until(pilot, lambda: len(listed(app)) == 1)
        await pilot.press("enter")
        assert app.given == ["best"]


async def test_an_empty_search_is_shown(tmp_path, until):
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: listed(app))
        await pilot.press(*"zzz")
        await until(pilot, lambda: "no matching models" in said(app))
        await pilot.press("enter", "escape")
        assert app.given == [None]


async def test_arrows_move_while_the_search_has_the_focus_and_the_cursor_stays_on_its_row(tmp_path, until):
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: listed(app))
        await pilot.press("down")
        await pilot.resize_terminal(160, 50)
        await until(pilot, lambda: "licence" in said(app))
        await pilot.press("enter")
        assert app.given == ["mine"]


async def test_a_click_chooses(tmp_path, until):
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: listed(app))
        await pilot.click(Rows, offset=(4, 1))
        await pilot.pause()
        assert app.given == ["mine"]


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "given"), [("n", []), ("y", ["giant"])])
async def test_a_model_that_does_not_fit_needs_confirmation(tmp_path, until, answer, given):
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: listed(app))
        await pilot.press(*"giant")
        await until(pilot, lambda: len(listed(app)) == 1)
        assert "does not fit: needs 143 GB, 23.5 GB free" in said(app)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press(answer)
        await pilot.pause()
        assert app.given == given


async def test_foreign_text_is_neither_markup_nor_codes(tmp_path, until):
    app = stage(tmp_path)
    async with app.run_test(size=(160, 50)) as pilot:
        await until(pilot, lambda: listed(app))
        await pilot.press("down", "down")
        await pilot.pause()
        assert "[bold red]x[/] ␛]0;title␇" in said(app)
        assert "\x1b" not in said(app) and "\x07" not in said(app)
        await pilot.press("enter")
        assert app.given == [EVIL]


async def test_without_colors_none_is_sent_and_the_cursor_is_seen(tmp_path, until, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: listed(app))
        await pilot.pause()
        segments = [segment for strip in app.screen._compositor.render_strips() for segment in strip]
        styles = [segment.style for segment in segments if segment.style]
        assert all(color is None or color.is_default for style in styles for color in (style.color, style.bgcolor))
        assert [s.text.split()[1] for s in segments if s.style and s.style.underline] == ["demo"]


async def test_an_error_replaces_the_list(tmp_path, until):
    app = stage(tmp_path, FakeMachine(NetworkError("the [hub] is away", "come back later")))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "the [hub] is away; come back later" in said(app))
        await pilot.press("escape")
        assert app.given == [None]


async def test_an_error_does_not_shift_the_layout(tmp_path, until):
    app = stage(tmp_path, FakeMachine(NetworkError("away\x1b[2J")))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "away␛[2J" in said(app))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["small", "large"])
def test_picture(snap_compare, tmp_path, size):
    async def there(pilot):
        while not listed(pilot.app):
            await pilot.pause(0.01)
        await pilot.press("down", "down", "down", "down")
        await pilot.pause()

    assert snap_compare(stage(tmp_path), terminal_size=size, run_before=there)
