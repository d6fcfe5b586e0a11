"""The launcher of the single-file binary with a small program, and the real binary if it was built."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path, PurePosixPath

import pytest

from tools.binary.build import build_launcher
from tools.binary.collect import CannotBuild
from tools.binary.pack import pack

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "dist" / "localllm"
PROGRAM = """#!/bin/sh
case "$1" in
exit) exit "$2" ;;
die) kill -TERM $$ ;;
env) env ;;
*) printf '%s\\n' "$@" ; cat "$(dirname "$0")/../lib/words" ;;
esac
"""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    if shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    made = tmp_path_factory.mktemp("launcher") / "launcher"
    try:
        build_launcher(made)
    except CannotBuild as error:
        pytest.skip(f"no C compiler or no static libzstd here: {error}")
    return made


@pytest.fixture
def tree(tmp_path):
    tree = tmp_path / "tree"
    (tree / "bin").mkdir(parents=True)
    (tree / "lib" / "deep" / "er").mkdir(parents=True)
    (tree / "bin" / "program").write_text(PROGRAM)
    (tree / "bin" / "program").chmod(0o755)
    (tree / "lib" / "words").write_text("words\n")
    (tree / "lib" / "empty").write_bytes(b"")
    (tree / "lib" / "deep" / "er" / "long").write_bytes(os.urandom(50_000))
    return tree


@pytest.fixture
def one_file(launcher, tree, tmp_path):
    made = tmp_path / "one file"
    pack(tree, launcher, made, PurePosixPath("bin/program"), ["-I", "a b"], level=1, cut=999)
    return made


@pytest.fixture
def cache(tmp_path):
    """Cache folder, in memory if possible, since the program syncs the disk, including the writes of other
    processes.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as made:
        yield Path(made)


@pytest.fixture
def start(one_file, cache):
    """Run the program with only a cache folder in its environment; return the finished process."""

    def run(*words, **environment):
        environment = {"XDG_CACHE_HOME": str(cache), **environment}
        command = [one_file, *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


def folder(cache):
    [found] = [path for path in (cache / "localllm" / "binary").iterdir() if path.is_dir()]
    return found


def contents(top):
    return {path.relative_to(top): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def test_it_unpacks_with_permissions_for_the_user_only(start, cache, tree):
    done = start("x", "")
    assert (done.returncode, done.stdout, done.stderr) == (0, "-I\na b\nx\n\nwords\n", "")
    assert contents(folder(cache)) == contents(tree)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder(cache), *folder(cache).rglob("*")))


def test_a_second_start_touches_nothing(start, cache):
    start()
    before = {path: path.stat().st_ctime_ns for path in folder(cache).rglob("*")}
    assert start().stdout == "-I\na b\nwords\n"
    assert before == {path: path.stat().st_ctime_ns for path in folder(cache).rglob("*")}


def test_the_program_replaces_the_launcher(launcher, tree, tmp_path, cache):
    made = tmp_path / "bare"
    pack(tree, launcher, made, PurePosixPath("bin/program"), level=1)

    def code(*words):
        return subprocess.run([made, *words], env={"XDG_CACHE_HOME": str(cache)}, timeout=60).returncode

    assert code("exit", "7") == 7
    assert code("die") == -signal.SIGTERM
    environment = {
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": "/x",
        "PYTHONHOME": "/x",
        "PYTHONIC": "1",
        "A": "b=c",
    }
    told = subprocess.run([made, "env"], env=environment, capture_output=True, text=True, timeout=60).stdout
    assert {line for line in told.splitlines() if line.startswith(("PYTHON", "A="))} == {
        "PYTHONNOUSERSITE=1",
        "A=b=c",
    }


def rewritten(top):
    (top / "lib" / "words").write_text("sword\n")


def deleted(top):
    (top / "lib" / "empty").unlink()


def added(top):
    (top / "lib" / "deep" / "sitecustomize.py").write_text("")


def opened_to_others(top):
    (top / "bin" / "program").chmod(0o777)


def linked(top):
    (top / "lib" / "words").rename(top.parent / "words")
    (top / "lib" / "words").symlink_to(top.parent / "words")


def emptied(top):
    shutil.rmtree(top)
    top.mkdir(0o700)


@pytest.mark.parametrize("damage", [rewritten, deleted, added, opened_to_others, linked, emptied])
def test_changed_files_are_unpacked_again(start, cache, tree, damage):
    start()
    top = folder(cache)
    damage(top)
    assert start().stdout == "-I\na b\nwords\n"
    assert contents(folder(cache)) == contents(tree)


def test_two_that_start_at_once_share_one_folder(one_file, cache, tree):
    environment = {"XDG_CACHE_HOME": str(cache)}
    running = [subprocess.Popen([one_file], env=environment, stdout=subprocess.PIPE) for _ in range(8)]
    assert {process.communicate(timeout=60)[0] for process in running} == {b"-I\na b\nwords\n"}
    assert contents(folder(cache)) == contents(tree)


@pytest.mark.slow
def test_a_killed_unpacking_is_done_again(launcher, tree, tmp_path, cache):
    for number in range(8):
        (tree / "lib" / f"more{number}").write_bytes(os.urandom(2_000_000))
    made = tmp_path / "larger"
    pack(tree, launcher, made, PurePosixPath("bin/program"), level=1, cut=10**6)
    environment = {"XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen([made], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(cache.glob("localllm/binary/*.part/lib/more*")) and process.poll() is None:
        assert time.monotonic() < deadline
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not list(cache.glob("localllm/binary/*/bin/program")) or list(cache.glob("localllm/binary/*.part"))
    assert subprocess.run([made], env=environment, capture_output=True, timeout=60).stdout == b"\nwords\n"
    assert contents(folder(cache)) == contents(tree)


def settled(cache):
    """The mark of this boot is gone, because the disk has all."""
    deadline = time.monotonic() + 60
    while list(cache.glob("localllm/binary/*.boot")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_crash_before_the_disk_has_all_is_noticed(start, cache):
    start()
    settled(cache)
    top = folder(cache)
    before, mark = top.stat().st_ino, top.with_name(top.name + ".boot")
    this_boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    mark.write_text(this_boot)
    assert start().stdout == "-I\na b\nwords\n" and folder(cache).stat().st_ino == before
    for other_boot in ("00000000" + this_boot[8:], ""):
        mark.write_text(other_boot)
        before = folder(cache).stat().st_ino
        assert start().stdout == "-I\na b\nwords\n" and folder(cache).stat().st_ino != before
        settled(cache)


def test_no_reader_waits_for_the_disk(one_file, cache):
    """Also of pipes other than stdout and stderr."""
    reader, writer = os.pipe()
    environment = {"XDG_CACHE_HOME": str(cache)}
    subprocess.run([one_file], env=environment, pass_fds=(writer,), capture_output=True, timeout=60, check=True)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == b""


def test_an_older_glibc_is_refused_before_anything_is_unpacked(launcher, tree, tmp_path, cache):
    for needed, code in (("2.17", 0), ("2.98", 1)):
        made = tmp_path / needed
        pack(tree, launcher, made, PurePosixPath("bin/program"), glibc=needed, level=1)
        done = subprocess.run(
            [made], env={"XDG_CACHE_HOME": str(cache)}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code
    version = platform.libc_ver()[1]
    assert done.stderr.startswith(
        f"error: this file needs glibc 2.98, and this system has {version}; use a newer "
    )
    assert done.stderr.count("\n") == 1
    assert len([path for path in cache.glob("localllm/binary/*") if path.is_dir()]) == 1


def places(one_file):
    """Offsets of bytes to damage: in a part of the payload, in its index, at its end and in its magic number."""
    whole = one_file.read_bytes()
    listed = int.from_bytes(whole[-24:-16], "little")
    unpacked = subprocess.run(["zstd", "-dc"], input=whole[listed:-32], stdout=subprocess.PIPE, check=True).stdout
    part = int(unpacked.split(b"\npart ")[20].split()[0])
    return {"part": part + 300, "list": listed + 10, "end": len(whole) - 12, "magic": len(whole) - 32}


@pytest.mark.parametrize("where", ["part", "list", "end", "magic"])
def test_a_damaged_file_is_reported_and_leaves_nothing(start, one_file, cache, where):
    whole = bytearray(one_file.read_bytes())
    whole[places(one_file)[where]] ^= 1
    one_file.write_bytes(whole)
    done = start()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: this file of localllm is damaged (") and done.stderr.count("\n") == 1
    assert not [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_file_that_ends_too_early_is_reported(start, one_file, launcher):
    for left in (one_file.stat().st_size - 1, launcher.stat().st_size + 5000):
        os.truncate(one_file, left)
        assert "this file of localllm is damaged (its end is missing); get it again" in start().stderr


def test_an_unwritable_folder_names_the_remedy(start):
    told = start(XDG_CACHE_HOME="", HOME="/proc")
    assert told.returncode == 1
    assert told.stderr.startswith("error: localllm cannot make /proc/.cache to unpack into: ")
    assert told.stderr.endswith("; set XDG_CACHE_HOME to a folder that can be written\n")


def test_a_full_disk_is_reported_and_left_unchanged(one_file, launcher, tree, tmp_path):
    """Runs a program of 2 MB on a file system of 1 MB."""
    (tree / "lib" / "large").write_bytes(bytes(2_000_000))
    pack(tree, launcher, one_file, PurePosixPath("bin/program"), level=1)
    disk = tmp_path / "disk"
    disk.mkdir()
    line = 'mount -t tmpfs -o size=1m disk "$1" && { XDG_CACHE_HOME="$1" "$2"; echo $?; find "$1" -type f; }'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", line, "sh", disk, one_file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    code, *left = done.stdout.split()
    assert code == "3" and [Path(path).suffix for path in left] == [".lock"]
    assert done.stderr.startswith("error: localllm takes 2 MB in ") and "XDG_CACHE_HOME" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not BUILT.exists(), reason="`make binary` has not built dist/localllm")
def test_the_built_file_in_a_bare_environment():
    done = subprocess.run([sys.executable, ROOT / "tools/binary/check.py", BUILT], timeout=280)
    assert done.returncode == 0
