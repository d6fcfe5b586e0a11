import pytest
from textual.command import CommandPalette
from textual.widgets import Input, OptionList

from localllm.conversation.commands import COMMANDS
from localllm.tui.help_screen import HelpScreen, key_bindings
from localllm.tui.palette import fixed_part
from tests.tui.panels import EVIL, FakeMachine, keep, said, talk


def listed(app) -> list[str]:
    return [str(option.prompt) for option in app.screen.query_one(OptionList).options]


async def searched(app, pilot, until, text) -> None:
    """Type a text into the palette, and wait for a match."""
    await pilot.press("ctrl+p")
    await until(pilot, lambda: isinstance(app.screen, CommandPalette) and app.screen.query_one(OptionList).options)
    app.screen.query_one(Input).value = text
    await until(pilot, lambda: any(text.split()[-1] in row for row in listed(app)[:1]))


async def chosen(app, pilot, until) -> None:
    await pilot.press("enter")
    await until(pilot, lambda: not isinstance(app.screen, CommandPalette))
    await pilot.pause()


@pytest.mark.parametrize(
    ("text", "heard"),
    [
        ("/undo", ("command", "/undo", True)),
        ("/load", ("command", "/load", False)),
        ("model best", ("model", "best")),
        ("Why is the sky", ("session", "20260101-100000-00000a")),
    ],
)
async def test_commands_models_and_conversations_are_found_and_chosen(tmp_path, until, text, heard):
    keep(tmp_path / "chats", 1, ("Why is the sky blue?", "Short waves."))
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        screen = app.screen
        await searched(app, pilot, until, text)
        await chosen(app, pilot, until)
        assert screen.heard == [heard]


async def test_actions_are_found_by_description(tmp_path, until):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await searched(app, pilot, until, "Help")
        await chosen(app, pilot, until)
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))


async def test_a_theme_is_applied_and_saved(tmp_path, until):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await searched(app, pilot, until, "theme localllm-light")
        await chosen(app, pilot, until)
        await until(pilot, lambda: app.theme == "localllm-light")
        await until(pilot, (tmp_path / "theme").exists)


async def test_every_key_and_command_is_shown_before_anything_is_typed(tmp_path, until):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        meanings = {key.meaning for key in key_bindings(app.screen)} - {"Command palette"}
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))
        wanted = meanings | {command.usage for command in COMMANDS.values()}
        await until(pilot, lambda: wanted <= {row.splitlines()[0] for row in listed(app)})


async def test_slow_model_lists_do_not_block(tmp_path, until):
    machine = FakeMachine()
    machine.go.clear()
    app = talk(tmp_path, machine)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await searched(app, pilot, until, "/undo")
        assert machine.asked == 1
        await pilot.press("escape")
        machine.go.set()


async def test_foreign_text_is_neither_markup_nor_codes(tmp_path, until):
    keep(tmp_path / "chats", 1, (EVIL, "yes"))
    app = talk(tmp_path)
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.pause()
        await searched(app, pilot, until, "bold red")
        assert "[bold red]x[/] ␛]0;title␇" in said(app) and "\x1b" not in said(app)


def test_a_command_without_arguments_is_complete():
    wholes = {"/undo": ("/undo", True), "/system [TEXT | none]": ("/system", True), "/help, /?": ("/help", True)}
    parts = {"/save NAME": ("/save", False), "/export [all] FILE.md | FILE.json": ("/export", False)}
    for usage, told in {**wholes, **parts, "/set parameter [NAME VALUE]": ("/set parameter", True)}.items():
        assert fixed_part(usage) == told
