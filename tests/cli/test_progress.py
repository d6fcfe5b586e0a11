import re
import time
from contextlib import redirect_stderr
from functools import partial

import pytest

from localllm.cli.progress import (
    LINE_INTERVAL_S,
    DownloadLines,
    StderrObserver,
    byte_progress,
    download_progress,
    quantize_progress,
    status_line,
)
from localllm.hub.listing import Listing, RemoteFile
from localllm.hub.names import RepoName
from localllm.hub.pull import PullPlan


def test_refetched_bytes_do_not_lower_the_rate(capsys):
    file = RemoteFile("model.safetensors", 10_000_000, "0" * 64)
    lines = DownloadLines()
    lines.total_bytes, lines.start = file.size, time.monotonic() - 100
    for count in (5_000_000, -5_000_000, 1_000_000):
        lines.last -= 2 * LINE_INTERVAL_S
        lines.advance(file, count)
    told = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in told] == [
        f"{done} of 10.0 MB" for done in ("5.00 MB", "0 B", "1.00 MB")
    ]
    assert re.search(r", (60\.0|59\.\d) kB/s, 15\d s left$", told[-1])


@pytest.mark.parametrize(
    ("show", "end"),
    [
        (download_progress, "resume"),
        (quantize_progress, "resume"),
        (partial(quantize_progress, resumable=False), "start over"),
    ],
)
def test_what_is_interrupted_says_how_to_resume(show, end, capsys):
    with pytest.raises(KeyboardInterrupt), show():
        raise KeyboardInterrupt
    assert capsys.readouterr().err == f"interrupted; run the same command again to {end}\n"


def pull_plan(count, here):
    """A plan of so many files of 1 MB, of each of which these bytes are cached."""
    files = tuple(RemoteFile(f"[red]part{place}\x07.bin", 1_000_000, f"{place:064}") for place in range(count))
    return PullPlan(Listing(RepoName("org/tiny"), "0" * 40, files), files, {file.digest: here for file in files})


FIRST, SECOND = ("part0", "1.0/1.0 MB"), ("part1", "0.8/1.0 MB")


@pytest.mark.parametrize(
    ("count", "bars"),
    [
        (1, [FIRST]),
        (3, [("total", "2.0/3.0 MB"), FIRST, SECOND]),
        (9, [("total", "3.5/9.0 MB"), SECOND]),  # the bars of finished files are hidden
    ],
)
def test_a_terminal_has_a_bar_for_each_file_that_is_being_downloaded(screen, count, bars):
    plan = pull_plan(count, here=250_000)
    with redirect_stderr(screen), download_progress() as pull:
        pull.begin(plan)
        for file in plan.files[:2]:
            pull.advance(file, 500_000)
        pull.finish(plan.files[0])  # whose last bytes another process has downloaded
        pull.say("mirror: [bold] is \x1b[31mslow")
    *before, last = screen.frames()
    assert f"pulling org/tiny: {count} file{'s' if count > 1 else ''}, {count}.00 MB, " in "".join(before)
    assert any(frame.startswith("mirror: [bold] is ␛[31mslow\n") for frame in before)
    shown = re.findall(r"^(?:\[red\])?(\w+)(?:␇.bin)? +[━╸╺]+ (\d\.\d/\d\.\d MB) ", last, re.MULTILINE)
    assert shown == bars and last.count("\n") == len(bars)


def test_bars_of_a_terminal_are_erased_at_their_end(screen):
    with redirect_stderr(screen), byte_progress("model.safetensors", 4_000_000) as advance:
        advance(1_000_000)
        advance(2_000_000)
    with redirect_stderr(screen), StderrObserver("tiny") as observer:
        observer.phase("quantize")
        observer.part(1, 8)
        observer.part(2, 8)
    with redirect_stderr(screen), status_line() as say:
        say("round 1 of 3")
        say("round 2 of 3\x07")
    shown = [" ".join(re.sub("[━╸╺]+", "", frame).split()) for frame in screen.frames()]
    bars = [text.rpartition(" ")[0] for text in shown if text.startswith("quantizing")]
    assert (bars[0], bars[-1]) == ("quantizing 0/8", "quantizing 2/8")
    assert any(text.startswith("model.safetensors 3.0/4.0 MB ") for text in shown)
    assert shown.index("round 1 of 3") < shown.index("round 2 of 3␇") and shown[-1] == ""
