import json
import re
from contextlib import suppress

import pytest
from textual.widgets import Button, Input, RadioButton
from textual.worker import WorkerCancelled

from localllm.conversation.session_file import SavedSession
from localllm.request import SamplingParams
from localllm.tui.dialogs import Confirm
from localllm.tui.sessions_screen import ExportScreen, export_file_name
from tests.tui.panels import EVIL, Stage, said, told


def kept() -> SavedSession:
    """A conversation with two branches, the second of which was continued last."""
    at, other = told(("Why is the sky blue?", "Short waves.")), told(("And the sea?", "It mirrors."))
    root = at.parent
    other.parent = root
    root.children.append(other)
    return SavedSession("Why is the sky blue?", "scripted", 1.0, 2.0, SamplingParams(), root=root, current=at)


@pytest.fixture
def app(tmp_path):
    return Stage(tmp_path / "home", lambda stage: ExportScreen(kept, "Why is the sky blue?", tmp_path))


def choose(app, label):
    """Press the radio button with this name."""
    button = next(one for one in app.screen.query(RadioButton) if str(one.label) == label)
    button.value = True


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("form", ["Markdown", "JSON"])
async def test_a_branch_or_the_tree_is_written_in_either_format(app, tmp_path, until, form, everything):
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        choose(app, form)
        choose(app, "all branches" if everything else "this branch")
        await pilot.pause()
        app.screen.query_one("#export", Button).press()
        await until(pilot, lambda: app.given)
    path = tmp_path / f"why-is-the-sky-blue.{'md' if form == 'Markdown' else 'json'}"
    assert app.given == [path]
    text = path.read_text()
    assert ("And the sea?" in text) == everything and "Short waves." in text
    assert form == "Markdown" or json.loads(text)["title"] == "Why is the sky blue?"


@pytest.mark.parametrize(("answer", "text"), [("n", "mine"), ("escape", "mine"), ("y", "Short waves.")])
async def test_overwriting_needs_confirmation(app, tmp_path, until, answer, text):
    path = tmp_path / "why-is-the-sky-blue.md"
    path.write_text("mine")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        app.screen.query_one(Input).focus()
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press(answer)
        with suppress(WorkerCancelled):  # with the screen that it closes
            await pilot.app.workers.wait_for_complete()
        await until(pilot, lambda: app.given if answer == "y" else isinstance(app.screen, ExportScreen))
        assert bool(app.given) == (answer == "y")
    assert text in path.read_text()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("", "needs a name"),
        ("sub", "is a folder"),
        ("away/x.md", "No such file"),
        ("x" * 300, "too long"),
    ],
)
async def test_a_failed_write_is_reported_and_can_be_repeated(app, tmp_path, until, name, fault):
    (tmp_path / "sub").mkdir()
    async with app.run_test(size=(160, 50)) as pilot:
        await pilot.pause()
        app.screen.query_one(Input).value = name
        app.screen.query_one(Input).focus()
        await pilot.press("enter")
        # A path of any length comes before it: words, as the edges of the dialog stand between those of two lines.
        await until(pilot, lambda: fault in " ".join(re.findall(r"\w+", said(app))))
        assert app.given == []
        await pilot.press("escape")
        assert app.given == [None]


async def test_a_custom_name_follows_the_format(app, until):
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        app.screen.query_one(Input).value = "sky.md"
        choose(app, "JSON")
        await until(pilot, lambda: app.screen.query_one(Input).value == "sky.json")
        app.screen.query_one(Input).value = "notes.txt"
        choose(app, "Markdown")
        await pilot.pause()
        assert app.screen.query_one(Input).value == "notes.txt"


async def test_cancel_writes_nothing(app, tmp_path):
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.click("#cancel")
        await pilot.pause()
        assert app.given == [None] and not list(tmp_path.glob("*.md"))


def test_file_names_are_words_of_the_title():
    assert export_file_name("../../etc/passwd; rm -rf ~", "md") == "etc-passwd-rm-rf.md"
    assert export_file_name(EVIL, "json") == "bold-red-x-0-title-日本語のとても長い名前-です.json"
    assert export_file_name("???", "md") == "conversation.md"
    assert len(export_file_name("word " * 100, "md")) <= 63


def test_picture(snap_compare, tmp_path):
    app = Stage(tmp_path / "home", lambda stage: ExportScreen(kept, "Why is the sky blue?", tmp_path))
    assert snap_compare(app, terminal_size=(80, 24), press=["tab", "tab"])
