"""Slots of llama.cpp's server: saved to files, restored from them, and erased. A slot's tokens are those of its
last request, whose keys and values are in the prefix cache; `llm/kv_transfer.py` has the files' format.
"""

import os
import re
import secrets
import time
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any

from typing_extensions import Buffer

from localllm.api.body import StrictModel
from localllm.errors import BadField, NotSupported, UsageError
from localllm.files import explain_disk_errors
from localllm.llm.kv_transfer import StateExport, StateImport
from localllm.llm.llm import LLM
from localllm.request import CACHE_SCOPE, CLIENT, MAX_SLOTS
from localllm.runtime.kv_cache.disk_folder import DRAFT_PREFIX, write_durably
from localllm.runtime.kv_cache.snapshot import DamagedSnapshot, read_tokens

FILE_NAME = re.compile(r"[^/\\\0-\x1f\x7f.][^/\\\0-\x1f\x7f]*")
MAX_FILE_NAME_BYTES = 200
READ_BYTES = 2**20  # at a time

JsonObject = dict[str, Any]


class SlotFileBody(StrictModel):
    model: str
    filename: str


class SlotFiles:
    """The folder of `--slot-save-path`."""

    def __init__(self, path: Path):
        """Raises UsageError if the folder cannot be made."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise UsageError(
                f"--slot-save-path {path} cannot be used: {error.strerror}", "use another folder"
            ) from None

    def file(self, name: str) -> Path:
        """Path of a client's file. Raises BadField for a name that is more than a file name."""
        if not FILE_NAME.fullmatch(name) or len(name.encode(errors="replace")) > MAX_FILE_NAME_BYTES:
            remedy = "send a file name without / and \\ that does not begin with a dot"
            raise BadField("filename", f"{name[:100]!r} is not accepted as a file name", remedy)
        return self.path / name

    def save(self, llm: LLM, number: int, name: str) -> JsonObject:
        """Write the cached tokens of a slot to a file, and return the answer."""
        began, file = time.perf_counter(), self.file(name)
        check_owner(file)
        slot = llm.worker.slot_table.find(CLIENT.get(), number)
        export = StateExport(llm, slot.token_ids if slot else (), CACHE_SCOPE.get(), CLIENT.get())

        def chunks() -> Iterator[Buffer]:
            for snapshot in export:
                yield from snapshot

        draft = self.path / f"{DRAFT_PREFIX}{secrets.token_hex(8)}"
        with explain_disk_errors(self.path):
            write_durably(file, draft, chunks())
        return {
            "id_slot": number,
            "filename": name,
            "n_saved": export.tokens,
            "n_written": export.nbytes,
            "timings": {"save_ms": elapsed_ms(began)},
        }

    def restore(self, llm: LLM, number: int, name: str) -> JsonObject:
        """Read the tokens of a slot from a file into the prefix cache, and return the answer."""
        began, file = time.perf_counter(), self.file(name)
        state = StateImport(llm, CACHE_SCOPE.get(), CLIENT.get())
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            raise BadField("filename", f"there is no saved slot {name}", "save it first") from None
        with open(descriptor, "rb", buffering=0) as stream:
            while content := stream.read(READ_BYTES):
                for snapshot in state.add(content):
                    state.install(snapshot)
        state.finish()
        remember(llm, number, state)
        return {
            "id_slot": number,
            "filename": name,
            "n_restored": len(state.token_ids),
            "n_read": state.nbytes,
            "timings": {"restore_ms": elapsed_ms(began)},
        }


def erase(llm: LLM, number: int) -> JsonObject:
    """Forget the tokens of a slot, also in the prefix cache unless others use them, and return the answer."""
    worker, client, scope = llm.worker, CLIENT.get(), CACHE_SCOPE.get()

    def forget() -> ListLike[int]:
        token_ids = worker.slot_table.erase(client, number)
        worker.engine.pool.forget(token_ids, scope)
        return token_ids

    erased = worker.call(forget)
    return {"id_slot": number, "n_erased": len(erased)}


def remember(llm: LLM, number: int | None, state: StateImport) -> int:
    """Let a slot have the tokens of a state, the lowest idle one if `number` is None. Returns its number."""
    table, client = llm.worker.slot_table, CLIENT.get()
    return llm.worker.call(lambda: table.remember(client, number, state.token_ids))


def check_owner(file: Path) -> None:
    """Raise BadField for a file that belongs to another API key, or is not a saved slot."""
    try:
        owner = read_tokens(file).identity.scope if file.stat().st_size else CLIENT.get()
    except FileNotFoundError:
        return
    except (OSError, DamagedSnapshot):
        owner = None
    if owner != CLIENT.get():
        raise BadField("filename", f"{file.name} exists and is not a slot of this API key", "send another name")


def parse_number(text: str) -> int:
    """Number of a slot in a path. Raises BadField."""
    if not (text.isascii() and text.isdecimal() and int(text[:9]) < MAX_SLOTS):
        raise BadField("id_slot", f"{text[:20]!r} is not a slot", f"slots are numbered 0 to {MAX_SLOTS - 1}")
    return int(text)


def require_files(files: SlotFiles | None) -> SlotFiles:
    """Raises NotSupported without a folder."""
    if files is None:
        raise NotSupported("this server does not save slots", "start it with --slot-save-path FOLDER")
    return files


def elapsed_ms(began: float) -> float:
    return round((time.perf_counter() - began) * 1000, 3)
