"""`localllm cache`: list, clear or verify the folder of the prefix cache."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.io import StdoutWriter
from localllm.errors import UsageError
from localllm.files import expand_path
from localllm.formatting import format_bytes, format_table, format_utc
from localllm.runtime.kv_cache.disk_folder import CacheFolder
from localllm.runtime.kv_cache.snapshot import DamagedSnapshot, KVSnapshot, read_tokens
from localllm.settings import DISK_CACHE_BYTES, DISK_CACHE_FOLDER, Settings

ACTIONS = ("list", "clear", "verify")


@dataclass
class StoredPrompts:
    """The stored prompts of one model in one data type."""

    model: str
    dtype: str
    kv_dtype: str
    files: int = 0
    tokens: int = 0
    bytes: int = 0
    last_used: float = 0.0  # seconds since 1970


def cache(
    action: Annotated[
        str, typer.Argument(metavar="list|clear|verify", hidden=True, autocompletion=lambda: list(ACTIONS))
    ],
    cache_dir: Annotated[
        str | None,
        options.option(
            "--cache-dir", text="Folder of the cache; default: that of saved conversations.", metavar="PATH"
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List, clear or verify the prompts that are kept on disk.

    `list` shows what is stored for each model, `clear` deletes everything, and `verify` reads every file and
    deletes damaged ones. Running processes continue without deleted files.
    """
    if action not in ACTIONS:
        raise UsageError(f"there is no action {action!r}", f"use one of {', '.join(ACTIONS)}")
    path = expand_path(cache_dir) if cache_dir else Settings.from_environment().home / DISK_CACHE_FOLDER
    out = StdoutWriter()
    if not path.is_dir():
        if cache_dir:
            raise UsageError(f"there is no folder {path}", "use the folder of --cache-dir")
        out.write(json.dumps(empty_result(action, path)) + "\n" if as_json else f"{path} is empty\n")
        return
    folder = CacheFolder(path, DISK_CACHE_BYTES)
    match action:
        case "list":
            stored = stored_prompts(folder)
            result = {"path": str(path), "models": [vars(each) for each in stored]}
            out.write(json.dumps(result) + "\n" if as_json else describe(path, stored))
        case "clear":
            freed = folder.clear()
            result = {"path": str(path), "freed_bytes": freed}
            out.write(json.dumps(result) + "\n" if as_json else f"removed {format_bytes(freed)} from {path}\n")
        case _:
            checked, removed = verify(folder)
            result = {"path": str(path), "checked": checked, "removed": removed}
            text = f"checked {checked:,} files in {path}, removed {len(removed)} that were damaged\n"
            out.write(json.dumps(result) + "\n" if as_json else text)


def empty_result(action: str, path: Path) -> dict[str, object]:
    """The JSON output for a folder that does not exist yet."""
    fields: dict[str, dict[str, object]] = {
        "list": {"models": []},
        "clear": {"freed_bytes": 0},
        "verify": {"checked": 0, "removed": []},
    }
    return {"path": str(path)} | fields[action]


def stored_prompts(folder: CacheFolder) -> list[StoredPrompts]:
    """Return the stored prompts by model, the largest share first. Damaged files are left out."""
    stored: dict[tuple[str, str, str], StoredPrompts] = {}
    for name, file in folder.files.items():
        with suppress(OSError, DamagedSnapshot):
            tokens = read_tokens(folder.path / name)
            key = (tokens.identity.name, tokens.identity.dtype, tokens.identity.kv_dtype)
            entry = stored.setdefault(key, StoredPrompts(*key))
            entry.files += 1
            entry.tokens += tokens.end - tokens.start
            entry.bytes += file.size
            entry.last_used = max(entry.last_used, file.used_ns / 1e9)
    return sorted(stored.values(), key=lambda entry: -entry.bytes)


def describe(path: Path, stored: list[StoredPrompts]) -> str:
    if not stored:
        return f"{path} is empty\n"
    rows = [("MODEL", "DTYPE", "KV", "TOKENS", "SIZE", "LAST USED")]
    rows += [
        (s.model, s.dtype, s.kv_dtype, f"{s.tokens:,}", format_bytes(s.bytes), format_utc(s.last_used))
        for s in stored
    ]
    total = format_bytes(sum(s.bytes for s in stored))
    return f"{format_table(rows, '<<<>><')}\n{total} in {path}\n"


def verify(folder: CacheFolder) -> tuple[int, list[str]]:
    """Read every file, and delete damaged ones. Returns how many were read, and the names of the deleted ones."""
    checked, removed = 0, list[str]()
    for name in sorted(folder.files):
        try:
            KVSnapshot.parse(bytearray((folder.path / name).read_bytes()))
        except FileNotFoundError:
            continue
        except (OSError, DamagedSnapshot):
            with folder.lock():
                folder.remove(name)
            removed.append(name)
        checked += 1
    return checked, removed
