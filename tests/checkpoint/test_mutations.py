"""No mutation of a model file crashes, hangs or exhausts memory: it is read, or refused with one error message."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.tiny import make_checkpoint

TIME_LIMIT = 240  # seconds for all, which take five alone; a hang that no signal ends is found by it


def write_gguf(file: Path) -> None:
    """Write a complete tiny Llama with keys of every type."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_custom_alignment(32)
    writer.add_token_list(["<s>", "a", "ü", "\ufffd"])
    writer.add_token_scores([0.0, -1.0, -2.0, -3.0])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_eos_token_id(0)
    writer.add_bool("llama.b", True)
    writer.add_float64("llama.d", 2.5)
    writer.add_array("llama.flags", [True, False])
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    shapes |= {
        "ffn_gate": (64, 32),
        "ffn_up": (64, 32),
        "ffn_down": (32, 64),
        "attn_norm": (32,),
        "ffn_norm": (32,),
    }
    tensors = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {"token_embd.weight": (4, 32), "output_norm.weight": (32,), "rope_freqs.weight": (4,)}
    for name, shape in tensors.items():
        values = np.ones(shape, np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mutations(kind: str, file: Path, count: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.checkpoint.mutations", kind, str(count), str(seed), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_mutated_headers_end_in_an_error_message(tmp_path: Path, kind: str, count: int) -> None:
    if kind == "gguf":
        file = tmp_path / "model.gguf"
        write_gguf(file)
    else:
        make_checkpoint(tmp_path, "Llama", num_hidden_layers=1, vocab_size=32)
        file = tmp_path / "model.safetensors"
    result = mutations(kind, file, count, seed=0)
    assert not result["failures"]
    assert result["slowest_s"] < 1
    assert result["ends"]["read"] > count / 100  # some mutations change nothing that matters
    assert result["ends"]["DamagedModel"] > count / 4
