import pytest
import torch

from localllm.arch.describe import parse_config
from localllm.errors import UsageError
from localllm.runtime.kernels import batch_invariance
from tests.tiny import CPU, SMALL

LLAMA = parse_config({**SMALL, "model_type": "llama", "architectures": ["LlamaForCausalLM"]})


def test_a_cpu_that_compiles_kernels_is_taken() -> None:
    batch_invariance.check_deterministic(LLAMA, CPU, torch.float32)
    batch_invariance.check_deterministic(LLAMA, CPU, torch.int8)


def test_where_it_is_not_proven_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="holds on a CPU alone"):
        batch_invariance.check_deterministic(LLAMA, torch.device("cuda", 0), torch.float32)
    monkeypatch.setattr(batch_invariance, "cpu_supported", lambda: False)
    with pytest.raises(UsageError, match="lacks the instructions"):
        batch_invariance.check_deterministic(LLAMA, CPU, torch.float32)
