"""Machine code that an earlier process compiled, in `localllm/kernels` of the user's folder for caches.

A file holds the digest of the rest and the code. What cannot be read, or is not what was written, is compiled
again; what cannot be written, is compiled by the next process again.
"""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from localllm.settings import Settings

DIGEST_BYTES = 32


def cache_path(key: tuple[str, ...]) -> Path:
    name = hashlib.sha256("\0".join(key).encode()).hexdigest()
    return Settings.from_environment().cache / "kernels" / f"{name}.o"


def read_cached(key: tuple[str, ...]) -> bytes | None:
    try:
        content = cache_path(key).read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def write_cached(key: tuple[str, ...], code: bytes) -> None:
    path = cache_path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(draft, path)
