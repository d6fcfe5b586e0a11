import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import DamagedModel, UnsupportedModel
from localllm.quality.report import REPORT_FILE, Quality, as_dict, read_report, write_report
from tests.quality.example import QUALITY


def test_a_written_report_is_read(tmp_path: Path) -> None:
    write_report(QUALITY, tmp_path)
    assert read_report(tmp_path) == QUALITY
    least = dataclasses.replace(QUALITY, answers=(), layers=(), matrices=(), recipe=None)
    write_report(least, tmp_path)
    assert read_report(tmp_path) == least


def test_a_missing_report_is_none(tmp_path: Path) -> None:
    assert read_report(tmp_path) is None
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert read_report(tmp_path / "model.gguf") is None


def test_nan_is_not_written(tmp_path: Path) -> None:
    distance = dataclasses.replace(QUALITY.distance, right_token_rms=math.nan)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report(dataclasses.replace(QUALITY, distance=distance), tmp_path)
    assert list(tmp_path.iterdir()) == []


def changed(path: str, value: Any) -> dict[str, Any]:
    """The report as JSON, with another value at a dotted path."""
    whole = json.loads(json.dumps(as_dict(QUALITY)))
    part: Any = whole
    *before, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    for key in before:
        part = part[key]
    part[last] = value
    return whole


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("colour", 1, "the report has an unknown field 'colour'"),
        ("distance.divergence.p50", 1, "the report.distance.divergence has an unknown field 'p50'"),
        ("reference.weight_bytes", "1", 'the report.reference.weight_bytes is "1"'),
        ("reference.weight_bytes", 1.5, "the report.reference.weight_bytes is 1.5"),
        ("reference.weight_bytes", True, "the report.reference.weight_bytes is true"),
        ("reference.name", None, "the report.reference.name is null"),
        ("distance.same_top", 0.5, "the report.distance.same_top is 0.5"),
        ("distance.same_top.value", math.nan, "the report.distance.same_top.value is nan"),
        ("distance.same_top.value", "x" * 99, 'the report.distance.same_top.value is "x'),
        ("layers", {}, "the report.layers is {}"),
        ("matrices.1", {"name": "x"}, r"the report.matrices\[1\] has no relative"),
        ("recipe.method", ["gptq"], r'the report.recipe.method is \["gptq"\]'),
        ("distance", {}, "the report.distance has no"),
    ],
)
def test_a_report_that_cannot_be_understood_is_refused(
    tmp_path: Path, path: str, value: Any, message: str
) -> None:
    (tmp_path / REPORT_FILE).write_text(json.dumps(changed(path, value)))
    with pytest.raises(DamagedModel, match=f"{message}.*; measure again, or remove it"):
        read_report(tmp_path)


@pytest.mark.parametrize("version", [None, 2, "1", True])
def test_a_report_of_another_version_is_distinguished_from_a_damaged_one(tmp_path: Path, version: object) -> None:
    (tmp_path / REPORT_FILE).write_text(json.dumps(changed("version", version) | {"of the future": 1}))
    with pytest.raises(UnsupportedModel, match=f"version {version!r}, but this localllm reads 1; measure again"):
        read_report(tmp_path)


def test_reading_a_report_needs_no_torch(tmp_path: Path) -> None:
    write_report(QUALITY, tmp_path)
    code = (
        "import sys; from pathlib import Path; from localllm.quality.report import read_report; "
        "from localllm.cli.quality_page import format_quality; "
        f"print(len(format_quality(read_report(Path({str(tmp_path)!r}))))); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_integers_are_valid_floats(tmp_path: Path) -> None:
    (tmp_path / REPORT_FILE).write_text(json.dumps(changed("distance.same_top.value", 1)))
    found = read_report(tmp_path)
    assert isinstance(found, Quality)
    assert found.distance.same_top.value == 1
