"""The app's two themes, and the file that stores the user's choice."""

import os
from pathlib import Path
from typing import Any

from textual.app import App
from textual.theme import Theme

from localllm.files import write_atomic
from localllm.formatting import one_line

THEME_FILE = "theme"
MAX_NAME_BYTES = 64
ANSI_THEME = "ansi-dark"  # uses the terminal's own colours


def _theme(name: str, accent: str, on_accent: str, muted: str, background: str, **rest: Any) -> Theme:
    """Return a theme with one accent colour; all text is readable on background, surface and panel."""
    return Theme(
        name,
        primary=accent,
        secondary=accent,
        accent=accent,
        background=background,
        variables={
            "text-muted": muted,
            "foreground-muted": muted,
            "block-cursor-foreground": on_accent,
            "button-color-foreground": on_accent,
            "scrollbar-background": background,
        },
        **rest,
    )


DARK = _theme(
    "localllm-dark",
    dark=True,
    accent="#5cc8b5",
    on_accent="#0e1512",
    muted="#98a4b0",
    foreground="#dfe5ea",
    background="#12161b",
    surface="#191e25",
    panel="#222932",
    warning="#e7b35a",
    error="#f28482",
    success="#8fcf7f",
)
LIGHT = _theme(
    "localllm-light",
    dark=False,
    accent="#0b6b60",
    on_accent="#ffffff",
    muted="#545e68",
    foreground="#1d2329",
    background="#fbfaf7",
    surface="#f3f1ec",
    panel="#e9e6df",
    warning="#7d5200",
    error="#a8242c",
    success="#2c6a22",
)


def use_ansi_colors() -> bool | None:
    """Return `ansi_color` for an app: with NO_COLOR, Textual would otherwise still send shades of grey."""
    return True if os.environ.get("NO_COLOR") else None


def apply_theme(app: App[Any], home: Path) -> None:
    """Register the themes in a running app, apply the stored choice, and store each later choice."""
    for theme in (DARK, LIGHT):
        app.register_theme(theme)
    name = read_theme(home)
    if name is not None and name not in app.available_themes:
        message = f"{home / THEME_FILE} names an unknown theme: {one_line(name)!r}"
        app.notify(message, severity="warning", markup=False)
        name = None
    if app.console.color_system == "standard" and not (name or "").startswith("ansi-"):
        name = ANSI_THEME
    app.theme = name or DARK.name
    # The signal of this first theme arrives after the first frame, and is not a choice of the user.
    app.call_later(app.theme_changed_signal.subscribe, app, lambda theme: _write_theme(app, home, theme.name))


def read_theme(home: Path) -> str | None:
    """Return the stored name, None if there is none."""
    try:
        with (home / THEME_FILE).open("rb") as file:
            return file.read(MAX_NAME_BYTES).decode(errors="replace").strip()
    except OSError:
        return None


def _write_theme(app: App[Any], home: Path, name: str) -> None:
    if name == read_theme(home):
        return
    try:
        write_atomic(home / THEME_FILE, name + "\n")
    except OSError as error:
        app.notify(f"the theme cannot be saved: {error.strerror}", severity="warning", markup=False)
