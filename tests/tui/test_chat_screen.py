"""Conversations in the app: asking, stopping, editing and leaving."""

import json
import re
import signal
import threading
from dataclasses import replace

import pytest
from textual.command import CommandPalette
from textual.events import Paste

from localllm.conversation.chat import Chat
from localllm.errors import ContextOverflow, UsageError
from localllm.metrics import StepReads
from localllm.request import FinishReason, GenerationEvent
from localllm.tui.app import ChatApp
from localllm.tui.chat_screen import DOUBLE_INTERRUPT_S, MAX_RATE_ATTEMPTS, ChatScreen
from localllm.tui.help_screen import HelpScreen
from localllm.tui.load_screen import LoadScreen
from localllm.tui.picker import CommandChosen, ModelChosen, SessionChosen
from localllm.tui.prompt import Prompt
from localllm.tui.transcript.turn_view import TurnView
from tests.tui.panels import OFFERS, keep
from tests.tui.scripted import ScriptedMachine, ScriptedModel, app_with, saying


def seen(app):
    """Lines of text on the screen."""
    return "\n".join(strip.text.rstrip() for strip in app.screen._compositor.render_strips())


def told(app):
    """Text of the notifications."""
    return " ".join(notification.message for notification in app._notifications)


def words(app):
    """The text with all whitespace normalized."""
    return " ".join(seen(app).split())


def beside_the_scrollbar(app):
    """Lines of the conversation without the scrollbar."""
    return [line[:70].rstrip() for line in seen(app).splitlines()[2:16]]


@pytest.fixture
def talk(opened, until):
    """Send a question, and wait for the answer."""

    async def ask(pilot, text):
        pilot.app.screen.prompt.focus()
        pilot.app.screen.prompt.text = text
        await pilot.press("enter")
        await answered(pilot)

    async def answered(pilot):
        await until(pilot, lambda: not pilot.app.screen.answer_thread)
        await pilot.pause(0.05)

    ask.answered = answered
    return ask


async def test_a_question_is_answered(tmp_path, opened, talk):
    model = ScriptedModel(saying("Hello **to you**.", thoughts="Who is it?"))
    app = app_with(model, tmp_path)
    async with opened(app) as pilot:
        await pilot.press(*"hello", "enter")
        await talk.answered(pilot)
        assert app.screen.chat.messages == [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "Hello **to you**.", "reasoning_content": "Who is it?"},
        ]
        text = seen(app)
        assert "> hello" in text and "Hello to you." in text
        assert "▸ thoughts, 3 words" in text and "Who is it" not in text
        await pilot.press("tab", "t")
        assert "Who is it?" in seen(app)
    assert model.closed


@pytest.mark.slow
async def test_the_bundled_model_answers_and_branches_share_the_prefix(demo, tmp_path, opened, talk):
    """The common prefix of two branches is cached, except for its last partial block."""
    app = app_with(demo, tmp_path)
    async with opened(app) as pilot:
        chat = app.screen.chat
        await talk(pilot, "Tell me a story about a fox")
        first = chat.last_metrics
        assert first and chat.current.answer
        await talk(pilot, "Tell me another one")
        second = chat.last_metrics
        await pilot.press("tab", "r")
        await talk.answered(pilot)
        assert len(chat.current.siblings) == 2
        before = first.prompt_tokens + first.output_tokens
        whole = demo.block_tokens
        assert chat.last_metrics.prompt_tokens == second.prompt_tokens
        assert chat.last_metrics.cached_tokens >= (second.prompt_tokens - 1) // whole * whole
        await pilot.press("e")
        app.screen.prompt.text = "Something else"
        await pilot.press("enter")
        await talk.answered(pilot)
        assert len(chat.current.siblings) == 3 and len(chat.turns) == 2
        assert chat.last_metrics.cached_tokens >= before // whole * whole - whole


async def test_stop_keeps_the_partial_answer(tmp_path, opened, until, talk):
    gate = threading.Event()
    model = ScriptedModel([GenerationEvent(1, "Half of "), gate, *saying("the rest")])
    app = app_with(model, tmp_path)
    async with opened(app) as pilot:
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "Half of" in seen(app))
        await pilot.press("escape")
        await talk.answered(pilot)
        assert app.screen.chat.current.answer == "Half of "
        assert "stopped" in seen(app)


async def test_an_unanswered_question_returns_to_the_prompt(tmp_path, opened, until, talk):
    model = ScriptedModel([ContextOverflow(9000, 4096, "raise --context")], saying("now it works"))
    app = app_with(model, tmp_path)
    async with opened(app) as pilot:
        await pilot.press(*"too long", "enter")
        await talk.answered(pilot)
        assert app.screen.chat.messages == []
        assert app.screen.prompt.text == "too long"
        assert "error: the prompt has 9000 tokens and the context holds 4096; raise --context" in words(app)
        await pilot.press("enter")
        await talk.answered(pilot)
        assert "now it works" in seen(app) and "error" not in seen(app)


async def test_a_truncated_answer_names_the_limit(tmp_path, opened, talk):
    app = app_with(ScriptedModel(saying("It goes on", finish_reason=FinishReason.LENGTH)), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "hi")
        assert "cut by the context (4096 tokens); load the model with a larger --context, up to 8192" in words(app)


@pytest.mark.slow
async def test_editing_creates_a_branch_and_arrows_switch_branches(tmp_path, opened, talk):
    model = ScriptedModel(saying("one"), saying("two"), saying("three"))
    app = app_with(model, tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "first")
        await talk(pilot, "second")
        await pilot.press("tab", "e")
        assert app.screen.prompt.text == "second"
        await pilot.press("end", "x", "enter")
        await talk.answered(pilot)
        assert [turn.question for turn in app.screen.chat.turns] == ["first", "secondx"]
        assert "◂ 2/2 ▸" in seen(app) and "three" in seen(app)
        await pilot.press("tab", "left")
        await pilot.pause(0.1)
        assert app.screen.chat.current.question == "second"
        assert "◂ 1/2 ▸" in seen(app) and "two" in seen(app) and "three" not in seen(app)


async def test_undo_and_redo(tmp_path, opened, talk):
    app = app_with(ScriptedModel(saying("one"), saying("two")), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "first")
        await talk(pilot, "second")
        await pilot.press("tab", "u")
        await pilot.pause(0.1)
        assert [turn.question for turn in app.screen.chat.turns] == ["first"]
        assert "> second" not in seen(app)
        await pilot.press("U")
        await pilot.pause(0.1)
        assert "> second" in seen(app)


async def test_commands_act_as_in_the_line_editor(tmp_path, opened, talk):
    app = app_with(ScriptedModel(saying("one"), saying("two")), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "first")
        await talk(pilot, "/regenerate")
        assert "◂ 2/2 ▸" in seen(app)
        await talk(pilot, "/show")
        assert "parameters" in seen(app)
        await talk(pilot, "/undu")
        assert app.screen.prompt.text == ""
        await pilot.press("up")
        assert app.screen.prompt.text == "/undu"
        app.screen.prompt.text = "/help"
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)
        headings = {heading for heading, _ in app.screen.sections}
        assert {"Chat", "Prompt", "Conversation", "Commands"} <= headings
        assert not [heading for heading in headings if heading != heading.capitalize()], "names of classes"
        await pilot.press("escape")
        await talk(pilot, "/bye")
    assert app.return_code == 0


async def test_without_colours_there_are_none_not_even_greys(tmp_path, monkeypatch, opened, talk):
    monkeypatch.setenv("NO_COLOR", "1")
    app = app_with(ScriptedModel(saying("Hello **to you**.\n\n```python\nx = 1\n```")), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "hi")
        segments = [segment for strip in app.screen._compositor.render_strips() for segment in strip]
        styles = [segment.style for segment in segments if segment.style]
        assert all(color is None or color.is_default for style in styles for color in (style.color, style.bgcolor))


@pytest.mark.slow
async def test_code_is_copied_and_saved_but_never_over_a_file_unasked(tmp_path, monkeypatch, opened, talk, until):
    monkeypatch.chdir(tmp_path)
    answer = "Two:\n\n```python\na = 1\n```\n\nand\n\n```sh\nls\n```\n"
    app = app_with(ScriptedModel(saying(answer)), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "code")
        await pilot.press("tab", "y")
        assert app.clipboard == "ls"
        await pilot.press("N", "y")
        assert app.clipboard == "a = 1"
        await pilot.press("c")
        assert app.clipboard == answer
        await pilot.press("s", "enter")
        await until(pilot, lambda: (tmp_path / "code.py").exists())
        assert (tmp_path / "code.py").read_text() == "a = 1\n"
        (tmp_path / "code.py").write_text("mine")
        await pilot.press("s", "enter")
        await pilot.pause(0.1)
        await pilot.press("n")
        assert (tmp_path / "code.py").read_text() == "mine"
        await pilot.press("s", "enter")
        await pilot.pause(0.1)
        await pilot.press("y")
        await until(pilot, lambda: (tmp_path / "code.py").read_text() == "a = 1\n")


async def test_model_output_cannot_move_the_cursor_or_open_links(tmp_path, opened, talk):
    hostile = "[@click=app.quit]x[/] \x1b[2J \x9b1m [a](javascript:alert(1))\n\n`\x07`"
    app = app_with(ScriptedModel(saying(hostile)), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "[red]hi[/] \x1b[0m".replace("\x1b", "␛"))
        text = seen(app)
        assert "[@click=app.quit]x[/] ␛[2J" in text and "[red]hi[/]" in text
        assert not any(character in text for character in "\x1b\x07\x9b")


async def test_a_click_on_a_link_copies_its_address(tmp_path, opened, talk):
    app = app_with(ScriptedModel(saying("[word](https://x.example/it's)")), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "hi")
        await pilot.click(app.screen.transcript.views[0].answer, offset=(1, 0))
        assert app.clipboard == "https://x.example/it's"


async def test_the_answer_is_read_on_through_a_resize(tmp_path, opened, until, talk):
    gate = threading.Event()
    app = app_with(ScriptedModel([*saying("word " * 60)[:-1], gate, *saying("the end")]), tmp_path)
    async with opened(app) as pilot:
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "word word" in seen(app))
        await pilot.resize_terminal(50, 16)
        gate.set()
        await talk.answered(pilot)
        assert "the end" in seen(app)
        assert max(map(len, seen(app).splitlines())) <= 50


async def test_scrolling_up_stops_following_the_answer(tmp_path, opened, until, talk):
    gate = threading.Event()
    lines = "\n\n".join(f"line {number}" for number in range(60))
    more = "\n\n" + "\n\n".join(f"more {number}" for number in range(60))
    app = app_with(ScriptedModel([*saying(lines)[:-1], gate, *saying(more)]), tmp_path)
    async with opened(app) as pilot:
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "line 59" in seen(app))
        transcript = app.screen.transcript
        transcript.action_page_up()
        await until(pilot, lambda: "line 59" not in seen(app))
        await until(pilot, lambda: transcript.scroll_y == transcript.scroll_target_y)
        before = beside_the_scrollbar(app)
        gate.set()
        await talk.answered(pilot)
        assert beside_the_scrollbar(app) == before
        app.screen.transcript.action_last()
        await until(pilot, lambda: "more 59" in seen(app))


@pytest.mark.slow
async def test_of_a_thousand_turns_few_are_widgets(tmp_path, opened, until, talk):
    app = app_with(ScriptedModel(saying("new")), tmp_path)
    begin = app.start_session

    def long(model):
        session = begin(model)
        chat: Chat = session.chat
        for number in range(1000):
            list(chat.ask(f"question {number}"))
            chat.current.answer = f"answer {number}\n\n" + "text " * 100
        return session

    app.start_session = long
    async with opened(app) as pilot:
        await until(pilot, lambda: "answer 999" in seen(app))
        assert len(app.screen.query(TurnView)) < 40
        await pilot.press("tab")
        for _ in range(40):
            await pilot.press("up")
        await until(pilot, lambda: app.screen.transcript.first < 970)
        assert len(app.screen.query(TurnView)) < 60
        await pilot.press("home")
        await until(pilot, lambda: "> question 0" in seen(app))
        await pilot.press("end")
        await until(pilot, lambda: "answer 999" in seen(app))
        await talk(pilot, "one more")
        assert "> one more" in seen(app) and "new" in seen(app)


async def test_ctrl_c_stops_then_clears_then_leaves(tmp_path, opened, until, talk):
    gate = threading.Event()
    app = app_with(ScriptedModel([GenerationEvent(1, "Half"), gate]), tmp_path)
    async with opened(app) as pilot:
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "Half" in seen(app))
        await pilot.press(*"abc", "ctrl+c")
        await talk.answered(pilot)
        assert app.screen.prompt.text == "abc"
        await pilot.press("ctrl+c")
        assert app.screen.prompt.text == ""
        await pilot.press("ctrl+c")
        assert app.is_running
        [hint] = [notice for notice in app._notifications if "Ctrl-C again" in notice.message]
        assert hint.timeout == DOUBLE_INTERRUPT_S, "the hint is shown as long as it is true"
        await pilot.press("ctrl+c")
    assert app.return_code == 0


async def test_a_conflicting_session_is_told_its_new_name(tmp_path, opened, talk):
    app = app_with(ScriptedModel(saying("one"), saying("two")), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "first")
        name = app.session.id
        other = app.start_session(app.model)
        other.load(name)
        list(other.ask("elsewhere"))
        other.save()
        await talk(pilot, "second")
        assert app.session.id != name
        assert f"continued {name}; this conversation is saved as {app.session.id}" in told(app)


@pytest.mark.parametrize("ending", [None, signal.SIGTERM])
async def test_leaving_during_an_answer_saves_the_conversation(tmp_path, opened, until, ending):
    gate = threading.Event()
    app = app_with(ScriptedModel([GenerationEvent(1, "Half"), gate]), tmp_path)
    async with opened(app) as pilot:
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "Half" in seen(app))
        signal.raise_signal(ending) if ending else app.exit(0)
        await until(pilot, lambda: not app.is_running)
    assert app.exit_signal == ending
    (kept,) = (tmp_path / "chats").glob("*.json")
    assert "Half" in kept.read_text() and json.dumps("hi") in kept.read_text()


class SlowMachine(ScriptedMachine):
    """Its model becomes ready when `go` is set."""

    def __init__(self, model):
        super().__init__(model)
        self.go = threading.Event()

    def open(self, name, watch):
        assert self.go.wait(20)
        return super().open(name, watch)


async def test_text_typed_during_loading_is_in_the_prompt(tmp_path, opened, until, talk):
    app = app_with(ScriptedModel(saying("Hello.")), tmp_path)
    app.machine = machine = SlowMachine(app.machine.model)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: isinstance(app.screen, LoadScreen))
        await pilot.press(*"yes nox", "backspace", "enter", *"more")
        app.post_message(Paste(" pasted"))
        await pilot.pause()
        machine.go.set()
        await until(pilot, lambda: isinstance(app.screen, ChatScreen) and app.screen.chat.turns)
        await talk.answered(pilot)
        assert app.screen.chat.turns[0].question == "yes no" and app.screen.prompt.text == "more pasted"


@pytest.mark.slow
async def test_the_inspector_leaves_the_keyboard_to_the_prompt_and_tab_leads_into_it(tmp_path, opened, talk):
    app = app_with(ScriptedModel(saying("Hello.")), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "hi")
        await pilot.press("f3", *"more")
        assert app.screen.prompt.text == "more" and "The engine's steps" in seen(app)
        await pilot.press("tab", "2")
        assert app.screen.prompt.text == "more" and app.screen.inspector.view == "tokens"
        await pilot.press("escape")
        assert not app.screen.inspector.display
        await pilot.press("tab", "f3", "!")  # from the conversation, which it covers here
        assert app.screen.prompt.text == "more!"


async def test_the_inspector_is_beside_the_conversation_on_wide_screens(tmp_path, opened, talk):
    app = app_with(ScriptedModel(saying("Hello.")), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "hi")
        await pilot.press("f3")
        assert "Timeline" in seen(app) and "> hi" not in seen(app)
        await pilot.resize_terminal(160, 50)
        await pilot.pause(0.1)
        assert "Timeline" in seen(app) and "> hi" in seen(app)
        await pilot.resize_terminal(80, 24)
        await pilot.press("f3")
        await pilot.pause(0.1)
        assert "Timeline" not in seen(app) and "> hi" in seen(app) and "Hello." in seen(app)


async def test_ctrl_c_leaves_a_list_as_escape_does(tmp_path, opened):
    app = app_with(ScriptedModel(), tmp_path)
    async with opened(app) as pilot:
        await pilot.press("f1")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert isinstance(app.screen, ChatScreen)


async def test_keys_that_find_nothing_to_act_on_say_so(tmp_path, opened, talk):
    model = ScriptedModel(saying("No code."))
    model.has_chat_template = False
    app = app_with(model, tmp_path)
    async with opened(app) as pilot:
        await pilot.press("tab", "c", "e", "t")
        assert told(app).count("the conversation is empty") == 3 and not app.clipboard
        await talk(pilot, "hi")
        await pilot.press("tab", "y", "s", "n", "right")
        assert told(app).count("there is no code in this answer") == 3
        assert "there is only one branch here" in told(app) and "scripted has no chat template" in told(app)


async def test_while_an_answer_is_under_way_nothing_else_begins(tmp_path, opened, until, talk):
    gate = threading.Event()
    app = app_with(ScriptedModel([GenerationEvent(1, "Half"), gate, *saying(" of it")]), tmp_path)
    async with opened(app) as pilot:
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "Half" in seen(app))
        for message in (Prompt.Sent("x"), SessionChosen("x"), ModelChosen("x"), CommandChosen("/undo", True)):
            app.screen.post_message(message)
        await pilot.press("tab", "e", "r", "u", "U", "ctrl+d")
        assert told(app).count("an answer is under way; Escape stops it") == 8
        gate.set()
        await talk.answered(pilot)
        assert app.screen.chat.turns[0].answer == "Half of it" and app.machine.opened == ["scripted"]
        assert app.screen.prompt.text == "/undo" and app.is_running


async def test_commands_of_the_palette_run_or_wait_for_more(tmp_path, opened, talk):
    app = app_with(ScriptedModel(saying("one")), tmp_path)
    async with opened(app) as pilot:
        prompt = app.screen.prompt
        await talk(pilot, "first")
        await talk(pilot, "/edit")
        assert prompt.text == "first" and app.session.editing
        await pilot.press("escape")
        assert prompt.text == "" and not app.session.editing
        app.screen.post_message(CommandChosen("/load", False))
        app.screen.post_message(CommandChosen("/undo", True))
        await pilot.pause()
        assert prompt.text == "/load " and not app.screen.chat.turns
        prompt.text = ""
        await pilot.press("?")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("escape", "ctrl+d")
    assert app.return_code == 0


async def test_a_saved_conversation_is_opened_or_the_reason_told(tmp_path, opened, until):
    keep(tmp_path / "chats", 1, ("Why?", "Short waves.\n\n" * 15 + "The end."))
    app = app_with(ScriptedModel(), tmp_path)
    async with opened(app) as pilot:
        await pilot.press("f5")
        await until(pilot, lambda: "Why?" in seen(app))
        for key, is_end in (("enter", True), ("pageup", False), ("pagedown", True)):
            await pilot.press(key)
            await until(pilot, lambda is_end=is_end: ("The end." in seen(app)) == is_end)
        app.screen.post_message(SessionChosen("gone"))
        await until(pilot, lambda: "gone" in told(app))
        assert app.screen.chat.turns[0].question == "Why?"


class OfferingMachine(ScriptedMachine):
    """Opens `models` in this order, whatever their name, and raises the errors among them."""

    def __init__(self, *models):
        super().__init__(None)
        self.models = list(models)

    def offers(self):
        return OFFERS

    def open(self, name, watch):
        self.model = self.models.pop(0)
        if isinstance(super().open(name, watch), Exception):
            raise self.model
        return self.model


MISSING = UsageError("it is not there", "use another")


async def leave_error(pilot, until):
    await until(pilot, lambda: "it is not there" in seen(pilot.app))
    await pilot.press("escape")


async def test_a_conversation_goes_on_with_another_model_or_the_one_before(tmp_path, opened, until, talk):
    models = [ScriptedModel(saying(text)) for text in ("one", "two", "three")]
    app = app_with(models[0], tmp_path)
    app.machine = OfferingMachine(*models[:2], MISSING, models[2], MISSING, MISSING)
    async with opened(app) as pilot:
        await talk(pilot, "hi")
        await pilot.press("f4")
        await until(pilot, lambda: "mine" in seen(app))
        await pilot.press("down", "enter")
        for model in models[1:]:
            await until(pilot, lambda model=model: app.session.llm is model and app.focused)
            assert "> hi" in seen(app)
            app.screen.post_message(ModelChosen("best"))
            await leave_error(pilot, until)
        await until(pilot, lambda: app.machine.opened[-1] == "mine")
        await leave_error(pilot, until)
    assert app.machine.opened == ["scripted", "mine", "best", "mine", "best", "mine"]
    assert all(model.closed for model in models) and (app.return_code, app.error) == (1, MISSING)


@pytest.mark.parametrize(("key", "code", "error"), [("escape", 0, None), ("enter", 1, MISSING)])
async def test_the_user_chooses_the_first_model_until_one_loads(tmp_path, until, key, code, error):
    def begin(model):
        raise MISSING

    app = ChatApp(OfferingMachine(MISSING, ScriptedModel()), None, begin, tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "mine" in seen(app))
        await pilot.press("enter")
        await until(pilot, lambda: "it is not there" in seen(app))
        await pilot.press("ctrl+p")
        assert not CommandPalette.is_open(app), "it would have no command of the app"
        await leave_error(pilot, until)
        await until(pilot, lambda: "mine" in seen(app))
        await pilot.press(key)
        await until(pilot, lambda: app.return_code is not None)
    assert (app.return_code, app.error) == (code, error)


async def test_code_that_cannot_be_saved_is_told_and_without_a_name_none_is(tmp_path, opened, until, talk):
    code = f"x = 1  # {'long ' * 10}\n" * 40
    app = app_with(ScriptedModel(saying(f"```python\n{code}```\n\n---\n\nend")), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "code")
        await pilot.press("tab", "s", "ctrl+u", *"/dev/full", "enter")
        await until(pilot, lambda: "/dev/full exists. Replace it?" in seen(app))
        await pilot.press("y")
        await until(pilot, lambda: "/dev/full cannot be written: No space left" in told(app))
        await pilot.press("s", "escape")
        assert isinstance(app.screen, ChatScreen) and "saved as" not in told(app)
        block, rule, _ = app.screen.transcript.views[0].answer.blocks
        assert len(block.content.spans) > 40 and rule.strips[0].text == "─" * 24


async def test_ctrl_c_copies_what_is_selected_across_blocks(tmp_path, opened, talk):
    app = app_with(ScriptedModel(saying("The first\n\nThe second, and more\n\n- last")), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "hi")
        answer = app.screen.transcript.views[0].answer
        await pilot.mouse_down(answer, offset=(4, 0))
        await pilot.hover(answer, offset=(10, 2))
        await pilot.mouse_up(answer, offset=(10, 2))
        lines = [list(answer.render_line(y)) for y in range(answer.size.height)]
        background = lines[1][0].style.bgcolor
        marked = ["".join(part.text for part in line if part.style.bgcolor != background) for line in lines]
        assert marked == ["first", "", "The second,", "", ""]
        await pilot.press("ctrl+c")
        assert app.clipboard == "first\nThe second," and app.is_running and not app.screen.get_selected_text()


async def test_without_colours_none_is_sent(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert app_with(ScriptedModel(), tmp_path).native_ansi_color


async def test_an_empty_conversation_shows_three_things_to_try(tmp_path, opened, talk):
    app = app_with(ScriptedModel(saying("one"), saying("two")), tmp_path)
    async with opened(app) as pilot:
        await pilot.pause()
        assert app.screen.transcript.welcome.display
        assert "Three things to try" in seen(app) and "Tell me a story about a fox." in seen(app)
        await talk(pilot, "/show")
        assert "Three things to try" not in seen(app) and "parameters" in seen(app)
        await talk(pilot, "first")
        assert "Three things to try" not in seen(app) and "one" in seen(app)
        await talk(pilot, "/clear")
        assert not app.screen.transcript.views


@pytest.mark.slow
async def test_a_long_question_is_folded_into_one_line_and_can_be_opened(tmp_path, opened, talk):
    log = "\n".join(f"line {number} of a log" for number in range(5000))
    app = app_with(ScriptedModel(saying("A log.", thoughts="Let me see.")), tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, f"What is this?\n{log}")
        assert "> What is this? … line 4999 of a log ▸ 5,001 lines" in seen(app) and "A log." in seen(app)
        assert "line 4998" not in seen(app)
        assert app.screen.chat.current.question.endswith(log)
        view = app.screen.transcript.views[0]
        await pilot.press("tab", "t")
        assert view.question.region.height > 5000 and "Let me see." in view.thoughts.visual.plain
        await pilot.press("t")
        await pilot.pause(0.1)
        assert view.question.region.height == 1
        await pilot.click(view.question, offset=(48, 0))
        await pilot.pause(0.1)
        assert view.question.region.height > 5000
    model = ScriptedModel(saying("Again."))
    app = app_with(model, tmp_path)
    async with opened(app) as pilot:
        await talk(pilot, "/load last")
        assert "▸ 5,001 lines" in seen(app) and "line 4998" not in seen(app)


async def test_the_welcome_of_an_empty_conversation_fits_a_narrow_window(tmp_path, opened):
    app = app_with(ScriptedModel(), tmp_path)
    async with opened(app, (40, 12)) as pilot:
        await pilot.pause(0.1)
        text = seen(app)
        assert "Three things to try" in text and "ask anything; Esc stops the answer" in text
        assert "F4  another model; F1 shows all keys" in text
        await pilot.resize_terminal(80, 24)
        await pilot.pause(0.1)
        assert "Tell me a story about a fox.    ask anything" in seen(app)


class UnmeasuredModel(ScriptedModel):
    """Its bandwidth is unknown before the first measurement."""

    reads = StepReads(weights=12_000_000, per_token=2_048, kept_per_token=2_048, bandwidth=None)
    measurements = 0
    is_busy = False

    def measure_rates(self):
        self.measurements += 1
        if not self.is_busy:
            self.reads = replace(self.reads, bandwidth=1e9)


async def test_the_first_answer_has_a_roofline_since_the_machine_is_measured_before(tmp_path, opened, until, talk):
    model = UnmeasuredModel(saying("Hello to you."))
    app = app_with(model, tmp_path)
    async with opened(app) as pilot:
        await until(pilot, lambda: model.measurements)
        await talk(pilot, "hi")
        assert re.search(r"roofline +\d+%", seen(app))
    assert model.measurements == 1


async def test_a_busy_machine_is_measured_again_after_an_answer_but_not_forever(tmp_path, opened, until, talk):
    model = UnmeasuredModel(saying("Hello to you."))
    model.is_busy = True
    app = app_with(model, tmp_path)
    async with opened(app) as pilot:
        await until(pilot, lambda: model.measurements)
        for _ in range(4):
            await talk(pilot, "hi")
        assert re.search(r"roofline +-", seen(app))
    assert model.measurements == MAX_RATE_ATTEMPTS


async def test_nothing_is_measured_during_an_answer(tmp_path, opened, until, talk):
    gate = threading.Event()
    model = UnmeasuredModel([GenerationEvent(1, "Half"), gate, *saying(" of it")])
    model.is_busy = True
    app = app_with(model, tmp_path)
    async with opened(app) as pilot:
        await until(pilot, lambda: model.measurements)
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "Half" in seen(app))
        model.is_busy = False
        app.screen.measure_rates()
        await pilot.pause(0.1)
        assert model.measurements == 1
        gate.set()
        await talk.answered(pilot)
        await until(pilot, lambda: re.search(r"roofline +\d+%", seen(app)))
