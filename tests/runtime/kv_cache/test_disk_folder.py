"""The folder of the disk tier: nothing incomplete is ever read, processes share it, and its limit holds."""

import errno
import fcntl
import hashlib
import logging
import multiprocessing
import os
import random
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path

import pytest

from localllm.errors import UsageError
from localllm.runtime.kv_cache import disk_folder
from localllm.runtime.kv_cache.disk_folder import FILE_NAME, CacheFolder
from localllm.runtime.kv_cache.snapshot import CacheIdentity, KVSnapshot, Part, SnapshotTokens, token_bytes

LIMIT = 2**30
IDENTITY = CacheIdentity("model", "model", "float32", "float32", 24, 16, 1, ())


def snapshot(number: int, nbytes: int = 50_000) -> tuple[str, KVSnapshot]:
    """Return a snapshot, and the name of its file."""
    token_ids = token_bytes([number] * 16)
    content = random.Random(number).randbytes(nbytes)
    name = f"{hashlib.md5(token_ids).hexdigest()}-{'0' * 32}.safetensors"
    return name, KVSnapshot(
        SnapshotTokens(IDENTITY, 0, token_ids, frozenset()), {"0.0": Part("I8", (len(content),), content)}
    )


def write(folder: CacheFolder, number: int, nbytes: int = 50_000) -> bool:
    name, content = snapshot(number, nbytes)
    return folder.write(name, content.chunks(), content.nbytes)


def check(path: Path) -> int:
    """Assert that every file that may be read is complete, and return their number."""
    files = [file for file in path.iterdir() if FILE_NAME.fullmatch(file.name)]
    for file in files:
        found = KVSnapshot.parse(bytearray(file.read_bytes()))
        number = int.from_bytes(found.tokens.token_ids[:4], "little")
        assert bytes(found.parts["0.0"].data) == random.Random(number).randbytes(found.parts["0.0"].nbytes)
    return len(files)


def write_without_end(path: Path, first: int, step: int, count: int, limit: int) -> None:
    folder = CacheFolder(path, limit)
    for number in range(first, first + step * count, step):
        write(folder, number, 200_000)


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_writer_killed_at_any_moment_leaves_nothing_that_is_read(tmp_path: Path, count: int) -> None:
    rng, context = random.Random(count), multiprocessing.get_context("fork")
    complete = 0
    for index in range(count):
        arguments = (tmp_path, 1000 * index, 1, 1000, LIMIT)
        process = context.Process(target=write_without_end, args=arguments)
        process.start()
        time.sleep(rng.uniform(0.001, 0.03))
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        now = check(tmp_path)
        assert now >= complete  # nothing that was complete is lost
        complete = now
    folder = CacheFolder(tmp_path, LIMIT)
    assert write(folder, 10**6)
    assert sorted(file.name for file in tmp_path.iterdir() if file.name.startswith(".")) == [".lock"]
    assert check(tmp_path) == complete + 1


def test_two_processes_share_a_folder_and_its_limit(tmp_path: Path) -> None:
    context, limit = multiprocessing.get_context("fork"), 4_000_000
    processes = [
        context.Process(target=write_without_end, args=(tmp_path, first, 2, 60, limit)) for first in (0, 1, 1)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        size = 0
        for file in tmp_path.iterdir():
            with suppress(FileNotFoundError):
                size += file.stat().st_size
        assert size <= 1.01 * limit
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert check(tmp_path) == limit // 201_000


def test_the_limit_holds_within_a_percent(tmp_path: Path) -> None:
    folder, limit, rng = CacheFolder(tmp_path, 1_000_000), 1_000_000, random.Random(0)
    for number in range(320):
        assert write(folder, number, rng.randrange(1, 9000))
        size = sum(file.stat().st_size for file in tmp_path.iterdir())
        assert size <= limit and size == folder.used_bytes
        assert number < 300 or size > 0.99 * limit


def test_the_least_recently_used_make_way(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 500_000)
    names = [snapshot(number)[0] for number in range(9)]
    for number in range(9):
        assert write(folder, number)
    CacheFolder(tmp_path, 500_000).touch(names[:2])  # in another process
    for number in range(9, 15):
        assert write(folder, number)
    remaining = {file.name for file in tmp_path.glob("*.safetensors")}
    assert remaining & set(names) == {names[0], names[1], names[8]}
    assert not write(folder, 99, 600_000)  # larger than all


def test_files_belong_to_this_user_alone(tmp_path: Path) -> None:
    os.umask(os.umask(0o022))
    folder = CacheFolder(tmp_path / "new", LIMIT)
    assert write(folder, 1)
    modes = {file.name[:1]: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "new").iterdir()}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_full_disk_gets_one_line_and_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CacheFolder(tmp_path, LIMIT)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(disk_folder.os, "fsync", full)
        assert not any(write(folder, number) for number in range(5))
        monkeypatch.setattr(folder, "retry_at", 0.0)
        assert not write(folder, 6)
    assert [record.getMessage() for record in caplog.records] == [
        f"the prefix cache {tmp_path} cannot be written: No space left on device"
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock"]
    assert not write(folder, 7)
    folder.retry_at = 0.0
    assert write(folder, 7) and check(tmp_path) == 1


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        CacheFolder(file / "folder", LIMIT)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("x" * 10_000)
    folder = CacheFolder(tmp_path, 100_000)
    for number in range(5):
        assert write(folder, number)
    folder.clear()
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "letter.txt"]


@pytest.mark.parametrize("direct", ["as it is", "not opened", "not written"])
def test_a_file_of_any_length_has_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    open_file, write, flags_of = os.open, os.write, fcntl.fcntl

    def refuse_to_open(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT & ~os.O_DIRECTORY and flags & os.O_WRONLY:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_file(path, flags, mode)

    def refuse_to_write(descriptor: int, content: memoryview) -> int:
        if flags_of(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, content)

    if direct == "not opened":
        monkeypatch.setattr(disk_folder.os, "open", refuse_to_open)
    if direct == "not written":
        monkeypatch.setattr(disk_folder.os, "write", refuse_to_write)
    for length in (0, 1, 4095, 4096, 4097, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 5):
        content = random.Random(length).randbytes(length)
        file = tmp_path / str(length)
        disk_folder.write_durably(file, tmp_path / "draft", [content[: length // 3], b"", content[length // 3 :]])
        assert file.read_bytes() == content and file.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "draft").exists()
