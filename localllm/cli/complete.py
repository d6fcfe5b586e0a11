"""Words that the Tab key offers. Shells start this on every press, so it imports nothing slow, never uses the
network, and reads commands and flags from `commands.json`.
"""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from localllm.cli.fast_start import read_command_table
from localllm.errors import LocalLLMError

PATH_PREFIXES = ("/", ".", "~")  # the shell completes words that begin with these
MODEL_METAVARS = ("MODEL", "REFERENCE", "OTHER")
SESSION_METAVAR = "ID"
UNQUOTED_WORD = re.compile(r"[\w./+@:-]+")  # needs no quotes in a shell
MAX_FOLDER_ENTRIES = 2000

WordAndHelp = tuple[str, str]


def print_completions(line: str) -> int:
    """Print the completions of a command line, each as a word, a tab and its help; nothing if the shell should
    complete file names. Errors are ignored, because a shell cannot show them."""
    with suppress(Exception):
        for word, text in completions(line):
            print(word, text, sep="\t")
    return 0


def completions(line: str) -> list[WordAndHelp]:
    """Candidates that begin with the last word of the line, which may be empty."""
    *previous, word = split_words(line)
    program = next((i for i, other in enumerate(previous) if Path(other).name == "localllm"), 0)
    return [pair for pair in _candidates(previous[program + 1 :], word) if pair[0].startswith(word)]


def split_words(line: str) -> list[str]:
    """Words of a command line as a shell splits them; an open quote extends to the end."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = []
    try:
        words.extend(lexer)
    except ValueError:
        words.append(lexer.token or "")
    return [*words, ""] if not words or line[-1:].isspace() else words


def _candidates(previous: list[str], word: str) -> Iterator[WordAndHelp]:
    table = read_command_table()
    commands = table["commands"]
    names = [word for word in previous if not word.startswith("-")]
    is_help = names[:1] == ["help"]
    if is_help and len(names) > 1:
        return
    if not names or is_help:
        command_names = [(name, command["help"]) for name, command in commands.items()]
        yield from _flag_names(table["options"]) if word.startswith("-") else command_names
    elif names[0] in commands:
        yield from _command_candidates(commands[names[0]], previous[previous.index(names[0]) + 1 :], word)


def _command_candidates(command: dict[str, Any], previous: list[str], word: str) -> Iterator[WordAndHelp]:
    options = command["options"]
    positional, flag = 0, None  # number of arguments so far; the flag whose value is next
    for other in previous:
        if flag:
            flag = None
        elif other.startswith("-") and len(other) > 1:
            flag = options.get(other, {}).get("metavar") and other
        else:
            positional += 1
    name, equals, _ = word.partition("=")
    if flag:
        yield from _value_candidates(options[flag], word)
    elif equals and name in options:
        values = _value_candidates(options[name], word.removeprefix(f"{name}="))
        yield from ((f"{name}={value}", text) for value, text in values)
    elif word.startswith("-"):
        yield from _flag_names(options)
    elif argument := _argument_at(command["arguments"], positional):
        yield from _value_candidates(argument, word)


def _argument_at(arguments: list[dict[str, Any]], index: int) -> dict[str, Any] | None:
    """Argument at this position; the last one may take all that follow."""
    if index < len(arguments):
        return arguments[index]
    return arguments[-1] if arguments and arguments[-1]["multiple"] else None


def _value_candidates(parameter: dict[str, Any], word: str) -> Iterator[WordAndHelp]:
    """Values of an option or argument: its choices, models or saved conversations."""
    if parameter["metavar"] in MODEL_METAVARS:
        yield from _model_names(word)
    elif parameter["metavar"] == SESSION_METAVAR and parameter.get("type") == "str":  # --stop-id takes a number
        yield from _session_ids()
    else:
        yield from ((value, "") for value in parameter["choices"])


def _flag_names(options: dict[str, Any]) -> Iterator[WordAndHelp]:
    return ((name, option["help"]) for name, option in options.items())


def _session_ids() -> Iterator[WordAndHelp]:
    from localllm.settings import Settings

    names = sorted(file.stem for file in (Settings.from_environment().home / "chats").glob("*.json"))
    yield from (("last", "the newest conversation"),) if names else ()
    yield from ((name, "a conversation") for name in names)


def _model_names(word: str) -> Iterator[WordAndHelp]:
    if word.startswith(PATH_PREFIXES):
        return
    from localllm.hub.catalog import catalog  # not needed for commands and flags

    for name, entry in catalog().items():
        size = f"{entry.parameters}, " if entry.parameters else ""
        yield name, f"{size}{entry.about}" if name == entry.name else f"the same as {entry.name}"
    yield from ((name, "an alias") for name in _alias_names())
    yield from ((name, "in the cache") for name in _cached_names())
    yield from _local_model_paths(word)


def _alias_names() -> Iterator[str]:
    from localllm.hub.local_names import read_aliases
    from localllm.hub.names import ALIAS_NAME

    with suppress(LocalLLMError):  # a damaged file must not hide the other names
        yield from filter(ALIAS_NAME.fullmatch, read_aliases())


def _cached_names() -> Iterator[str]:
    """Repositories in the Hugging Face cache, by folder names alone; for GGUF also each of the models."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from localllm.hub.gguf import models_in_snapshot, quant_tag
    from localllm.hub.names import REPO

    for root in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        repo = root.name.removeprefix("models--").replace("--", "/", 1)
        snapshots = list(root.glob("snapshots/*"))
        quants = {quant_tag(file) for snapshot in snapshots for file in models_in_snapshot(snapshot)}
        if REPO.fullmatch(repo) and (quants or any((s / "config.json").exists() for s in snapshots)):
            yield repo
            yield from (f"{repo}:{quant}" for quant in sorted(filter(None, quants)))


def _local_model_paths(word: str) -> Iterator[WordAndHelp]:
    """Model folders and GGUF files in the folder that the word names so far."""
    folder = os.path.dirname(word)
    with suppress(OSError), os.scandir(folder or ".") as entries:
        for entry, _ in zip(entries, range(MAX_FOLDER_ENTRIES), strict=False):
            path = os.path.join(folder, entry.name)
            if not UNQUOTED_WORD.fullmatch(path) or entry.name.startswith("."):
                continue
            if entry.name.endswith(".gguf"):
                yield path, "a file"
            elif entry.is_dir() and _is_model_folder(entry.path):
                yield f"{path}/", "a folder"


def _is_model_folder(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "config.json")) or any(Path(folder).glob("*.gguf"))
