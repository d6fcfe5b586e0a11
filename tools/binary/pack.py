"""A folder as parts behind a launcher, in one file that unpacks it. docs/binary.md has the format."""

import hashlib
import os
import struct
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath

CUT = 32 * 2**20  # bytes of contents in a part: few enough for several threads, many enough to find what repeats
TIME = 315532800  # 1980-01-01: no file of the folder is younger, unless somebody has changed it
MAGIC = b"LOCALLLM"
DIGITS = 32  # of the digest, in the name of the folder


def pack(
    folder: Path,
    launcher: Path,
    target: Path,
    program: PurePosixPath,
    arguments: Sequence[str] = (),
    *,
    glibc: str = "2.0",
    level: int = 19,
    jobs: int = 1,
    cut: int = CUT,
) -> None:
    """Write `target`, which unpacks a copy of the folder and runs its program, with these arguments before the
    user's. glibc: the least version that the program needs; level: of zstd, 1 to 19; jobs: threads; cut: bytes of
    contents in a part."""
    files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: (p.suffix, p.as_posix()))
    names = {path: path.relative_to(folder) for path in files}
    folders = sorted({parent.as_posix() for name in names.values() for parent in name.parents} - {"."})
    listed = [f"folder {name}" for name in folders]
    listed += [f"file {mode(path):o} {path.stat().st_size} {names[path].as_posix()}" for path in files]
    listed += [f"program {program}", *(f"argument {word}" for word in arguments)]
    size = sum(path.stat().st_size for path in files)
    listed += [f"glibc {glibc}"]
    listed += [f"digest {digest(listed, files)}", f"bytes {size}", f"cut {cut}", f"time {TIME}"]
    draft = target.with_name(target.name + ".part")
    with draft.open("wb") as out, ThreadPoolExecutor(jobs) as pool:
        out.write(launcher.read_bytes())
        for part in compressed(pool, pieces(files, cut), level, ahead=jobs):
            listed.append(f"part {out.tell()} {len(part)}")
            out.write(part)
        text = "".join(f"{line}\n" for line in listed).encode()
        frame = compress(text, level)
        end = struct.pack("<8sQQQ", MAGIC, out.tell(), len(frame), len(text))
        out.write(frame + end)
    draft.chmod(0o755)
    os.replace(draft, target)


def mode(path: Path) -> int:
    return 0o700 if os.access(path, os.X_OK) else 0o600


def digest(listed: Sequence[str], files: Sequence[Path]) -> str:
    """Of names, rights and contents, however they are compressed."""
    found = hashlib.sha256("\n".join(listed).encode())
    for path in files:
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:DIGITS]


def pieces(files: Sequence[Path], cut: int) -> Iterator[bytes]:
    """All contents one after another, `cut` bytes at a time."""
    piece = bytearray()
    for path in files:
        with path.open("rb") as file:
            while read := file.read(cut - len(piece)):
                piece += read
                if len(piece) == cut:
                    yield bytes(piece)
                    piece.clear()
    if piece:
        yield bytes(piece)


def compressed(pool: ThreadPoolExecutor, all: Iterator[bytes], level: int, ahead: int) -> Iterator[bytes]:
    """Each as a frame of its own, in their order."""
    waiting = deque[Future[bytes]]()
    for piece in all:
        waiting.append(pool.submit(compress, piece, level))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def compress(content: bytes, level: int) -> bytes:
    """A frame of zstd with the number of bytes and a check sum."""
    command = ["zstd", "--quiet", f"-{level}", "--check", f"--stream-size={len(content)}", "--stdout"]
    return subprocess.run(command, input=content, stdout=subprocess.PIPE, check=True).stdout
