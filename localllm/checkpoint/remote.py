"""The header of a model on the Hub, read from a folder of sparse files that contain only their headers.

So everything that reads headers also reads these, with all its checks.
"""

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

from localllm.checkpoint.gguf.header import read_part
from localllm.checkpoint.header import HEADER_LIMIT, Header, read_header
from localllm.errors import DamagedModel, LocalLLMError, UnsupportedModel
from localllm.hub.file_download import read_range
from localllm.hub.hf_cache import blob_path
from localllm.hub.http import Notify
from localllm.hub.listing import RemoteFile
from localllm.hub.model_files import INDEX_FILE
from localllm.hub.pull import CONNECTIONS, PullPlan, read_small, thread_pool
from localllm.hub.sentence_transformers import CONFIG_FILE, MODULES_FILE, SETTINGS_FILES

SMALL_FILES = ("config.json", "generation_config.json", INDEX_FILE, MODULES_FILE, *SETTINGS_FILES)
SAFETENSORS_FIRST_BYTES = 2**17  # more than most headers need: one request
GGUF_FIRST_BYTES = 2**21  # a vocabulary of 150,000 tokens makes a header of 6 MB
GGUF_MAX_BYTES = 2**26


def remote_header(plan: PullPlan, notify: Notify) -> Header:
    """Read the header of the files that a pull would fetch, from the cache or by ranged requests.

    Raises the errors of `hub.pull.pull` and `read_header`.
    """
    folder = Path(tempfile.mkdtemp(prefix="localllm-"))
    try:
        weights = [file for file in plan.files if file.path.endswith((".safetensors", ".gguf"))]
        small = [file for file in plan.files if is_small_file(file)]
        with thread_pool(CONNECTIONS) as pool:
            list(pool.map(partial(_write_file, plan, folder, notify), [*small, *weights]))
        first = folder / weights[0].path
        return read_header(first if first.suffix == ".gguf" else folder)
    except LocalLLMError as error:  # messages should name the file on the Hub, not the temporary one
        error.args = (str(error).replace(str(folder), str(plan.listing.repo)),)
        error.message = error.message.replace(str(folder), str(plan.listing.repo))
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_small_file(file: RemoteFile) -> bool:
    """Return whether it is a small file with settings of the model, or of a module in its own folder."""
    return file.path in SMALL_FILES or file.path.endswith(f"/{CONFIG_FILE}")


def _write_file(plan: PullPlan, folder: Path, notify: Notify, file: RemoteFile) -> None:
    target = folder / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    if plan.cached_bytes[file.digest] == file.size:
        blob = blob_path(plan.listing.repo.repo, file.digest)
        if blob.is_file():
            target.symlink_to(blob.resolve())
            return
    if is_small_file(file):
        target.write_bytes(read_small(plan.listing, file, notify))
    elif target.suffix == ".gguf":
        _write_gguf(plan, target, file, notify)
    else:
        _write_safetensors(plan, target, file, notify)


def _write_safetensors(plan: PullPlan, target: Path, file: RemoteFile, notify: Notify) -> None:
    """Write a safetensors header, whose first eight bytes are the length of the rest."""
    begin = min(SAFETENSORS_FIRST_BYTES, file.size)
    content = read_range(plan.listing, file, 0, begin, notify) if file.size else b""
    end = min(8 + int.from_bytes(content[:8], "little"), file.size, 8 + HEADER_LIMIT)
    if end > begin:
        content += read_range(plan.listing, file, begin, end, notify)
    _write_sparse(target, content, file.size)


def _write_gguf(plan: PullPlan, target: Path, file: RemoteFile, notify: Notify) -> None:
    """Write a GGUF header, whose length is not stored: fetch more until it can be parsed, up to the first
    tensor.
    """
    content = b""
    while True:
        end = min(2 * len(content) or GGUF_FIRST_BYTES, file.size, GGUF_MAX_BYTES)
        if end == len(content):
            return  # reading the header reports the error
        content += read_range(plan.listing, file, len(content), end, notify)
        _write_sparse(target, content, file.size)
        try:
            tensors = read_part(target)[1]
        except (DamagedModel, UnsupportedModel):
            continue
        if not tensors or min(tensor.offset for tensor in tensors.values()) <= len(content):
            return


def _write_sparse(target: Path, content: bytes, size: int) -> None:
    target.write_bytes(content)
    os.truncate(target, size)
