"""Prefill of 4,096 tokens through the engine: operations divided by the time to the first token, as a fraction of
the rate of a large product; and the attention kernel compared with those of torch on the same numbers.
"""

import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.ceilings import matmul_peak
from bench.gpu.setting import Row, Setting, judged, release
from localllm.arch.config import AttentionConfig
from localllm.arch.cost import SequenceStep, flops, query_key_pairs
from localllm.benchmark.gpu.decode_steps import (
    DTYPE,
    Model,
    cancel_all,
    generate,
    needed_bytes,
    random_prompt,
    run_until,
    submit,
)
from localllm.benchmark.gpu.generated import SHAPES, TINY, Form
from localllm.hardware.gpu_clock import Work, finished, interleaved_seconds
from localllm.plan.memory import BLOCK_SIZE, TOKEN_BUDGET, blocks_for
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.kv_cache.tensors import KVCache

BUDGET_S = 45
PROMPT, TINY_PROMPT = 4096, 40  # tokens
CHUNKS = (2048, 4096)  # tokens per step, besides the default
ROUNDS = 4
LINES: dict[Form, float] = {"bf16": 0.70, "int4": 0.60}  # fraction of the measured peak to reach
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def measure(setting: Setting) -> Iterator[Row]:
    peak, tokens = matmul_peak(setting), TINY_PROMPT if setting.tiny else PROMPT
    shape = TINY if setting.tiny else SHAPES["8B"]
    for form, line in LINES.items():
        need = needed_bytes(shape, form, tokens, ROUNDS + 1)
        if not setting.room_for(need):
            yield {"what": f"8B {form}", "left out": f"needs {need / 1e9:.0f} GB"}
            continue
        model = generate(shape, form, setting.device, tokens, sequences=ROUNDS + 1)
        for chunk in sorted({TOKEN_BUDGET[setting.device.type], *CHUNKS}):
            model.engine.scheduler.token_budget = chunk
            ttft_s = measure_ttft(model, tokens, chunk)
            rate = flops(model.config, (SequenceStep(tokens, tokens),)) / ttft_s
            yield {
                **{"what": f"8B {form}", "tokens": tokens, "tokens a step": chunk, "ms": ttft_s * 1e3},
                **{"tokens/s": tokens / ttft_s, "TFLOP/s": rate / 1e12, "of peak": rate / peak},
                **judged(rate / peak, line),
            }
        del model
        release()
    yield from attention_rows(setting, tokens, peak)


@torch.inference_mode()
def measure_ttft(model: Model, tokens: int, first_seed: int) -> float:
    """Return the median TTFT in seconds over all rounds except the first, which compiles.

    first_seed: of the prompts, which differ in every round; distinct for every call.
    """
    times = []
    for number in range(ROUNDS + 1):
        prompt = random_prompt(model, tokens, 1000 * first_seed + number)
        start = finished(model.engine.device)
        sequence = submit(model, prompt, 2)
        run_until(model.engine, [sequence], 1)
        times.append(finished(model.engine.device) - start)
        cancel_all(model.engine, [sequence])
    return statistics.median(times[1:])


@torch.inference_mode()
def attention_rows(setting: Setting, tokens: int, peak: float) -> Iterator[Row]:
    """Compare the attention of one layer of the 8B model, causal: localllm reads keys and values through a block
    table, torch contiguous tensors.
    """
    heads, kv_heads, dim = (4, 2, 16) if setting.tiny else (32, 8, 128)
    config = AttentionConfig(heads, kv_heads, dim, None, dim**-0.5)
    pool = BlockPool(blocks_for(tokens), BLOCK_SIZE)
    state = SequenceState(pool)
    state.extend(tokens)
    batch = Batch.from_states([state], [[0] * tokens], [], setting.device)
    cache = KVCache(blocks_for(tokens), BLOCK_SIZE, kv_heads, dim, DTYPE, setting.device)
    k, v = (torch.randn(tokens, kv_heads, dim, device=setting.device, dtype=DTYPE) for _ in range(2))
    cache.append(k, v, batch.slot_mapping)
    q = torch.randn(tokens, heads, dim, device=setting.device, dtype=DTYPE)
    qs, ks, vs = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))  # [1, heads, T, dim]

    def torch_attention(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, scale=config.scale, enable_gqa=True)

    works: dict[str, Work] = {"localllm": lambda: kernels.attention(q, cache, batch, config)}
    expected = kernels.attention(q, cache, batch, config).float()
    for name, backend in BACKENDS.items():
        if name == "math" and not setting.tiny:
            continue  # writes all scores to memory
        try:
            result = torch_attention(backend)[0].transpose(0, 1).float()
        except RuntimeError as error:  # the backend does not support this device
            yield {"what": f"attention, torch {name}", "left out": str(error).partition("\n")[0]}
            continue
        assert (result - expected).norm() < 0.02 * expected.norm(), f"torch {name} differs"
        works[f"torch {name}"] = lambda backend=backend: torch_attention(backend)
    count = 4 * heads * dim * query_key_pairs(config, SequenceStep(tokens, tokens))
    for name, time in interleaved_seconds(works, setting.device).items():
        rate = count / time
        yield {
            **{"what": f"attention, {name}", "tokens": tokens, "ms": time * 1e3},
            **{"TFLOP/s": rate / 1e12, "of peak": rate / peak},
        }
