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


def place(made_of: tuple[str, ...]) -> Path:
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()
    return Settings.from_environment().cache / "kernels" / f"{name}.o"


def read(made_of: tuple[str, ...]) -> bytes | None:
    try:
        content = place(made_of).read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def write(made_of: tuple[str, ...], code: bytes) -> None:
    path = place(made_of)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(draft, path)
