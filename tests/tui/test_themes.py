import itertools

import pytest
from textual.app import App
from textual.color import Color

from localllm.tui.themes import DARK, LIGHT, apply_theme

AA = 4.5  # of WCAG 2.2, 1.4.3, for text of any size
GROUNDS = ("background", "surface", "panel")
TEXTS = ("foreground", "text-muted", "foreground-muted", "primary", "accent", "warning", "error", "success")
PAIRS = [
    *itertools.product(TEXTS, GROUNDS),
    ("block-cursor-foreground", "block-cursor-background"),
    ("block-cursor-blurred-foreground", "block-cursor-blurred-background"),
    ("input-cursor-foreground", "input-cursor-background"),
    ("footer-key-foreground", "footer-background"),
    ("footer-description-foreground", "footer-background"),
    *(("button-color-foreground", name) for name in ("primary", "error", "success", "warning")),
    *((f"text-{name}", f"{name}-muted") for name in ("primary", "error", "success", "warning")),
]


def luminance(color: Color) -> float:
    """Relative luminance as defined in WCAG 2.2."""
    parts = (part / 255 for part in (color.r, color.g, color.b))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_every_text_is_readable_on_its_ground(theme):
    colors = theme.to_color_system().generate()
    for text, ground in PAIRS:
        behind = Color.parse(colors["background"]) + Color.parse(colors[ground])
        light, dark = sorted((luminance(behind + Color.parse(colors[text])), luminance(behind)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= AA, (text, ground)


class Dressed(App[None]):
    def __init__(self, home):
        super().__init__()
        self.home = home

    def on_mount(self):
        apply_theme(self, self.home)


async def shown(home, choose=""):
    """Theme with which an app starts, and its notifications."""
    app = Dressed(home)
    async with app.run_test() as pilot:
        await pilot.pause()
        name = app.theme
        if choose:
            app.theme = choose
            await pilot.pause()
            await pilot.pause()
        return name, [note.message for note in app._notifications]


async def test_a_chosen_theme_is_saved_and_previews_are_not(tmp_path):
    assert await shown(tmp_path) == (DARK.name, [])
    assert not (tmp_path / "theme").exists()
    await shown(tmp_path, choose=LIGHT.name)
    assert await shown(tmp_path, choose="nord") == (LIGHT.name, [])
    assert await shown(tmp_path) == ("nord", [])


@pytest.mark.parametrize("content", [b"\xff\x00\x1b[2J", b"", b"no-such-theme\n", b"x" * 10**6])
async def test_a_damaged_file_is_ignored_with_a_note(tmp_path, content):
    (tmp_path / "theme").write_bytes(content)
    name, notes = await shown(tmp_path)
    assert name == DARK.name
    assert len(notes) == 1 and "names an unknown theme" in notes[0] and "\x1b" not in notes[0]


async def test_a_failed_save_of_the_theme_is_reported(tmp_path):
    (tmp_path / "home").write_text("a file")
    _, notes = await shown(tmp_path / "home", choose=LIGHT.name)
    assert any("cannot be saved" in note for note in notes)


async def test_sixteen_colors_are_the_terminals_own(tmp_path, monkeypatch):
    monkeypatch.setattr("textual.constants.COLOR_SYSTEM", "standard")
    (tmp_path / "theme").write_text(LIGHT.name)
    assert await shown(tmp_path) == ("ansi-dark", [])
    (tmp_path / "theme").write_text("ansi-light")
    assert await shown(tmp_path) == ("ansi-light", [])
