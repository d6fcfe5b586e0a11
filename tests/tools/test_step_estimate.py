"""The launches that estimates of decode steps are made of are those of the models, and read what `plan` counts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.arch.describe import parse_config
from localllm.runtime.kernels.gpu.launch import GPUS
from tools.step_estimate import CONTEXT, MODELS, record_step, work_of

ROOT = Path(__file__).parents[2]


@pytest.mark.quick_every(2)
@pytest.mark.parametrize(
    ("name", "nodes_per_layer", "others"),
    # Others: angles, the last norm, the head, and the first norm where products prepare those of the layers.
    [("Llama 3.1 8B, INT4", 6, 4), ("Qwen3 30B-A3B, INT4", 10, 3)],
)
def test_a_step_is_recorded_with_all_launches_of_a_layer(name: str, nodes_per_layer: int, others: int) -> None:
    model = next(model for model in MODELS if model.name == name)
    step, layers = record_step(model, GPUS[90]), len(parse_config(model.config).layers)
    assert len(step.launches) == layers * nodes_per_layer + others


def test_a_step_reads_its_weights_and_cache_once() -> None:
    """8B in INT4 with groups of 128: 4.125 bits a weight, the head in INT8; 2,048 tokens of 131,072 bytes."""
    model = next(model for model in MODELS if model.name == "Llama 3.1 8B, INT4")
    step = record_step(model, GPUS[90])
    layers = 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14_336 * 4096) * 4.125 / 8
    expected = layers + 128_256 * 4096 + CONTEXT * 131_072
    read = sum(work_of(launch, CONTEXT).nbytes for launch in step.launches)
    assert read == pytest.approx(expected, rel=0.001)


@pytest.mark.slow
def test_a_step_takes_longer_than_reading_at_the_published_bandwidth() -> None:
    """In a process of its own, as kernels are interpreted in this one."""
    command = [sys.executable, "tools/step_estimate.py", MODELS[0].name, "H200"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=True)
    row = next(line for line in done.stdout.splitlines() if line.startswith(f"| {MODELS[0].name} | H200"))
    best, worst, limit = (int(share) for share in re.findall(r"(\d+)%", row))
    assert 5 < worst < best < limit < 100
    assert "| `small_m_packed_kernel` 16384 x 2048 |" in done.stdout
