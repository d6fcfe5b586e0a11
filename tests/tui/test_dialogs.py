import pytest
from textual.app import App

from localllm.errors import UsageError
from localllm.tui.dialogs import Confirm, LineInput


async def answers(dialog, *keys, click=None):
    given, app = [], App()
    async with app.run_test(size=(80, 24)) as pilot:
        await app.push_screen(dialog, given.append)
        await pilot.press(*keys)
        if click:
            await pilot.click(click)
        await pilot.pause()
    return given


@pytest.mark.parametrize(
    ("keys", "answer"),
    [("y", True), ("n", False), (["escape"], None), (["enter"], False), (["right", "enter"], True)],
)
async def test_only_a_clear_yes_is_one(keys, answer):
    assert await answers(Confirm("Delete [bold]it[/bold]?", "Delete"), *keys) == [answer]


async def test_buttons_can_be_clicked():
    assert await answers(Confirm("Delete it?", "Delete"), click="#yes") == [True]


async def test_a_dialog_repeats_until_the_input_is_valid():
    def check(line):
        if line == "bad":
            raise UsageError("that is [bad]", "give another")

    assert await answers(LineInput("Name?", "ba", check), *"bad", "enter") == []
    assert await answers(LineInput("Name?", "old", check), *"bad", "enter", "backspace", "enter") == ["ba"]
    assert await answers(LineInput("Name?", "ba", check), "escape") == [None]
