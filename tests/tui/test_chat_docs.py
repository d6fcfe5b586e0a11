"""The keys in docs/chat.md are those of the app, and the pictures of all pages exist and load nothing."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import localllm.tui
from localllm.tui.dialogs import Confirm, Dialog
from localllm.tui.help_screen import HelpScreen
from localllm.tui.load_screen import LoadScreen
from localllm.tui.picker import Rows, Search
from tools.chat_docs import PAGE, WIDGETS, bindings, render
from tools.screens import FOLDER, render_svg

SAYS_ITS_KEYS = {Confirm, Dialog, HelpScreen, LoadScreen, Rows, Search}  # where they count, so that no page need
PAGES = [PAGE.parents[1] / "README.md", *sorted(PAGE.parent.glob("*.md"))]


def test_the_keys_on_the_page_are_those_of_the_app():
    page = PAGE.read_text(encoding="utf-8")
    assert render(page) == page, "docs/chat.md is stale: run `python tools/chat_docs.py`"


def test_every_key_binding_is_documented():
    modules = pkgutil.walk_packages(localllm.tui.__path__, "localllm.tui.")
    kinds = {
        kind for m in modules for _, kind in inspect.getmembers(importlib.import_module(m.name), inspect.isclass)
    }
    with_keys = {kind for kind in kinds if "BINDINGS" in vars(kind) and [*bindings(kind)]}
    shown = {inherited for kind in WIDGETS.values() for inherited in kind.__mro__}
    assert with_keys - shown == SAYS_ITS_KEYS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pictures_of_a_page_are_there(page):
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / name).is_file(), f"{name}: run `make screens`"


def test_every_screen_is_shown_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {path.name for path in FOLDER.iterdir()} == set(re.findall(r"images/([\w-]+\.svg)", text))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.svg")), ids=lambda path: path.name)
def test_pictures_contain_no_personal_data(path):
    ElementTree.parse(path)
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert "http" not in text and "127.0.0.1" not in text
    assert not re.search(r"/(home|root|tmp|work|Users)/", text) and Path.home().name not in re.findall(
        r"\w+@", text
    )


def test_a_screen_is_drawn_with_colours_blocks_and_unusual_glyphs():
    drawn = render_svg("\x1b[1;38;2;92;200;181m▄█<&\x1b[0m \x1b[7mwhat\x1b[0m", 20, "a <title>")
    texts = [
        element.text for element in ElementTree.fromstring(drawn).iter() if element.text and element.text.strip()
    ]
    assert {"▄█<&", "what", "a\xa0<title>"} <= set(texts)
    assert "fill: #5cc8b5;font-weight: bold" in drawn and "#dfe5ea" in drawn
