from contextlib import suppress

import pytest
from textual.widgets import Button, Input, Select, TextArea
from textual.worker import WorkerCancelled

from localllm.errors import UsageError
from localllm.request import SamplingParams
from localllm.tui.settings_panel import FIELDS, Setting, SettingsPanel
from tests.tui.panels import said, talk
from tests.tui.scripted import ScriptedModel, saying

SWITCHES = [("on", {"enable_thinking": True}), ("off", {"enable_thinking": False}), ("default", {})]


class TemplatelessModel(ScriptedModel):
    """A model without a chat template."""

    has_chat_template = False

    def template_arguments(self, given, *, think=None, with_tools=False):
        raise UsageError("scripted has no chat template to give arguments to", "leave them out")


TYPED = {
    "temperature": ("0.25", 0.25),
    "top_k": ("40", 40),
    "top_p": ("0.9", 0.9),
    "min_p": ("0.05", 0.05),
    "repetition_penalty": ("1.1", 1.1),
    "repeat_last_n": ("64", 64),
    "presence_penalty": ("0.5", 0.5),
    "frequency_penalty": ("-0.5", -0.5),
    "seed": ("7", 7),
    "max_tokens": ("5", 5),
    "stop": (r"'a b' \n", ("a b", "\n")),
}


async def opened(app, pilot):
    """Wait for the panel to open, and return it."""
    await pilot.pause()
    await pilot.press("f2")
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()
    return app.screen.query_one(SettingsPanel)


def box(panel, field) -> Input:
    return panel.query_one(f"#{field}").query_one(Input)


async def test_every_field_counts_for_the_next_answer_at_once(tmp_path):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        panel = await opened(app, pilot)
        chat = app.screen.session.chat
        for field, (text, value) in TYPED.items():
            box(panel, field).value = text
            await pilot.pause()
            assert getattr(chat.params, field) == value
        list(chat.ask("Why?"))
        assert chat.model.params == [SamplingParams(**{field: value for field, (_, value) in TYPED.items()})]
        assert TYPED.keys() == set(FIELDS)


async def test_invalid_values_show_the_parameters_error_and_change_nothing(tmp_path):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        panel = await opened(app, pilot)
        chat = app.screen.session.chat
        for field, text, message in (
            ("temperature", "-1", "temperature is -1; give a number from 0 to 1,000"),
            ("top_k", "1.5", "top_k is 1.5; give a whole number from 0 to 2,147,483,647"),
            ("top_p", "[b]x", "top_p is '[b]x'; give a number above 0 to 1"),
            ("stop", "'open", 'cannot read "\'open" (No closing quotation); close the quotes'),
        ):
            before = chat.params
            box(panel, field).value = text
            await pilot.pause()
            fault = panel.query_one(f"#{field}").query_one(".error")
            assert fault.display and str(fault.render()) == message
            assert chat.params == before


async def test_changed_values_are_marked_and_an_empty_field_resets(tmp_path):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        panel = await opened(app, pilot)
        chat = app.screen.session.chat
        setting = panel.query_one("#temperature", Setting)
        assert "●" not in str(setting.query_one("Label").render())
        box(panel, "temperature").value = "0.2"
        await pilot.pause()
        assert str(setting.query_one("Label").render()) == "● temperature"
        assert "Recommended: 0.7" in str(setting.query_one(".meaning").render())
        box(panel, "temperature").value = ""
        await pilot.pause()
        assert chat.params == chat.model.default_params and not setting.has_class("-changed")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["key", "button"])
async def test_reset_takes_all_parameters_back_and_leaves_the_system_prompt(tmp_path, how):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 40)) as pilot:
        panel = await opened(app, pilot)
        chat = app.screen.session.chat
        await pilot.press(*"Be brief.")
        box(panel, "seed").value = "7"
        box(panel, "top_p").value = "bad"
        await pilot.pause()
        if how == "key":
            await pilot.press("ctrl+r")
        else:
            panel.query_one(Button).press()
        await pilot.pause()
        assert chat.params == chat.model.default_params and chat.system == "Be brief."
        assert (box(panel, "seed").value, box(panel, "top_p").value) == ("", "1.0")
        assert not panel.query(".-wrong")


async def test_the_system_prompt_has_lines_and_none_where_it_is_empty(tmp_path):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        panel = await opened(app, pilot)
        chat = app.screen.session.chat
        await pilot.press(*"Be", "enter", *"brief")
        assert chat.system == "Be\nbrief"
        panel.query_one(TextArea).text = "  \n"
        await pilot.pause()
        assert chat.system is None


async def test_thinking_is_switched_by_the_templates_argument(tmp_path):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        panel = await opened(app, pilot)
        chat = app.screen.session.chat
        chat.template_arguments = {"effort": "high"}
        for choice, switch in SWITCHES:
            panel.query_one(Select).value = choice
            await pilot.pause()
            assert chat.template_arguments == {"effort": "high"} | switch


async def test_a_model_without_a_template_has_no_switch_and_no_system_prompt(tmp_path):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        app.screen.session.chat.model = model = TemplatelessModel(saying("Blue."))
        model.name = "a[/b]"
        panel = await opened(app, pilot)
        assert not panel.query_one("#think").display and panel.query_one(TextArea).disabled
        assert "a[/b] has no chat template" in said(app)
        assert app.focused is box(panel, "temperature")


async def test_it_toggles_beside_the_conversation_and_shows_outside_changes(tmp_path):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        panel = await opened(app, pilot)
        assert panel.region.width == 40 and app.screen.query_one("#conversation").region.width == 40
        await pilot.press("f2")
        await pilot.pause()
        assert not app.screen.query(SettingsPanel) and app.focused is app.screen.query_one("#prompt")
        chat = app.screen.session.chat
        chat.params, chat.system = SamplingParams(top_k=3, stop=("\x1b[2J",)), "\x1b[2J"
        panel = await opened(app, pilot)
        assert box(panel, "top_k").value == "3" and "\x1b" not in said(app)


async def test_it_can_be_closed_before_the_template_is_read(tmp_path):
    app = talk(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("f2", "f2", "f2", "f2")
        with suppress(WorkerCancelled):  # with the panel that started it
            await pilot.app.workers.wait_for_complete()
        await pilot.pause(0.2)
        assert app.is_running and not app.screen.query(SettingsPanel)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["small", "large"])
def test_picture(snap_compare, tmp_path, size):
    async def there(pilot):
        panel = await opened(pilot.app, pilot)
        await pilot.press(*"Be brief.", "tab", "tab", "end", "5", "tab", "x")
        await pilot.pause()
        panel.scroll_home(animate=False)
        await pilot.pause()

    assert snap_compare(talk(tmp_path), terminal_size=size, run_before=there)
