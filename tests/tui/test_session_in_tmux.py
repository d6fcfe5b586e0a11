"""One session with the app in a real terminal, from an empty cache to a conversation that is gone on with.

`make screens` plays it as well, and keeps pictures of it in docs/images.
"""

import re
import shutil

import pytest

from localllm.hub.catalog import PACKAGE
from tests.hub.loopback import LoopbackHub
from tests.tui.tmux import Window
from tools.screens import FOLDER, picture

COLUMNS, LINES = 120, 32
RATE = 2_500_000  # bytes a second of each connection, so that a download can be seen
FOX, OWL = "Tell me a story about a fox", "Tell me a story about an owl"
PROMPT = "Say something"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


@pytest.fixture
def hub():
    with LoopbackHub() as hub:
        hub.add("org/tiny", PACKAGE / "boxed" / "demo")
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


@pytest.fixture
def keep(request, window):
    """Takes a picture of the window; with `--screens` all of them are written in the end."""
    taken = {}

    def take(name: str, title: str = "localllm run org/tiny") -> None:
        taken[name] = picture(window.coloured, COLUMNS, title)

    yield take
    if request.config.getoption("--screens"):
        FOLDER.mkdir(exist_ok=True)
        for name, drawn in taken.items():
            (FOLDER / f"{name}.svg").write_text(drawn, encoding="utf-8")


def test_a_session_from_the_download_to_the_day_after(window, keep):
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
    window.see(OWL, "org/tiny · cpu")
    ask(window, "Who are you?")
    window.press("C-d")
    window.see_shell()


def download(window, keep):
    window.until(lambda screen: "model.safetensors" in screen and "verified" in screen, "a file that is verified")
    window.until(lambda screen: re.search(r"━{4}.*[2-5]\.\d\d MB of 5\.97 MB .*left", screen), "half of the weights")
    keep("pull")
    window.see("✓ download", "6.17 MB, verified", "▸ ")
    window.still("org/tiny · cpu · context 1,024", PROMPT)


def ask(window, question):
    """Gives the screen when the answer has ended."""
    window.type(question)
    window.press("Enter")
    return window.still(f"> {question}", PROMPT, "TTFT")


def chat(window, keep):
    window.type(FOX)
    window.press("Enter")
    window.see(f"> {FOX}", "Once upon a time")
    screen = window.still(PROMPT)
    assert "average" in screen
    keep("chat")


def stop(window):
    """In mid-answer, of a model that would go on to the end of the context, and in a window that is made smaller."""
    command(window, "/set parameter ignore_eos true", "ignore_eos = True")
    window.type("Count the stars")
    window.press("Enter")
    window.see("> Count the stars", "tokens/s", "average")
    window.resize(80, 24)
    window.see("> Count the stars", "tokens/s", "avg")
    window.press("Escape")
    window.see("stopped")
    window.resize(COLUMNS, LINES)
    window.still("stopped", "average")
    command(window, "/set parameter ignore_eos none", "ignore_eos = False")


def command(window, line, told):
    window.type(line)
    window.press("Enter")
    window.see(told)


def choose_the_newest_turn(window):
    window.press("Tab")
    window.still("▌> ")


def edit_and_go_between_the_branches(window, keep):
    choose_the_newest_turn(window)
    window.press("e")
    window.still("Enter asks this instead")
    window.press("C-u")
    window.see(PROMPT)
    window.type(OWL)
    window.press("Enter")
    screen = window.still(f"> {OWL}", "2/2")
    assert "Count the stars" not in screen
    choose_the_newest_turn(window)
    window.press("Left")
    window.see("> Count the stars", "stopped", "1/2")
    window.press("Right")
    window.see(f"> {OWL}", "2/2")
    keep("branches")


def inspect(window, keep):
    window.press("F3")
    window.see("1 Time line", "Every step of the engine")
    window.press("Tab")
    window.type("And then?")
    window.press("Enter")
    window.still("> And then?")
    keep("timeline")
    print(window.screen)
    window.press("BTab", "2")
    window.see("the model", "after sampling")
    keep("tokens")
    print(window.screen)
    window.press("3")
    window.see("blocks of 16 tokens")
    keep("blocks")
    print(window.screen)
    window.press("F3")


def export(window):
    command(window, "/export story.md", "exported to story.md")
    page = (window.folder / "story.md").read_text()
    assert page
    print(page)


def leave(window):
    window.press("C-d")
    window.see_shell()
    command(window, "echo exit code $?; stty -g > after; cmp before after && echo the same", "the same")
    print(window.screen)
    assert not window.is_set("alternate_on")
    assert not window.is_set("mouse_any_flag")
    assert window.is_set("cursor_flag")
