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

VARIABLE = "_LOCALLLM_COMPLETE"  # the line up to the cursor, in the environment
WORDS = Path(__file__).with_name("words.json")
VALUES = {  # of a flag, or of what the help calls so
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
AS_A_PATH = ("/", ".", "~")  # words that begin so are left to the shell
A_MODEL = ("MODEL", "REFERENCE", "OTHER")  # what the help calls one
MANY = "..."  # behind an argument that may be given several times
PLAIN = re.compile(r"[\w./+@:-]+")  # what stands in a line without quotes
MOST_FILES = 2000  # of a folder are looked at

Offer = tuple[str, str]  # a word and what it is


def answer(line: str) -> int:
    """Print what may stand at the end of the line: a word and what it is, with a tab between; nothing where names
    of files may stand. A shell shows no error, so there is none."""
    with suppress(Exception):
        for word, about in offers(line):
            print(word, about, sep="\t")
    return 0


def offers(line: str) -> list[Offer]:
    """All that begins as the last word of the line does, which may be empty."""
    *before, word = split(line)
    program = next((i for i, given in enumerate(before) if Path(given).name == "localllm"), 0)
    return [offer for offer in _offers(before[program + 1 :], word) if offer[0].startswith(word)]


def split(line: str) -> list[str]:
    """Words as a shell reads them; a quote that is still open ends with the line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = []
    try:
        words.extend(lexer)
    except ValueError:
        words.append(lexer.token or "")
    return [*words, ""] if not words or line[-1:].isspace() else words


def _offers(before: list[str], word: str) -> Iterator[Offer]:
    known = json.loads(WORDS.read_text(encoding="utf-8"))
    name = next((given for given in before if not given.startswith("-")), None)
    if name is None:
        names = [(name, command["help"]) for name, command in known["commands"].items()]
        yield from _flags(known["options"]) if word.startswith("-") else names
    elif name in known["commands"]:
        command = known["commands"][name]
        yield from _of_command(command, before[before.index(name) + 1 :], word)


def _of_command(command: dict[str, Any], before: list[str], word: str) -> Iterator[Offer]:
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
        yield from _values(flag, options[flag], word)
    elif equals and name in options:
        found = _values(name, options[name], word.removeprefix(f"{name}="))
        yield from ((f"{name}={value}", about) for value, about in found)
    elif word.startswith("-"):
        yield from _flags(options)
    else:
        argument = _argument(command["arguments"], arguments)
        yield from _models(word) if argument in A_MODEL else _listed(argument)


def _argument(kinds: list[str], place: int) -> str:
    """What may stand there; the last one may be meant for all that follow."""
    if place < len(kinds):
        return kinds[place].removesuffix(MANY)
    return kinds[-1].removesuffix(MANY) if kinds and kinds[-1].endswith(MANY) else ""


def _values(flag: str, option: dict[str, Any], word: str) -> Iterator[Offer]:
    kind = option["value"] or ""
    if kind in A_MODEL:
        yield from _models(word)
    elif kind == "ID" and option["type"] == "str":
        yield from _conversations()
    else:
        yield from _listed(flag if flag in VALUES else kind)


def _listed(kind: str) -> Iterator[Offer]:
    return ((value, "") for value in VALUES.get(kind, ()))


def _conversations() -> Iterator[Offer]:
    from localllm.settings import Settings

    names = sorted(file.stem for file in (Settings.from_environment().home / "chats").glob("*.json"))
    yield from (("last", "the newest conversation"),) if names else ()
    yield from ((name, "a conversation") for name in names)


def _flags(options: dict[str, Any]) -> Iterator[Offer]:
    return ((name, option["help"]) for name, option in options.items())


def _models(word: str) -> Iterator[Offer]:
    if word.startswith(AS_A_PATH):
        return
    # Imported here, because commands and flags can do without.
    from localllm.hub.catalog import catalog

    for name, entry in catalog().items():
        size = f"{entry.parameters}, " if entry.parameters else ""
        yield name, f"{size}{entry.about}" if name == entry.name else f"the same as {entry.name}"
    yield from ((name, "one of your names") for name in _own_names())
    yield from ((name, "in the cache") for name in _cached_names())
    yield from _below(word)


def _own_names() -> Iterator[str]:
    from localllm.hub.aliases import aliases
    from localllm.hub.names import ALIAS

    with suppress(LocalLLMError):  # a damaged file must not hide the other names
        yield from filter(ALIAS.fullmatch, aliases())


def _cached_names() -> Iterator[str]:
    """Repositories of the Hugging Face cache, by its folders alone; of GGUF also each edition."""
    from huggingface_hub.constants import HF_HUB_CACHE

    from localllm.hub.gguf import models_below, quant_of
    from localllm.hub.names import REPO

    for root in sorted(Path(HF_HUB_CACHE).glob("models--*--*")):
        repo = root.name.removeprefix("models--").replace("--", "/", 1)
        snapshots = list(root.glob("snapshots/*"))
        editions = {quant_of(file) for snapshot in snapshots for file in models_below(snapshot)}
        if REPO.fullmatch(repo) and (editions or any((s / "config.json").exists() for s in snapshots)):
            yield repo
            yield from (f"{repo}:{quant}" for quant in sorted(filter(None, editions)))


def _below(word: str) -> Iterator[Offer]:
    """Folders that hold a model and GGUF files, in the folder that the word names so far."""
    folder = os.path.dirname(word)
    with suppress(OSError), os.scandir(folder or ".") as found:
        for entry, _ in zip(found, range(MOST_FILES), strict=False):
            path = os.path.join(folder, entry.name)
            if not PLAIN.fullmatch(path) or entry.name.startswith("."):
                continue
            if entry.name.endswith(".gguf"):
                yield path, "a file"
            elif entry.is_dir() and _holds_model(entry.path):
                yield f"{path}/", "a folder"


def _holds_model(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "config.json")) or any(Path(folder).glob("*.gguf"))
