"""What the Tab key offers. A shell asks on every press, so nothing is imported that takes time: commands and flags
come from `words.json`, which `tools/cli_docs.py` writes. Never the network, and no file larger than a few names.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from localllm.errors import LocalLLMError

COMPLETION_VARIABLE = "_LOCALLLM_COMPLETE"  # the line up to the cursor, in the environment
COMMAND_TABLE = Path(__file__).with_name("words.json")
FIXED_VALUES = {  # of a flag, or of what the help calls so
    "--activations": ("int8",),
    "--format": ("md", "json"),
    "--log-format": ("text", "json", "off"),
    "--to": ("gguf",),
    "--type": ("q4_0", "q8_0"),
    "API": ("completions", "chat", "ollama-generate", "ollama-chat"),
    "DEVICE": ("auto", "cpu", "cuda"),
    "DTYPE": ("auto", "float32", "bfloat16", "float16"),
    "METHOD": ("rtn", "gptq", "awq", "smoothquant"),
    "KV": ("auto", "int8", "fp8"),
    "QUANT": ("int8", "int4"),
    "SHELL": ("bash", "zsh", "fish"),
}
PATH_PREFIXES = ("/", ".", "~")  # words that begin so are left to the shell
MODEL_METAVARS = ("MODEL", "REFERENCE", "OTHER")  # what the help calls one
REPEATED = "..."  # behind an argument that may be given several times
UNQUOTED_WORD = re.compile(r"[\w./+@:-]+")  # what stands in a line without quotes
MAX_FOLDER_ENTRIES = 2000  # of a folder are looked at

WordAndHelp = tuple[str, str]  # a word and what it is


def print_completions(line: str) -> int:
    """Print what may stand at the end of the line: a word and what it is, with a tab between; nothing where names
    of files may stand. A shell shows no error, so there is none."""
    with suppress(Exception):
        for word, about in completions(line):
            print(word, about, sep="\t")
    return 0


def completions(line: str) -> list[WordAndHelp]:
    """All that begins as the last word of the line does, which may be empty."""
    *before, word = split_words(line)
    program = next((i for i, given in enumerate(before) if Path(given).name == "localllm"), 0)
    return [offer for offer in _completions_after(before[program + 1 :], word) if offer[0].startswith(word)]


def split_words(line: str) -> list[str]:
    """Words as a shell reads them; a quote that is still open ends with the line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = []
    try:
        words.extend(lexer)
    except ValueError:
        words.append(lexer.token or "")
    return [*words, ""] if not words or line[-1:].isspace() else words


def _completions_after(before: list[str], word: str) -> Iterator[WordAndHelp]:
    known = json.loads(COMMAND_TABLE.read_text(encoding="utf-8"))
    name = next((given for given in before if not given.startswith("-")), None)
    if name is None:
        names = [(name, command["help"]) for name, command in known["commands"].items()]
        yield from _flag_names(known["options"]) if word.startswith("-") else names
    elif name in known["commands"]:
        command = known["commands"][name]
        yield from _command_completions(command, before[before.index(name) + 1 :], word)


def _command_completions(command: dict[str, Any], before: list[str], word: str) -> Iterator[WordAndHelp]:
    options = command["options"]
    arguments, flag = 0, None  # given so far; the one that waits for its value
    for given in before:
        if flag:
            flag = None
        elif given.startswith("-") and len(given) > 1:
            flag = options.get(given, {}).get("value") and given
        else:
            arguments += 1
    name, equals, _ = word.partition("=")
    if flag:
        yield from _flag_value_completions(flag, options[flag], word)
    elif equals and name in options:
        found = _flag_value_completions(name, options[name], word.removeprefix(f"{name}="))
        yield from ((f"{name}={value}", about) for value, about in found)
    elif word.startswith("-"):
        yield from _flag_names(options)
    else:
        argument = _argument_metavar(command["arguments"], arguments)
        yield from _model_names(word) if argument in MODEL_METAVARS else _fixed_values(argument)


def _argument_metavar(metavars: list[str], index: int) -> str:
    """What may stand there; the last one may be meant for all that follow."""
    if index < len(metavars):
        return metavars[index].removesuffix(REPEATED)
    return metavars[-1].removesuffix(REPEATED) if metavars and metavars[-1].endswith(REPEATED) else ""


def _flag_value_completions(flag: str, option: dict[str, Any], word: str) -> Iterator[WordAndHelp]:
    kind = option["value"] or ""
    if kind in MODEL_METAVARS:
        yield from _model_names(word)
    elif kind == "ID" and option["type"] == "str":
        yield from _session_ids()
    else:
        yield from _fixed_values(flag if flag in FIXED_VALUES else kind)


def _fixed_values(metavar: str) -> Iterator[WordAndHelp]:
    return ((value, "") for value in FIXED_VALUES.get(metavar, ()))


def _session_ids() -> Iterator[WordAndHelp]:
    from localllm.settings import Settings

    names = sorted(file.stem for file in (Settings.from_environment().home / "chats").glob("*.json"))
    yield from (("last", "the newest conversation"),) if names else ()
    yield from ((name, "a conversation") for name in names)


def _flag_names(options: dict[str, Any]) -> Iterator[WordAndHelp]:
    return ((name, option["help"]) for name, option in options.items())


def _model_names(word: str) -> Iterator[WordAndHelp]:
    if word.startswith(PATH_PREFIXES):
        return
    # Imported here, because commands and flags can do without.
    from localllm.hub.catalog import catalog

    for name, entry in catalog().items():
        size = f"{entry.parameters}, " if entry.parameters else ""
        yield name, f"{size}{entry.about}" if name == entry.name else f"the same as {entry.name}"
    yield from ((name, "one of your names") for name in _alias_names())
    yield from ((name, "in the cache") for name in _cached_names())
    yield from _local_model_paths(word)


def _alias_names() -> Iterator[str]:
    from localllm.hub.local_names import read_aliases
    from localllm.hub.names import ALIAS_NAME

    with suppress(LocalLLMError):  # a damaged file must not hide the other names
        yield from filter(ALIAS_NAME.fullmatch, read_aliases())


def _cached_names() -> Iterator[str]:
    """Repositories of the Hugging Face cache, by its folders alone; of GGUF also each edition."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from localllm.hub.gguf import models_in_snapshot, quant_tag
    from localllm.hub.names import REPO

    for root in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        repo = root.name.removeprefix("models--").replace("--", "/", 1)
        snapshots = list(root.glob("snapshots/*"))
        editions = {quant_tag(file) for snapshot in snapshots for file in models_in_snapshot(snapshot)}
        if REPO.fullmatch(repo) and (editions or any((s / "config.json").exists() for s in snapshots)):
            yield repo
            yield from (f"{repo}:{quant}" for quant in sorted(filter(None, editions)))


def _local_model_paths(word: str) -> Iterator[WordAndHelp]:
    """Folders that hold a model and GGUF files, in the folder that the word names so far."""
    folder = os.path.dirname(word)
    with suppress(OSError), os.scandir(folder or ".") as found:
        for entry, _ in zip(found, range(MAX_FOLDER_ENTRIES), strict=False):
            path = os.path.join(folder, entry.name)
            if not UNQUOTED_WORD.fullmatch(path) or entry.name.startswith("."):
                continue
            if entry.name.endswith(".gguf"):
                yield path, "a file"
            elif entry.is_dir() and _is_model_folder(entry.path):
                yield f"{path}/", "a folder"


def _is_model_folder(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "config.json")) or any(Path(folder).glob("*.gguf"))
