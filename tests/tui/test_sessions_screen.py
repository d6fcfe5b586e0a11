import time

import pytest
from textual.widgets import Input

from localllm.conversation.sessions import SessionStore
from localllm.tui.dialogs import Confirm, LineInput
from localllm.tui.picker import Rows
from localllm.tui.sessions_screen import ExportScreen, SessionsScreen
from tests.tui.panels import EVIL, Stage, keep, said


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    """Use UTC, since times are shown in the local time zone."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def chats(tmp_path):
    """Folder of three conversations, the oldest first."""
    folder = tmp_path / "chats"
    keep(folder, 1, ("Why is the sky blue?", "Short waves are scattered more."), ("And at dusk?", "It is red."))
    keep(folder, 2, (EVIL, f"An answer to {EVIL}"))
    keep(folder, 3, ("Tell me a story", "Once upon a time there was a [bold]fox[/bold]."))
    return folder


def stage(home):
    return Stage(home, lambda stage: SessionsScreen(SessionStore(home / "chats")))


def listed(app) -> list[str]:
    return [str(option.prompt) for option in app.screen.query_one(Rows).options]


async def test_the_newest_is_first_and_enter_resumes_it(tmp_path, chats, until):
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: len(listed(app)) == 3)
        assert listed(app)[0].split() == ["2026-01-04", "10:00", "1", "scripted", "Tell", "me", "a", "story"]
        await pilot.press("enter")
        assert app.given == ["20260103-100000-00000a"]


async def test_search_finds_words_with_their_context(tmp_path, chats, until):
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: len(listed(app)) == 3)
        await pilot.press(*"FOX")
        await until(pilot, lambda: len(listed(app)) == 1)
        assert "question 1, answer: Once upon a time there was a [bold]fox[/bold]." in said(app)
        await pilot.press("enter")
        assert app.given == ["20260103-100000-00000a"]


async def test_a_title_is_given(tmp_path, chats, until):
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: len(listed(app)) == 3)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(app.focused, Input) and isinstance(app.screen, LineInput))
        await pilot.press("ctrl+u", "enter")
        await until(pilot, lambda: "a title has 1 to 200 characters" in said(app))
        await pilot.press(*"The fox", "enter")
        await until(pilot, lambda: any("The fox" in row for row in listed(app)))
    assert "The fox" in [one.title for one in SessionStore(chats).list()]


@pytest.mark.quick_every(3)
@pytest.mark.parametrize(("answer", "left"), [("y", 2), ("n", 3), ("escape", 3), ("enter", 3)])
async def test_deleting_asks_first(tmp_path, chats, until, answer, left):
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: len(listed(app)) == 3)
        await pilot.press("ctrl+x")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await until(pilot, lambda: "Delete “Tell me a story”?" in said(app))
        await pilot.press(answer)
        await until(pilot, lambda: app.screen.__class__ is SessionsScreen and len(listed(app)) == left)
    assert len(SessionStore(chats).list()) == left


async def test_one_is_exported(tmp_path, chats, until, monkeypatch):
    monkeypatch.chdir(tmp_path)
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: len(listed(app)) == 3)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(app.screen, ExportScreen))
        app.screen.query_one(Input).focus()
        await pilot.press("enter")
        await until(pilot, (tmp_path / "tell-me-a-story.md").exists)
    assert "Once upon a time" in (tmp_path / "tell-me-a-story.md").read_text()


async def test_a_damaged_file_is_shown_can_be_deleted_and_no_more(tmp_path, until):
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "broken.json").write_text("\x1b[2J nonsense [bold]")
    app = stage(tmp_path)
    async with app.run_test(size=(160, 50)) as pilot:
        await until(pilot, lambda: "(damaged)" in said(app) and "JSON" in said(app))
        assert "\x1b" not in said(app)
        await pilot.press("ctrl+r", "ctrl+s", "enter")
        await pilot.pause()
        assert app.screen.__class__ is SessionsScreen and app.given == []
        await pilot.press("ctrl+x")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await until(pilot, lambda: not list(folder.glob("*.json")))


async def test_a_failed_deletion_is_reported(tmp_path, chats, until):
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: len(listed(app)) == 3)
        for file in chats.glob("*.json"):
            file.unlink()
        await pilot.press("ctrl+x")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await until(pilot, lambda: app._notifications)
        await until(pilot, lambda: not listed(app))
        assert "no conversation is saved" in next(iter(app._notifications)).message


@pytest.mark.slow
async def test_foreign_text_is_neither_markup_nor_codes(tmp_path, chats, until):
    app = stage(tmp_path)
    async with app.run_test(size=(160, 50)) as pilot:
        await until(pilot, lambda: len(listed(app)) == 3)
        await pilot.press(*"answer to")
        await until(pilot, lambda: len(listed(app)) == 1)
        assert "[bold red]x[/] ␛]0;title␇" in said(app)
        assert "\x1b" not in said(app) and "\x07" not in said(app)
        await pilot.press("ctrl+x")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await until(pilot, lambda: "Delete “[bold red]x[/] ␛]0;title␇" in said(app))


async def test_long_lists_are_cut_with_a_note(tmp_path, until):
    for number in range(250):
        keep(tmp_path / "chats", 1, (f"number {number}", "yes"))
        (tmp_path / "chats" / "20260101-100000-00000a.json").rename(tmp_path / "chats" / f"n{number}.json")
    app = stage(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: len(listed(app)) == 200)
        assert "the first 200 of 250" in said(app)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["small", "large"])
def test_picture(snap_compare, tmp_path, chats, size):
    async def there(pilot):
        while len(listed(pilot.app)) != 3:
            await pilot.pause(0.01)
        await pilot.press(*"red")
        while len(listed(pilot.app)) != 2:
            await pilot.pause(0.01)
        await pilot.press("down")
        await pilot.pause()

    assert snap_compare(stage(tmp_path), terminal_size=size, run_before=there)
