"""CPU levels: detection, and the features that each level leaves."""

import os
import subprocess
import sys
from collections.abc import Iterator

import llvmlite.binding as llvm
import pytest

from localllm.errors import UsageError
from localllm.hardware import processor
from localllm.hardware.device import cpu_features, dtype_for
from localllm.settings import CPU_LEVELS, Settings

OLD = {"sse2": True, "avx": True, "avx2": True, "f16c": True, "fma": True, "bmi2": True, "avx512f": False}
NEW = OLD | {name: True for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "amx-int8")}
CACHED = (processor.forced_level, processor.host_features, processor.features, processor.kernel_target)


@pytest.fixture
def forget() -> Iterator[None]:
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


def test_levels_are_those_of_the_settings() -> None:
    assert tuple(processor.LEVELS) == tuple(processor.BEYOND) == CPU_LEVELS


def test_a_level_is_reached_with_all_that_it_needs() -> None:
    assert [processor.reaches_level(NEW, level) for level in CPU_LEVELS] == [True, False, True, True]
    assert [processor.reaches_level(OLD, level) for level in CPU_LEVELS] == [False, False, True, True]
    assert [processor.reaches_level({}, level) for level in CPU_LEVELS] == [False, False, False, True]


def test_features_beyond_a_level_are_masked() -> None:
    def left(level: str | None) -> set[str]:
        return {name for name, there in processor.limit_features(NEW, level).items() if there}

    assert left(None) == left("avx512") == set(NEW)
    assert left("avx2") == {"sse2", "avx", "avx2", "f16c", "fma", "bmi2"}
    assert left("baseline") == {"sse2", "bmi2"}


def test_the_environment_names_a_level() -> None:
    assert Settings.from_environment({}).cpu is None
    assert Settings.from_environment({"LOCALLLM_CPU": "avx2"}).cpu == "avx2"
    with pytest.raises(UsageError, match="LOCALLLM_CPU is 'sse9'; set it to avx512, avxvnni, avx2 or baseline"):
        Settings.from_environment({"LOCALLLM_CPU": "sse9"})


@pytest.mark.usefixtures("forget")
def test_a_level_that_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: OLD)
    monkeypatch.setenv("LOCALLLM_CPU", "avx512")
    with pytest.raises(
        UsageError, match="LOCALLLM_CPU is 'avx512', but this processor does not support it; use a lower"
    ):
        processor.features()
    monkeypatch.setenv("LOCALLLM_CPU", "avx2")
    assert processor.features() == OLD


@pytest.mark.usefixtures("forget")
def test_a_lower_level_widens_bfloat16_and_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: NEW)
    monkeypatch.setenv("LOCALLLM_CPU", "avx2")
    assert processor.kernel_target().cpu == "x86-64-v3"
    assert dtype_for("auto", "BF16", "cpu") == "float32"
    assert cpu_features()[-1] == "LOCALLLM_CPU=avx2"
    assert processor.kernel_instructions() == "AVX2 (LOCALLLM_CPU=avx2; the processor has AVX-512 VNNI)"
    monkeypatch.delenv("LOCALLLM_CPU")
    for function in CACHED:
        function.cache_clear()
    assert processor.kernel_instructions() == "AVX-512 VNNI"


def test_processors_of_a_level_share_a_target() -> None:
    newer = NEW | {"avx512vbmi": True, "avx512fp16": True, "gfni": True}
    assert processor.target_of(newer) == processor.target_of(NEW)
    assert processor.target_of(NEW).cpu == "x86-64-v4" and "+avx512vnni" in processor.target_of(NEW).flags
    assert processor.target_of(OLD).cpu == "x86-64-v3" and "+avx2" in processor.target_of(OLD).flags
    lesser = processor.target_of(OLD | {"bmi2": False})
    assert lesser != processor.target_of(OLD) and "-bmi2" in lesser.flags


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ("avx2 avx512bw avx512vnni avxvnni", "avx512vnni"),
        ("avx2 avx512bw", "avx512bw"),
        ("avx2 avxvnni", "avxvnni"),
        ("avx2", "avx2"),
        ("neon dotprod", "dotprod"),
        ("neon", "generic"),
        ("", "generic"),
    ],
)
def test_bytes_are_multiplied_by_the_best_instructions(features: str, expected: str) -> None:
    assert processor.byte_product(dict.fromkeys(features.split(), True)) == expected


def test_an_unknown_level_ends_a_command_in_one_error_message() -> None:
    environment = os.environ | {"LOCALLLM_CPU": "sse9"}
    command = [sys.executable, "-m", "localllm", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: LOCALLLM_CPU is 'sse9'; set it to avx512, avxvnni, avx2 or baseline\n"
