import re
import time

import pytest

from localllm.cli.progress import LINE_INTERVAL_S, DownloadLines, quantize_progress
from localllm.hub.listing import RemoteFile


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


@pytest.mark.parametrize(("goes_on", "end"), [(True, "resume"), (False, "start over")])
def test_an_interrupted_download_says_how_to_resume(goes_on, end, capsys):
    with pytest.raises(KeyboardInterrupt), quantize_progress(resumable=goes_on):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == f"interrupted; run the same command again to {end}\n"
