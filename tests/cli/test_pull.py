"""`localllm pull` and `run` as processes against a real server: failures, kills and concurrent runs."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localllm.checkpoint.remote import SAFETENSORS_FIRST_BYTES
from localllm.hub.catalog import PACKAGE_FOLDER
from localllm.hub.partial_file import PART_BYTES
from tests.hub import faults
from tests.hub.loopback import LoopbackHub
from tests.hub.models import model_files, weights

DEMO = PACKAGE_FOLDER / "boxed" / "demo"
HEADER = SAFETENSORS_FIRST_BYTES  # what is read to see whether the model fits
BIG = 3 * PART_BYTES + 12_345
RATE = 20_000_000  # bytes a second of each connection: time to break off
NAMESPACES = shutil.which("unshare") and subprocess.run(["unshare", "-rm", "true"], check=False).returncode == 0


@pytest.fixture
def hub():
    with LoopbackHub() as hub:
        yield hub


@pytest.fixture
def big(hub):
    hub.add("org/big", model_files(**{"model.safetensors": weights(BIG)}))
    return hub


@pytest.fixture
def environment(hub, tmp_path):
    """Environment of a process with an empty cache and this hub, without the developer's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LOCALLLM_"))}
    places = {"HF_HOME": str(tmp_path / "hf"), "LOCALLLM_HOME": str(tmp_path / "home")}
    return kept | places | {"HF_ENDPOINT": hub.url, "HF_HUB_DOWNLOAD_TIMEOUT": "2", "COLUMNS": "100"}


@pytest.fixture
def localllm(environment):
    def run(*arguments, before=(), **more):
        command = [*before, sys.executable, "-m", "localllm", *arguments]
        return subprocess.run(
            command, env=environment | more, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture
def start(environment):
    def run(*arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "localllm", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return run


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def weights_in(folder):
    return (Path(folder.strip()) / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_run_on_an_empty_cache_pulls_and_answers(hub, localllm):
    hub.add("org/tiny", DEMO)
    first = localllm("run", "org/tiny", "Hello", "--max-tokens", "8", "--temperature", "0")
    assert (first.returncode, len(first.stdout.split()) > 1) == (0, True), first.stderr
    assert "pulling org/tiny: 6 files, " in first.stderr
    asked = len(hub.requests)
    second = localllm("run", "org/tiny", "Hello", "--max-tokens", "8", "--temperature", "0")
    assert (second.stdout, second.stderr) == (first.stdout, "")
    assert len(hub.requests) == asked


@pytest.mark.slow
def test_pull_prints_the_path_and_nothing_else_on_stdout(hub, localllm):
    hub.add("org/tiny", model_files())
    first, second = localllm("pull", "org/tiny"), localllm("pull", "org/tiny")
    assert first.returncode == second.returncode == 0
    assert weights_in(first.stdout) == weights()
    assert "model.safetensors: 40.1 kB, verified\n" in first.stderr
    assert (second.stdout, second.stderr) == (first.stdout, "org/tiny is up to date (40.4 kB)\n")


@pytest.mark.slow
def test_events_as_json_lines(hub, localllm):
    hub.add("org/tiny", model_files())
    hub.disturb(faults.reset(0), "model.safetensors")
    done = localllm("pull", "org/tiny", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert {event["event"] for event in events} == {"begin", "progress", "note", "verified", "done"}
    begin = next(event for event in events if event["event"] == "begin")
    assert (begin["repo"], len(begin["files"])) == ("org/tiny", 6)
    assert sum(file["bytes"] - file["here"] for file in begin["files"]) == begin["missing"]
    assert weights_in(events[-1]["path"]) == weights()


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 3, 6])
def test_a_closed_pipe_is_no_error(big, environment, lines):
    command = f"{sys.executable} -m localllm pull org/big --json | head -n {lines}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.quick_every(11)
@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("org/nope", 8, "error: {host} has no repository org/nope, or it is private; check the name; if it is"),
        ("org/tiny@v9", 8, "error: org/tiny has no revision v9; leave it out"),
        (
            "org/pickles",
            8,
            "error: org/pickles has only pickled weights (pytorch_model.bin), which can execute code",
        ),
        ("org/gated", 8, "error: org/gated is gated: its authors require you to accept their terms; log in with"),
        ("demo", 2, "error: demo comes with localllm and needs no download; run it: `localllm run demo`"),
        ("./tiny", 2, "error: ./tiny is not a model of the Hub; give ORG/REPO, or a name of `localllm list"),
        ("../evil", 2, "error: ../evil is not a model of the Hub"),
        ("org/..", 8, "error: 'org/..' is not a model name"),
        ("org/tiny@../../x", 2, "error: org/tiny@../../x is not a model of the Hub"),
        ("o" * 500 + "/tiny", 8, f"error: '{'o' * 500}/tiny' is not a model name"),
        ("örg/tiny", 8, "error: 'örg/tiny' is not a model name"),
    ],
)
def test_failures_are_one_line_with_their_exit_code(hub, localllm, name, code, message):
    files = model_files()
    hub.add("org/tiny", files)
    hub.add("org/gated", files, gated="auto")
    del files["model.safetensors"]
    hub.add("org/pickles", files)
    done = localllm("pull", name)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.splitlines()[-1].startswith(message.format(host=hub.url.removeprefix("http://")))


@pytest.mark.slow
def test_offline_only_downloaded_models_run(hub, localllm):
    hub.add("org/tiny", DEMO)
    absent = localllm("run", "org/tiny", "Hello", HF_HUB_OFFLINE="1")
    assert absent.returncode == 8
    assert (
        absent.stderr
        == "error: org/tiny is not on this machine, and HF_HUB_OFFLINE is set; unset it to download\n"
    )
    path = localllm("pull", "org/tiny").stdout
    asked = len(hub.requests)
    again = localllm("pull", "org/tiny", HF_HUB_OFFLINE="1")
    assert (again.returncode, again.stdout) == (0, path)
    assert again.stderr == "org/tiny is here; HF_HUB_OFFLINE is set, so it is not checked for updates\n"
    assert localllm("run", "org/tiny", "Hello", "--max-tokens", "1", HF_HUB_OFFLINE="1").returncode == 0
    assert len(hub.requests) == asked


def test_a_setting_that_is_not_a_number(localllm):
    done = localllm("list", HF_HUB_DOWNLOAD_TIMEOUT="soon")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: a setting is not a number: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_an_unreachable_hub(localllm):
    done = localllm("pull", "org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1].startswith("error: 127.0.0.1:9 does not provide org/tiny: ")


@pytest.mark.slow
@pytest.mark.skipif(not NAMESPACES, reason="this system gives no namespaces")
def test_no_network_at_all(localllm):
    done = localllm("pull", "org/tiny", before=["unshare", "-rn"], HF_ENDPOINT="https://hub.invalid")
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1].startswith("error: hub.invalid cannot be resolved: ")


def test_ctrl_c_keeps_the_downloaded_bytes(hub, start, localllm):
    size = PART_BYTES + 12_345  # two parts
    hub.add("org/big", model_files(**{"model.safetensors": weights(size)}))
    hub.rate = RATE
    process = start("pull", "org/big")
    wait_until(lambda: hub.sent("model.safetensors") > 2_000_000)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert err.endswith("interrupted; run the same command again to resume\n")
    hub.rate = None
    done = localllm("pull", "org/big")
    assert "already downloaded" in done.stderr
    assert weights_in(done.stdout) == weights(size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "target"),
    [
        (faults.stalled(20_000_000), "/cdn/.*model"),
        (faults.silent, "/cdn/.*model"),
        (faults.busy(100), "/cdn/.*model"),
        (faults.silent, "/tree/"),
    ],
)
def test_ctrl_c_does_not_wait_for_a_hub_that_is_silent(big, start, environment, change, target):
    environment["HF_HUB_DOWNLOAD_TIMEOUT"] = "1000"
    fault = big.disturb(change, target, times=None)
    process = start("pull", "org/big")
    wait_until(lambda: fault.met)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert err.endswith("interrupted; run the same command again to resume\n")


@pytest.mark.slow
def test_a_pull_killed_repeatedly_resumes(big, start, localllm):
    """Downloads at most the interrupted parts again."""
    times, choose = 6, random.Random(8)
    big.rate = RATE
    for _ in range(times):
        process, before = start("pull", "org/big"), big.sent("model.safetensors")
        more = choose.randrange(1, BIG // times)
        wait_until(lambda: big.sent("model.safetensors") >= before + more or process.poll() is not None)  # noqa: B023
        process.kill()
        process.communicate()
    big.rate = None
    done = localllm("pull", "org/big")
    assert weights_in(done.stdout) == weights(BIG)
    assert big.sent("model.safetensors") - len(weights(BIG)) < times * PART_BYTES


@pytest.mark.slow
def test_two_processes_share_the_work(big, start):
    big.rate = RATE // 20  # not finished before the other process has started, however busy the machine
    first = start("pull", "org/big")
    wait_until(lambda: big.sent("model.safetensors") > HEADER)
    second = start("pull", "org/big")
    waiting = "another process is fetching it, waiting for that one"
    assert any(waiting in line for line in second.stderr)
    big.rate = None
    outputs = [process.communicate(timeout=200)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert outputs[0] == outputs[1]
    assert weights_in(outputs[0]) == weights(BIG)
    assert big.sent("model.safetensors") == len(weights(BIG)) + 2 * HEADER


@pytest.mark.skipif(not NAMESPACES, reason="this system gives no namespaces")
class TestDisks:
    @pytest.fixture
    def on_tmpfs(self, environment, tmp_path):
        """Pull into a small file system, and run a shell command meanwhile."""

        def run(size, options="", meanwhile="true"):
            cache = tmp_path / "disk"
            cache.mkdir()
            script = (
                f"mount -t tmpfs -o size={size} none {cache} && mkdir {cache}/hub && {options or 'true'} && "
                f"({sys.executable} -m localllm pull org/big & pid=$!; {meanwhile}; wait $pid)"
            )
            return subprocess.run(
                ["unshare", "-rm", "sh", "-c", script],
                env=environment | {"HF_HUB_CACHE": f"{cache}/hub", "DISK": str(cache)},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )

        return run

    @pytest.mark.slow
    def test_too_small_from_the_beginning(self, big, on_tmpfs):
        done = on_tmpfs("30m")
        assert done.returncode == 3
        assert "error: org/big needs 50.3 MB more on the disk with " in done.stderr
        assert " MB are free; delete files, or set HF_HUB_CACHE to a folder on another disk" in done.stderr
        assert big.sent("model.safetensors") == HEADER

    @pytest.mark.slow
    def test_full_in_the_middle(self, big, on_tmpfs):
        big.rate = RATE // 10
        some_came = "[ $(du -sk $DISK/hub | cut -f1) -gt 4000 ]"  # of weights: the disk was found large enough
        full = "dd if=/dev/zero of=$DISK/other bs=1M 2>/dev/null"
        waiting = f"while kill -0 $pid && ! {some_came}; do sleep 0.1; done"
        done = on_tmpfs("130m", meanwhile=f"{waiting}; {full}")
        assert done.returncode == 3, done.stderr
        assert "is full; free some space, then run the same command again: it resumes\n" in done.stderr
        assert 0 < big.sent("model.safetensors") < BIG

    @pytest.mark.slow
    def test_read_only(self, big, on_tmpfs):
        done = on_tmpfs("130m", options="mount -o remount,ro $DISK")
        assert done.returncode == 3
        assert "cannot be written (Read-only file system); set HF_HUB_CACHE to a folder that can\n" in done.stderr


@pytest.mark.skipif(not NAMESPACES, reason="this system gives no namespaces")
@pytest.mark.parametrize(
    ("command", "folder", "variable"),
    [
        pytest.param("verify org/tiny", "hf/hub/models--org--tiny", "HF_HUB_CACHE", marks=pytest.mark.slow),
        ("cp demo mine", "home", "LOCALLLM_HOME"),
        pytest.param("create mine -f {folder}/Modelfile", "home/made", "LOCALLLM_HOME", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_became_read_only_is_a_sentence_and_exit_code_3(
    hub, localllm, tmp_path, command, folder, variable
):
    if command.startswith("verify"):
        hub.add("org/tiny", model_files())
        path = Path(localllm("pull", "org/tiny").stdout.strip()) / "model.safetensors"
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.resolve().write_bytes(damaged)
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "Modelfile").write_text("FROM demo\n")
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path} && exec "
    words = command.format(folder=tmp_path).split()
    done = localllm(*words, before=("unshare", "-rm", "sh", "-c", mount + '"$@"', "sh"))
    assert done.returncode == 3, done.stderr
    assert done.stderr.endswith(
        f"{tmp_path / folder} cannot be written (Read-only file system); set {variable} to a folder that can\n"
    )
