"""`python tools/binary/check.py dist/localllm`: does the one file do what the installed program does, where there
is nothing else? Prints what it measured; ends with 1 where something is not as it should be.

The place is a file system with the loader, glibc, /proc and /dev alone, and an environment with HOME, the locale C
and variables of another Python, which must not show. Where none can be made, only the environment is empty.
"""

import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

GLIBC = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2")
LOADER = Path("/lib64/ld-linux-x86-64.so.2")
MOUNT = 'mount --rbind /proc "$0/proc" && mount --rbind /dev "$0/dev" && exec "$ENV" -i LC_ALL=C "$@"'
FOREIGN = ("PYTHONPATH=/nowhere", "PYTHONHOME=/nowhere", "PYTHONOPTIMIZE=2")  # which must not show
STORY = ("run", "demo", "Tell me a story", "--temperature", "0", "--max-tokens", "60")
HELP_LIMIT_S = 0.5
HELP_RUNS = 9
PORT = 18432


class Place:
    """Where the file runs; `top` is its root."""

    def __init__(self, folder: Path, file: Path):
        self.top = folder / "root"
        libraries = self.top / "lib" / "x86_64-linux-gnu"
        for made in (libraries, self.top / "lib64", *(self.top / name for name in ("proc", "dev", "tmp"))):
            made.mkdir(parents=True)
        shutil.copy(LOADER, self.top / "lib64")
        for name in GLIBC:
            shutil.copy(Path("/lib/x86_64-linux-gnu") / name, libraries)
        shutil.copy(file, self.top / "localllm")
        self.bare = ["unshare", "--mount", "--map-root-user", "sh", "-c", MOUNT, str(self.top)]
        self.bare += ["HOME=/tmp", *FOREIGN, str(shutil.which("chroot")), str(self.top), "/localllm"]
        self.empty = ["env", "-i", f"HOME={self.top / 'tmp'}", *FOREIGN, str(self.top / "localllm")]
        probe = subprocess.run([*self.bare, "--version"], env=self.environment, capture_output=True)
        self.is_bare = probe.returncode == 0
        shutil.rmtree(self.cache, ignore_errors=True)

    @property
    def cache(self) -> Path:
        return self.top / "tmp" / ".cache"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"ENV": str(shutil.which("env"))}

    def command(self, *words: str) -> list[str]:
        return [*(self.bare if self.is_bare else self.empty), *words]

    def run(self, *words: str, **options: object) -> subprocess.CompletedProcess[bytes]:
        options = {"capture_output": True, "timeout": 300, "env": self.environment, **options}
        return subprocess.run(self.command(*words), **options)  # type: ignore[call-overload]


def timed(place: Place, *words: str) -> float:
    start = time.perf_counter()
    done = place.run(*words)
    expect(f"{' '.join(words)} ends with 0", done.returncode == 0, done.stderr)
    return time.perf_counter() - start


failed: list[str] = []


def expect(what: str, holds: bool, because: object = "") -> None:
    print(f"{'ok' if holds else 'WRONG':6} {what}{'' if holds else f': {because}'}", flush=True)
    if not holds:
        failed.append(what)


def check_starts(place: Place) -> None:
    print(f"       {timed(place, '--version'):.2f} s: first start, which unpacks")
    times = [timed_quietly(place) for _ in range(HELP_RUNS)]
    median = statistics.median(times)
    expect(f"--help within {HELP_LIMIT_S} s: median {median:.3f}, most {max(times):.3f}", median < HELP_LIMIT_S)
    [unpacked] = [path for path in place.cache.glob("localllm/binary/*") if path.is_dir()]
    table = next(unpacked.glob("lib/python*/site-packages/localllm/cli/commands.json"))
    content = table.read_bytes()
    table.write_bytes(b"{}")
    missing = table.with_name("fast_start.py")
    missing.unlink()
    print(f"       {timed(place, '--version'):.2f} s: a start that finds files changed and missing")
    expect("what was changed or missing is mended", table.read_bytes() == content and missing.exists())


def timed_quietly(place: Place) -> float:
    start = time.perf_counter()
    place.run("--help")
    return time.perf_counter() - start


def check_answers(place: Place, told: bytes) -> None:
    shutil.rmtree(place.cache)
    for what in ("a first start with an answer", "the same again"):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = place.run(*STORY)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"       {time.perf_counter() - start:.2f} s, {cpu:.2f} s of CPU time: {what}")
        expect("the story is that of the installed program", done.stdout == told, (done.stdout, done.stderr))
    compiled = [path.name for path in place.cache.glob("localllm/kernels/*.o")]
    expect("all kernels of the story are in the file", not compiled, compiled)
    piped = place.run("run", "demo", input="Größe: žluť 你好".encode())
    expect("UTF-8 comes and goes in the locale C", piped.returncode == 0 and piped.stdout.decode() != "", piped)
    expect("--json is JSON", json.loads(place.run(*STORY, "--json").stdout)["text"].strip() != "")
    expect("an unknown flag ends with 2", place.run("run", "demo", "--no-such").returncode == 2)
    expect("an unknown model ends with 8", place.run("run", "./nowhere", "hi").returncode == 8)
    schema = place.run("run", "demo", "A name?", "--choice", "Anna", "--choice", "Ben")
    expect("answers are held to a choice", schema.stdout.strip() in (b"Anna", b"Ben"), schema)
    expect("doctor finds nothing broken", place.run("doctor").returncode == 0)
    expect("list has the model", b"demo" in place.run("list").stdout)


def check_signals(place: Place) -> None:
    with subprocess.Popen(place.command(*STORY), stdout=subprocess.PIPE, env=place.environment) as process:
        assert process.stdout
        begun = process.stdout.read(5)
        process.stdout.close()
        expect("`| head -c 5` gets five bytes and no complaint", len(begun) == 5 and process.wait(60) == 0)
    command = place.command("run", "demo", "Hi", "--ignore-eos", "--max-tokens", "8000")
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=place.environment,
        start_new_session=True,  # away from a terminal
    ) as process:
        assert process.stdout
        process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        expect("SIGINT ends with 130", code == 130, code)


def check_server(place: Place) -> None:
    command = place.command("serve", "demo", "--port", str(PORT))
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=place.environment)
    try:
        question = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        answer = json.loads(ask("/v1/chat/completions", json.dumps(question).encode()))
        expect("a server answers", answer["choices"][0]["message"]["content"] != "")
        expect("its page is there", b"<html" in ask("/ui"))
    except OSError as error:
        expect("a server answers", False, error)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


def ask(path: str, body: bytes | None = None, patience_s: float = 60) -> bytes:
    """Of the server, as soon as it listens."""
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=patience_s) as answer:
                return answer.read()
        except ConnectionError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError) or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def main(words: Sequence[str]) -> int:
    file = Path(words[0]).resolve()
    installed = subprocess.run([sys.executable, "-m", "localllm", *STORY], capture_output=True, check=True)
    with tempfile.TemporaryDirectory(prefix="localllm-check-") as folder:
        place = Place(Path(folder), file)
        print(
            f"       {file.stat().st_size / 1e6:.1f} MB, {'in a bare root' if place.is_bare else 'env -i alone'}"
        )
        check_starts(place)
        check_answers(place, installed.stdout)
        check_signals(place)
        check_server(place)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
