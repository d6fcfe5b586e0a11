"""One session with the app in a real terminal, from an empty cache to a resumed conversation.

`make screens` runs it, too, and saves its screens as pictures in docs/images.
"""

import re
import shutil

import pytest

from localllm.hub.catalog import PACKAGE_FOLDER
from tests.hub.loopback import LoopbackHub
from tests.tui.tmux import Window
from tools.screens import FOLDER, render_svg

COLUMNS, LINES = 120, 32
RATE = 2_500_000  # bytes a second of each connection, so that a download can be seen
FOX, OWL = "Tell me a story about a fox", "Tell me a story about an owl"
HEDGEHOG = "Tell me a story about a hedgehog"
PROMPT = "Say something"

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


@pytest.fixture
def hub():
    with LoopbackHub() as hub:
        hub.add("org/tiny", PACKAGE_FOLDER / "boxed" / "demo")
        hub.rate = RATE
        yield hub


@pytest.fixture
def window(hub, tmp_path):
    places = {"HF_HOME": str(tmp_path / "hf"), "LOCALLLM_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url}
    window = Window(tmp_path, places, COLUMNS, LINES)
    try:
        yield window
    finally:
        window.close()


def test_a_question_and_the_terminal_is_as_it_was(window):
    window.see_shell()
    window.type("clear; stty -g > before; localllm run demo --seed 1")
    window.press("Enter")
    window.still("demo · cpu", PROMPT)
    assert "Once upon a time" in ask(window, FOX)
    leave(window)


@pytest.mark.slow
def test_a_session_from_the_download_to_the_day_after(request, window):
    pictures = {}

    def keep(name):
        pictures[name] = render_svg(window.coloured, COLUMNS, "localllm run org/tiny")

    window.see_shell()
    window.type("clear; stty -g > before; localllm run org/tiny --seed 1")
    window.press("Enter")

    download(window, keep)
    chat(window, keep)
    stop(window)
    edit_and_go_between_the_branches(window, keep)
    inspect(window, keep)
    export(window)
    leave(window)

    window.type("localllm run org/tiny --resume last --seed 1")
    window.press("Enter")
    window.still(f"> {HEDGEHOG}", "org/tiny · cpu")
    assert "I am demo" in ask(window, "Who are you?")
    window.press("C-d")
    window.see_shell()
    if request.config.getoption("--screens"):
        FOLDER.mkdir(exist_ok=True)
        for name, drawn in pictures.items():
            (FOLDER / f"{name}.svg").write_text(drawn, encoding="utf-8")


def download(window, keep):
    window.until(lambda screen: "model.safetensors" in screen and "verified" in screen, "a file that is verified")
    half = re.compile(r"━{4}.*[2-5]\.\d\d MB of 5\.97 MB .*left")
    window.until(half.search, "half of the weights")
    keep("pull")
    window.see("✓ download", "6.17 MB, verified", "▸ ")
    window.still("org/tiny · cpu · context 1,024", PROMPT)


def send(window, text):
    """Type a text, and press Enter when it is visible in the prompt."""
    window.type(text)
    window.see(f"\n {text}")
    window.press("Enter")


def ask(window, question):
    """Send a question; return the screen when the answer has ended."""
    send(window, question)
    return window.still(f"> {question}", PROMPT, when=has_ended)


def has_ended(screen):
    """While an answer streams, the current speed is that of the newest tokens, and decreases if one is late."""
    speeds = re.search(r"now +([0-9.]+) tokens/s +average +([0-9.]+)", screen)
    return speeds and speeds[1] == speeds[2]


def command(window, line, told):
    send(window, line)
    window.see(told)


def chat(window, keep):
    screen = ask(window, FOX)
    assert "Once upon a time" in screen and "tokens/s" in screen
    keep("chat")


def stop(window):
    """Stop an answer that would fill the context, after making the window smaller."""
    command(window, "/set parameter ignore_eos true", "ignore_eos = on")
    send(window, "Count the stars")
    window.see("> Count the stars", "tokens/s", "average")
    window.resize(80, 24)
    window.see("> Count the stars", "tokens/s", "avg")
    window.press("Escape")
    window.see("stopped")
    window.resize(COLUMNS, LINES)
    window.still("stopped", "average")
    command(window, "/set parameter ignore_eos none", "ignore_eos = off")


def choose_the_newest_turn(window):
    window.press("Tab")
    window.still("▌> ")


def edit_and_go_between_the_branches(window, keep):
    choose_the_newest_turn(window)
    window.press("e")
    window.still("Enter sends this on a new branch")
    window.press("C-u")
    window.see(PROMPT)
    screen = ask(window, OWL)
    assert "2/2" in screen and "Count the stars" not in screen
    choose_the_newest_turn(window)
    window.press("Left")
    window.see("> Count the stars", "stopped", "1/2")
    window.press("Right")
    window.see(f"> {OWL}", "2/2")
    keep("branches")


def inspect(window, keep):
    window.press("F3")
    window.see("1 Timeline", "The engine's steps")
    ask(window, HEDGEHOG)
    keep("timeline")
    window.press("BTab")
    window.still()
    window.press("2")
    window.still("the model", "after sampling")
    window.press("Home", *["Right"] * 7)
    window.still("token 8", "the model", "after sampling")
    keep("tokens")
    window.press("3")
    window.see("blocks of 16 tokens")
    keep("blocks")
    window.press("F3")
    window.still()


def export(window):
    command(window, "/export story.md", "exported to story.md")
    page = (window.folder / "story.md").read_text()
    questions = [FOX, OWL, HEDGEHOG]
    places = [page.index(question) for question in questions]
    assert places == sorted(places)
    assert "Once upon a time" in page and "Count the stars" not in page


def leave(window):
    window.press("C-d")
    window.see_shell()
    window.type("echo exit code $?; stty -g > after; cmp before after && echo as before")
    window.press("Enter")
    window.see("\nexit code 0", "\nas before")
    assert not window.is_set("alternate_on")
    assert not window.is_set("mouse_any_flag")
    assert window.is_set("cursor_flag")
