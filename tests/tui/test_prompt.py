"""The prompt in a minimal app, driven by keys."""

from pathlib import Path
from typing import ClassVar

import pytest
from prompt_toolkit.history import FileHistory
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.events import Key, Paste
from textual.widgets import Static

from localllm.tui.prompt import OPEN_QUOTES_TITLE, Prompt
from tests.work import counted_lines

COMMANDS = [("/help", "this list"), ("/set", "how to draw"), ("/save", "keep it")]


class Writing(App):
    """An app with only a prompt."""

    CSS = "#room { height: 1fr; }"
    BINDINGS: ClassVar = [("ctrl+z", "note('ctrl+z')"), ("ctrl+d", "note('ctrl+d')"), ("escape", "note('escape')")]

    def __init__(self, history: Path):
        super().__init__()
        self.prompt = Prompt(history, COMMANDS)
        self.sent, self.noted, self.helped = [], [], 0

    def compose(self):
        yield Static(id="room")
        yield self.prompt

    def on_mount(self):
        self.prompt.editor.cursor_blink = False  # which a snapshot would see, or not
        self.prompt.focus()

    def on_prompt_sent(self, sent):
        self.sent.append(sent.text)

    def on_prompt_help_wanted(self):
        self.helped += 1

    def action_note(self, key):
        self.noted.append(key)


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Writing(tmp_path / "history")


async def paste(app, pilot, text):
    app.prompt.editor.post_message(Paste(text))
    await pilot.pause()


def offered(app):
    return [offer.text for offer in app.prompt.suggestions.suggestions]


async def test_enter_sends_and_clears(app):
    async with app.run_test() as pilot:
        await pilot.press(*"hello", "enter")
        assert (app.sent, app.prompt.text) == (["hello"], "")
        await pilot.press("enter", "space", "enter")
        assert app.sent == ["hello"]


@pytest.mark.parametrize("key", ["shift+enter", "alt+enter", "ctrl+j"])
async def test_a_message_has_several_lines(app, key):
    async with app.run_test() as pilot:
        await pilot.press("a", key, "b", "enter")
        assert app.sent == ["a\nb"]


async def test_open_triple_quotes_let_enter_begin_a_new_line(app):
    async with app.run_test() as pilot:
        await pilot.press(*'"""one', "enter", *"two", "enter")
        assert (app.sent, app.prompt.text) == ([], '"""one\ntwo\n')
        assert app.prompt.border_title == OPEN_QUOTES_TITLE
        await pilot.press(*'"""', "enter")
        assert (app.sent, app.prompt.text) == (['"""one\ntwo\n"""'], "")
        assert app.prompt.border_title == ""


@pytest.mark.parametrize(
    ("sequence", "key"),
    [("\x1b\r", "alt+enter"), ("\x1b[13;2u", "shift+enter"), ("\n", "ctrl+j"), ("\r", "enter")],
)
def test_terminals_send_these_keys(sequence, key):
    assert [event.key for event in XTermParser().feed(sequence) if isinstance(event, Key)] == [key]


@pytest.mark.slow
async def test_it_grows_to_eight_lines_and_scrolls_from_there(app):
    async with app.run_test() as pilot:
        heights = []
        for _ in range(10):
            heights.append(app.prompt.editor.size.height)
            await pilot.press("x", "ctrl+j")
            await pilot.pause()
        assert heights == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8]
        await pilot.press("enter")
        await pilot.pause()
        assert app.prompt.editor.size.height == 1


async def test_keys_of_shells(app):
    async with app.run_test() as pilot:
        await pilot.press(*"one two", "ctrl+w")
        assert app.prompt.text == "one "
        await pilot.press("ctrl+a", "X", "ctrl+e", "Y")
        assert app.prompt.text == "Xone Y"
        await pilot.press("ctrl+b", "ctrl+k")
        assert app.prompt.text == "Xone "
        await pilot.press("ctrl+u")
        assert app.prompt.text == ""
        await pilot.press("ctrl+underscore")
        assert app.prompt.text == "Xone Y"


async def test_keys_that_come_together_keep_their_order(app):
    """A slow terminal or a script sends keys without pauses."""
    async with app.run_test() as pilot:
        await pilot.press(*"old")
        for key, character in (("ctrl+u", "\x15"), ("a", "a"), ("ctrl+a", "\x01"), ("b", "b"), ("enter", "\r")):
            app.post_message(Key(key, character))
        await pilot.pause(0.2)
        assert app.sent == ["ba"]


async def test_a_command_whose_keys_come_together_is_sent_whole(app):
    async with app.run_test() as pilot:
        await pilot.press(*"/se")
        assert offered(app) == ["/set"]
        for character in "t colour red":
            app.prompt.editor.post_message(Key({" ": "space"}.get(character, character), character))
        app.prompt.editor.post_message(Key("enter", "\r"))
        await pilot.pause(0.2)
        assert (app.sent, app.prompt.text) == (["/set colour red"], "")


async def test_unhandled_keys_reach_the_screen(app):
    async with app.run_test() as pilot:
        await pilot.press("ctrl+z", "escape", "ctrl+d")
        await pilot.press("a", "b", "home", "ctrl+d")
        assert (app.noted, app.prompt.text) == (["ctrl+z", "escape", "ctrl+d"], "b")


async def test_a_question_mark_in_the_empty_prompt_asks_for_help(app):
    async with app.run_test() as pilot:
        await pilot.press("question_mark")
        assert (app.helped, app.prompt.text) == (1, "")
        await pilot.press("h", "question_mark")
        assert (app.helped, app.prompt.text) == (1, "h?")


@pytest.mark.slow
async def test_history_is_shared_with_the_line_editor(app, tmp_path):
    FileHistory(tmp_path / "history").store_string("from there\nin two lines")
    async with app.run_test() as pilot:
        await pilot.press(*"from here", "enter", *"half", "up")
        assert app.prompt.text == "from here"
        await pilot.press("up", "up")
        assert app.prompt.text == "from there\nin two lines"
        await pilot.press("up", "up", "up")
        assert app.prompt.text == "from there\nin two lines"
        await pilot.press("down", "down")  # through its two lines
        assert app.prompt.text == "from here"
        await pilot.press("down", "down")
        assert app.prompt.text == "half"
    stored = list(FileHistory(tmp_path / "history").load_history_strings())
    assert stored == ["from here", "from there\nin two lines"]
    assert (tmp_path / "history").stat().st_mode & 0o77 in (0o44, 0)  # whose file it was keeps its mode


async def test_a_history_of_its_own_is_for_this_user_alone(app, tmp_path):
    async with app.run_test() as pilot:
        await pilot.press("a", "enter", "a", "enter", "b", "enter")
    assert (tmp_path / "history").stat().st_mode & 0o77 == 0
    assert list(FileHistory(tmp_path / "history").load_history_strings()) == ["b", "a"]


async def test_an_unwritable_history_is_reported_and_the_message_sent():
    app = Writing(Path("/dev/null/history"))
    async with app.run_test() as pilot:
        await pilot.press("a", "enter", "up")
        assert (app.sent, app.prompt.text) == (["a"], "a")
        assert "not saved in the history" in next(iter(app._notifications)).message


@pytest.mark.slow
async def test_history_is_searched(app, tmp_path):
    for text in ("tell a story", "count to ten", "a story of a fox"):
        FileHistory(tmp_path / "history").store_string(text)
    async with app.run_test() as pilot:
        await pilot.press(*"draft", "ctrl+r")
        await pilot.press("ctrl+u", *"STORY")
        await pilot.pause()
        assert offered(app) == ["a story of a fox", "tell a story"]
        await pilot.press("escape")
        assert app.prompt.text == "draft"
        await pilot.press("ctrl+r", "ctrl+u", *"story")
        await pilot.pause()
        await pilot.press("ctrl+r", "enter")
        assert (app.prompt.text, app.sent, offered(app)) == ("tell a story", [], [])
        await pilot.press("enter")
        assert app.sent == ["tell a story"]


async def test_commands_are_completed(app):
    async with app.run_test() as pilot:
        await pilot.press("/", "s")
        await pilot.pause()
        assert offered(app) == ["/set", "/save"]
        await pilot.press("down", "tab")
        await pilot.pause()
        assert (app.prompt.text, offered(app)) == ("/save ", [])
        await pilot.press(*"one", "enter", *"/he")
        await pilot.pause()
        await pilot.press("enter")
        assert app.prompt.text == "/help "
        await pilot.press("enter")
        assert app.sent == ["/save one", "/help "]


async def test_files_are_completed(app, tmp_path, until):
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "no way.txt").write_text("x")
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "inner.md").write_text("x")
    async with app.run_test() as pilot:
        await pilot.press(*"see @n")
        await until(pilot, lambda: offered(app) == ["@nested/", '@"no way.txt"', "@notes.txt"])
        await pilot.press("tab")
        await until(pilot, lambda: offered(app) == ["@nested/inner.md"])
        await pilot.press("tab")
        assert app.prompt.text == "see @nested/inner.md "
        await pilot.press(*"@no")
        await until(pilot, lambda: len(offered(app)) == 2)
        await pilot.press("enter")  # nothing was chosen: it is sent as it is
        assert app.sent == ["see @nested/inner.md @no"]


async def test_a_dropped_file_becomes_a_reference(app, tmp_path):
    (tmp_path / "two words.txt").write_text("x")
    async with app.run_test() as pilot:
        await paste(app, pilot, str(tmp_path / "two words.txt").replace(" ", "\\ "))
        assert app.prompt.text == f'@"{tmp_path}/two words.txt" '


async def test_a_long_paste_is_folded_and_nothing_is_lost(app):
    text = "\n".join(f"line {number}" for number in range(20_000))
    async with app.run_test() as pilot:
        with counted_lines() as count:
            await pilot.press(*"see ")
            await paste(app, pilot, text)
            await pilot.press("!", "enter")
        assert count.lines < 1_000_000  # 140,000 measured, and 120,000 for a hundredth of the text
        assert app.sent == [f"see {text}!"]
        await pilot.press("up")
        assert app.prompt.editor.text == "[paste 1: 20,000 lines]"
        assert app.prompt.text == f"see {text}!"


@pytest.mark.slow
async def test_a_folded_paste_is_deleted_as_a_whole_and_comes_back(app):
    async with app.run_test() as pilot:
        await paste(app, pilot, "x\n" * 100)
        await pilot.press("backspace")
        assert app.prompt.text == ""
        await pilot.press("ctrl+underscore")
        assert app.prompt.text == "x\n" * 100
        await pilot.press("home", "delete", *"[paste 9: 3 lines]", "enter")
        assert app.sent == ["[paste 9: 3 lines]"]


async def test_a_short_paste_stands_as_it_is_without_control_codes(app):
    async with app.run_test() as pilot:
        await paste(app, pilot, "one\r\ntwo\x1b[31m")
        assert app.prompt.text == "one\ntwo␛[31m"


async def test_messages_sent_during_an_answer_are_queued(app):
    async with app.run_test() as pilot:
        app.prompt.busy = True
        await pilot.press(*"later", "enter")
        assert (app.sent, app.prompt.text) == ([], "later")
        assert "sent after this answer" in str(app.prompt.border_title)
        await pilot.press("escape")
        app.prompt.busy = False
        await pilot.pause()
        assert (app.sent, app.noted, app.prompt.border_title) == ([], [], "")
        app.prompt.busy = True
        await pilot.press("enter")
        app.prompt.busy = False
        await pilot.pause()
        assert (app.sent, app.prompt.text) == (["later"], "")


async def test_an_edit_takes_back_the_queued_message(app):
    async with app.run_test() as pilot:
        app.prompt.busy = True
        await pilot.press(*"later", "enter", "!")
        app.prompt.busy = False
        await pilot.pause()
        assert (app.sent, app.prompt.text) == ([], "later!")


async def test_a_text_from_outside_is_changed_and_sent(app):
    async with app.run_test() as pilot:
        app.prompt.text = "/undone or not"
        await pilot.press("!", "enter")
        assert app.sent == ["/undone or not!"]


def test_suggestions_are_shown_above(app, snap_compare):
    assert snap_compare(app, terminal_size=(80, 24), press=["/", "s", "down"])


@pytest.mark.slow
def test_a_message_that_waits(app, snap_compare):
    async def write(pilot):
        app.prompt.busy = True
        await pilot.press(*"first line", "ctrl+j")
        await paste(app, pilot, "x\n" * 100)
        await pilot.press("ctrl+j", *"what is this?", "enter")

    assert snap_compare(app, terminal_size=(80, 24), run_before=write)
