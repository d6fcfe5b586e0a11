import pytest
import torch

from localllm.errors import DiskFull
from localllm.quality.measure import LogitsFile, logits_bytes, measure_distance, open_logits_file
from tests.quality.test_measure import VOCAB, WINDOWS, Table


def test_from_the_file_come_the_very_logits(tmp_path):
    reference = Table(1, piece=6)
    with open_logits_file(tmp_path, logits_bytes(WINDOWS, VOCAB)) as kept:
        kept.record(reference, WINDOWS)
        for ids in reversed(WINDOWS.ids):
            assert all(map(torch.equal, kept(ids), reference(ids)))
        other = Table(2, piece=6)
        assert measure_distance(kept, other, WINDOWS) == measure_distance(reference, other, WINDOWS)
        assert kept.file.seek(0, 2) == logits_bytes(WINDOWS, VOCAB) == WINDOWS.tokens * VOCAB * 4


def test_the_file_is_removed_at_the_end(tmp_path):
    with pytest.raises(ZeroDivisionError), open_logits_file(tmp_path / "new", 1) as kept:
        kept.record(Table(1), WINDOWS)
        raise ZeroDivisionError
    assert list((tmp_path / "new").iterdir()) == []


def test_too_little_disk_space_is_reported_before_computing(tmp_path):
    with (
        pytest.raises(DiskFull, match=r"take 1000000 TB in .*, which has .* free; give fewer --tokens"),
        open_logits_file(tmp_path, int(1e18)),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_becomes_full_is_one_error_message(tmp_path):
    with open("/dev/full", "wb", buffering=0) as file, pytest.raises(DiskFull, match=f"the disk with {tmp_path}"):
        LogitsFile(file, tmp_path).record(Table(1), WINDOWS)
