import importlib
import pkgutil

import pytest
from textual.app import App
from textual.containers import VerticalScroll
from textual.dom import DOMNode

import localllm.tui
from localllm.conversation.commands import COMMANDS
from localllm.tui.help_screen import HelpScreen, help_sections
from localllm.tui.turn_screen import PanelScreen
from tests.tui.panels import said, talk


async def test_every_key_and_command_is_listed_once(tmp_path):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("f2")
        await pilot.pause()
        found = dict(help_sections(app.screen))
        assert [meaning for _, meaning in found["Conversation"]] == [b.description for b in PanelScreen.BINDINGS]
        assert ("^R", "Reset") in found["Settings"]
        assert {"Quit", "Command palette"} <= {meaning for _, meaning in found["Everywhere"]}
        assert {usage for usage, _ in found["Commands"]} == {command.usage for command in COMMANDS.values()}
        assert all(len(rows) == len(set(rows)) for rows in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("close", ["escape", "f1"])
async def test_it_scrolls_and_closes(tmp_path, close):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("f1")
        await pilot.pause()
        assert "/help, /?" in said(app) and "/bye, /exit" not in said(app)
        await pilot.press("pagedown", "pagedown", "down")
        await pilot.pause()
        assert "/bye, /exit" in said(app)
        await pilot.press("pageup", "pageup", "up")
        assert app.screen.query_one(VerticalScroll).scroll_y == 0
        await pilot.press(close)
        await pilot.pause()
        assert not isinstance(app.screen, HelpScreen)


@pytest.mark.slow
async def test_typing_searches_in_keys_meanings_and_headings(tmp_path):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("f1", *"f4")
        await pilot.pause()
        assert "Models" in said(app) and "/help" not in said(app)
        await pilot.press("ctrl+u", *"commands branch")
        await pilot.pause()
        assert "/branch [NUMBER]" in said(app) and "Quit" not in said(app)
        await pilot.press("ctrl+u", *"[x")
        await pilot.pause()
        assert "no matches" in said(app)


def test_picture(snap_compare, tmp_path):
    assert snap_compare(talk(tmp_path), terminal_size=(80, 24), press=["f1", *"undo"])


def test_every_widget_with_keys_has_a_heading_in_plain_words():
    """Otherwise the help screen shows keys below an empty heading."""
    for module in pkgutil.walk_packages(localllm.tui.__path__, "localllm.tui."):
        importlib.import_module(module.name)
    kinds = [DOMNode]
    for kind in kinds:
        kinds += kind.__subclasses__()
    ours = {kind for kind in kinds if kind.__module__.startswith("localllm.") and not issubclass(kind, App)}
    described = {kind for kind in ours for binding in vars(kind).get("BINDINGS", ()) if binding.description}
    assert len(described) > 10
    assert [kind.__name__ for kind in described if not kind.BINDING_GROUP_TITLE] == []
