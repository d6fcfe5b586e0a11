"""A prompt of 4,096 tokens through the engine: the operations of its products over the time to the first token, as
a share of what a large product reaches; and the attention kernel beside those of torch on the same numbers."""

import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.ceilings import matmul_peak
from bench.gpu.clock import Work, finished, in_turns
from bench.gpu.generated import SHAPES, TINY, Form
from bench.gpu.loop import DTYPE, Model, ask, generate, let_go, needed_bytes, prompt_of, until
from bench.gpu.setting import Row, Setting, judged, release
from localllm.arch.config import AttentionConfig
from localllm.arch.cost import SequenceStep, flops, query_key_pairs
from localllm.plan.memory import BLOCK_SIZE, TOKEN_BUDGET, blocks_for
from localllm.runtime import kernels
from localllm.runtime.batch import Batch
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.kv_cache.tensors import KVCache

BUDGET_S = 45
PROMPT, TINY_PROMPT = 4096, 40  # tokens
CHUNKS = (2048, 4096)  # of it in a step, beside what a step may take where nobody says otherwise
ROUNDS = 4
LINES: dict[Form, float] = {"bf16": 0.70, "int4": 0.60}  # of the measured peak
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def measure(setting: Setting) -> Iterator[Row]:
    peak, tokens = matmul_peak(setting), TINY_PROMPT if setting.tiny else PROMPT
    shape = TINY if setting.tiny else SHAPES["8B"]
    for form, line in LINES.items():
        need = needed_bytes(shape, form, tokens, ROUNDS + 1)
        if not setting.room_for(need):
            yield {"what": f"8B {form}", "left out": f"needs {need / 1e9:.0f} GB"}
            continue
        model = generate(shape, form, setting, tokens, sequences=ROUNDS + 1)
        for chunk in sorted({TOKEN_BUDGET[setting.device.type], *CHUNKS}):
            model.engine.scheduler.token_budget = chunk
            taken = first_token_seconds(model, tokens, chunk)
            rate = flops(model.config, (SequenceStep(tokens, tokens),)) / taken
            yield {
                **{"what": f"8B {form}", "tokens": tokens, "tokens a step": chunk, "ms": taken * 1e3},
                **{"tokens/s": tokens / taken, "TFLOP/s": rate / 1e12, "of peak": rate / peak},
                **judged(rate / peak, line),
            }
        del model
        release()
    yield from attention_rows(setting, tokens, peak)


@torch.inference_mode()
def first_token_seconds(model: Model, tokens: int, seeds: int) -> float:
    """From the request to its token, each time with another prompt; the first round compiles and is left out.

    seeds: of the prompts; others for each call."""
    times = []
    for seed in range(ROUNDS + 1):
        prompt = prompt_of(model, tokens, 1000 * seeds + seed)
        start = finished(model.engine.device)
        sequence = ask(model, prompt, 2)
        until(model.engine, [sequence], 1)
        times.append(finished(model.engine.device) - start)
        let_go(model.engine, [sequence])
    return statistics.median(times[1:])


@torch.inference_mode()
def attention_rows(setting: Setting, tokens: int, peak: float) -> Iterator[Row]:
    """One layer of the 8B model, causal: keys and values over a block table here, as they are in memory there."""
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
    whole = [x.transpose(0, 1)[None].contiguous() for x in (q, k, v)]  # [1, heads, T, dim]

    def theirs(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                whole[0], whole[1], whole[2], is_causal=True, scale=config.scale, enable_gqa=True
            )

    works: dict[str, Work] = {"localllm": lambda: kernels.attention(q, cache, batch, config)}
    expected = kernels.attention(q, cache, batch, config).float()
    for name, backend in BACKENDS.items():
        if name == "math" and not setting.tiny:
            continue  # it writes all scores to memory
        try:
            got = theirs(backend)[0].transpose(0, 1).float()
        except RuntimeError as error:  # this backend is not for this device
            yield {"what": f"attention, torch {name}", "left out": str(error).partition("\n")[0]}
            continue
        assert (got - expected).norm() < 0.02 * expected.norm(), f"torch {name} gives something else"
        works[f"torch {name}"] = lambda backend=backend: theirs(backend)
    count = 4 * heads * dim * query_key_pairs(config, SequenceStep(tokens, tokens))
    for name, taken in in_turns(works, setting.device).items():
        rate = count / taken
        yield {
            **{"what": f"attention, {name}", "tokens": tokens, "ms": taken * 1e3},
            **{"TFLOP/s": rate / 1e12, "of peak": rate / peak},
        }
