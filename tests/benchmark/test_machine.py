"""The machine section of a result."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from localllm.benchmark.machine import Noise, NoiseMeter, git_commit


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_the_commit_is_marked_where_files_differ(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "file").write_text("a")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "a")
    clean = git_commit(tmp_path)
    assert clean and len(clean) >= 7
    (tmp_path / "file").write_text("b")
    assert git_commit(tmp_path) == f"{clean}-dirty"


def test_a_foreign_checkout_gives_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "below").mkdir()
    assert git_commit(tmp_path / "below") is None
    assert git_commit(Path("/")) is None


@pytest.mark.parametrize(
    ("others", "stolen", "said"),
    [
        (0.04, 0.0, None),
        (0.2, 0.0, "other programs used 20% of the processors during"),
        (0.0, 0.03, "the host gave 3% of them to other machines during"),
        (0.2, 0.03, "other programs used 20% of the processors and the host gave 3% of them to other machines"),
    ],
)
def test_noise_is_never_hidden(others: float, stolen: float, said: str | None) -> None:
    warning = Noise(1.0, 0.5, others, stolen).warning
    assert warning is None if said is None else warning and warning.startswith(said)


def test_load_of_other_programs_is_measured() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        listener = NoiseMeter()
        time.sleep(0.5)
        noise = listener.stop()
        loop.kill()
    assert noise.others > 0
    assert noise.seconds >= 0.5


def test_peak_memory_is_that_of_the_process_and_can_be_reset() -> None:
    """In a process of its own, as other tests' threads may hold memory in this one."""
    held = b"a" * 1_000_000_000
    script = """if True:
        import mmap
        from localllm.hardware.device import peak_bytes, reset_peak_bytes, resolve_device
        device = resolve_device("cpu")
        print(peak_bytes(device))
        with mmap.mmap(-1, 200_000_000) as held:  # goes back to the system when closed, whatever the allocator
            held.write(b"a" * len(held))
        before = peak_bytes(device)
        assert reset_peak_bytes(device)
        assert peak_bytes(device) < before - 100_000_000, (before, peak_bytes(device))
    """
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout) < len(held), "of the program that started it"
