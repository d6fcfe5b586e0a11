"""A quick way in for `localllm run`, whose answer may come from a server within milliseconds: reads its flags
without the library that does, which takes longer to import than a warm server to answer. And for `--help`, for
which nobody waits.

What flags there are comes from `words.json`, which is made of the command itself. Only what is plainly right is
read here, and to the same values; all else (abbreviations, what is wrong) is left to the library.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS_FILE = Path(__file__).with_name("words.json")
VALUE_TYPES = {"str": str, "int": int, "float": float}
MAX_DIGITS = 15
RUN_COMMAND = "run"
HELP_ARGUMENTS = (["--help"], ["-h"])
MIN_HELP_COLUMNS = 80  # columns, from which on the library's page is the same for every terminal


def help_page(arguments: Sequence[str]) -> str | None:
    """The page of `localllm --help`; None where the library has to look, or lay it out for a narrow terminal."""
    if list(arguments) not in HELP_ARGUMENTS or shutil.get_terminal_size().columns < MIN_HELP_COLUMNS:
        return None
    return json.loads(WORDS_FILE.read_text(encoding="utf-8"))["help"]


def parse_run_flags(arguments: Sequence[str]) -> dict[str, Any] | None:
    """What `run` is called with for the words of a command line; None where the library has to look."""
    if arguments[:1] != [RUN_COMMAND] or len(arguments) < 2:
        return None
    known = json.loads(WORDS_FILE.read_text(encoding="utf-8"))["commands"][RUN_COMMAND]["options"]
    flags: dict[str, Any] = {
        option["field"]: () if option["many"] else option["default"]
        for option in known.values()
        if option["type"] != "other"
    }
    places, rest = list[str](), list(arguments[:0:-1])
    while rest:
        word = rest.pop()
        if not word.startswith("-"):
            places.append(word)
            continue
        name, equals, value = word.partition("=")
        option = known.get(name)
        if option is None or option["type"] == "other":
            return None
        if option["type"] == "flag":
            if equals:
                return None
            flags[option["field"]] = option["means"]
            continue
        if not equals:
            if not rest:
                return None
            value = rest.pop()
        if not is_unambiguous(value, option["type"]):
            return None
        read = VALUE_TYPES[option["type"]](value)
        flags[option["field"]] = [*flags[option["field"]], read] if option["many"] else read
    if not places:
        return None
    return flags | {"model": places[0], "prompt": places[1:] or ()}


def is_unambiguous(value: str, value_type: str) -> bool:
    """Is it spelt in a way that nobody reads differently?"""
    if value_type == "str":
        return not value.startswith("-")
    whole, point, rest = value.removeprefix("-").partition(".")
    parts = (whole, rest) if point and value_type == "float" else (whole + point + rest,)
    return all(part.isascii() and part.isdecimal() and len(part) <= MAX_DIGITS for part in parts)
