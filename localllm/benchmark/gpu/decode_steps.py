"""Steps of a generated model in the real engine, at contexts that need not be computed, and their duration."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from localllm.arch.config import ModelConfig
from localllm.arch.cost import SequenceStep, WeightBytes, bytes_read, parameter_count, state_bytes
from localllm.benchmark.gpu.generated import Form, RandomSource, config_of
from localllm.hardware.gpu_clock import finished
from localllm.metrics import Stopwatch
from localllm.plan.memory import BLOCK_SIZE, MIN_RUNNING, TOKEN_BUDGET, blocks_for
from localllm.quant.vectors import KVDtype
from localllm.request import Request, SamplingParams
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import BlockPool, SequenceState
from localllm.runtime.model import Decoder
from localllm.runtime.runner import Runner
from localllm.runtime.sequence import Sequence

DTYPE = torch.bfloat16
ANSWER = 512  # tokens that fit behind each context
WINDOWS = 3
ELEMENT_BYTES = {
    "bf16": 2.0,
    "int8": 1.01,
    "int4": 0.6,
    "mxfp4": 0.7,
}  # about, with scales and an embedding that stays in bf16
STEP_BYTES = 3 * 2**30  # of what a step computes, and of graphs


@dataclass(frozen=True)
class Model:
    config: ModelConfig
    weights: WeightBytes
    engine: Engine

    def step_bytes(self, context: int, batch: int) -> int:
        """Return the bytes that a step of this many sequences must read."""
        share = SequenceStep(tokens=1, context=context, sequences=batch)
        return bytes_read(self.config, self.weights, (share,), DTYPE.itemsize)


@torch.inference_mode()
def generate(
    shape: dict[str, Any],
    form: Form,
    device: torch.device,
    context: int,
    sequences: int = 1,
    source: type[RandomSource] = RandomSource,
    kv_dtype: KVDtype | None = None,
) -> Model:
    """Generate a model with a cache for sequences of `context` tokens and an answer, full of random numbers.

    kv_dtype: see `make_caches`
    """
    config = config_of(shape, form)
    weights = source(form, device, DTYPE, config.tie_embeddings)
    decoder = Decoder(config, weights, context + ANSWER)
    blocks = sequences * blocks_for(context + ANSWER)
    captured = context + ANSWER if device.type == "cuda" else None
    running = max(MIN_RUNNING, sequences)
    slots = 2 * running if state_bytes(config, DTYPE.itemsize) else 0
    runner = Runner(decoder, blocks, BLOCK_SIZE, DTYPE, device, slots, kv_dtype, running, captured)
    for cache in runner.paged_caches:
        for part in vars(cache).values():
            if isinstance(part, torch.Tensor):
                part.copy_(torch.randn(part.shape, device=part.device, dtype=DTYPE))
    return Model(
        config,
        weights.made.weights,
        Engine(runner, BlockPool(blocks, BLOCK_SIZE, slots), TOKEN_BUDGET[device.type], runner.max_running),
    )


def needed_bytes(shape: dict[str, Any], form: Form, context: int, sequences: int = 1) -> int:
    """Return the memory that `generate` and its steps need, approximately."""
    config = config_of(shape, form)
    step = (SequenceStep(1, context + ANSWER, sequences=sequences),)
    weights = WeightBytes(round(parameter_count(config) * ELEMENT_BYTES[form]), 0, 0, 0)
    return bytes_read(config, weights, step, DTYPE.itemsize) + STEP_BYTES


def submit(model: Model, prompt: list[int], answer: int) -> Sequence:
    """Submit a greedy request to the engine."""
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    sequence = Sequence(Request(tuple(prompt), params, 0.0), 0, frozenset(), len(prompt) + answer, Stopwatch(0.0))
    model.engine.add_sequence(sequence)
    return sequence


def random_prompt(model: Model, tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (tokens,), generator=generator).tolist()


def fill_prefix_cache(model: Model, prompt: list[int]) -> None:
    """Put the prompt's blocks into the prefix cache without computing them."""
    state = SequenceState(model.engine.pool)
    state.extend(len(prompt))
    state.cache_full_blocks(prompt)
    state.free()


class WrongDrafts:
    """Drafts this many tokens in each step, which models with random weights hardly ever accept: some repeat the
    last token, so it is another.
    """

    def __init__(self, count: int, vocab_size: int):
        self.count = count
        self.vocab_size = vocab_size

    def may_draft(self, sequence: Sequence) -> bool:
        return True

    def draft(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            other = (sequence.token_ids[-1] + 1) % self.vocab_size
            sequence.draft_ids = [other] * min(self.count, sequence.max_drafts)

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        pass

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass


@torch.inference_mode()
def step_seconds(model: Model, context: int, batch: int, steps: int, drafts: int = 0) -> tuple[float, float]:
    """Return the median duration of a step that decodes `batch` sequences at `context`, and the difference between
    windows of `steps` steps as a share of it.

    drafts: draft tokens of each sequence that each step verifies
    """
    engine, device = model.engine, model.engine.device
    engine.drafter = WrongDrafts(drafts, model.config.vocab_size) if drafts else None
    warm_up = min(steps, 8)
    assert warm_up + steps * WINDOWS < ANSWER
    # No more than needed: the memory reserved for each limits how many run at once.
    tokens = min(ANSWER, (warm_up + steps * WINDOWS) * (1 + drafts) + 1)
    prompts = [random_prompt(model, context, seed) for seed in range(batch)]
    for prompt in prompts:
        fill_prefix_cache(model, prompt)
    sequences = [submit(model, prompt, tokens) for prompt in prompts]
    run_until(engine, sequences, warm_up)
    times = []
    for _ in range(WINDOWS):
        before, start = count_tokens(sequences), finished(device)
        for _ in range(steps):
            engine.step()
        times.append((finished(device) - start) / steps)
        assert count_tokens(sequences) - before >= steps * batch, "a step yielded less than one token per sequence"
    cancel_all(engine, sequences)
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


def run_until(engine: Engine, sequences: list[Sequence], tokens: int) -> None:
    """Run steps until each sequence has this many tokens of its answer."""
    for _ in range(100_000):
        if all(len(s.token_ids) - s.prompt_len >= tokens for s in sequences):
            return
        if any(event.error for event in engine.step()):
            raise RuntimeError("the model computed NaN or infinity")
    raise RuntimeError("the engine makes no progress")


def count_tokens(sequences: Iterable[Sequence]) -> int:
    return sum(len(s.token_ids) for s in sequences)


def cancel_all(engine: Engine, sequences: Iterable[Sequence]) -> None:
    """Cancel the sequences, and finish the step in flight."""
    for sequence in sequences:
        engine.cancel(sequence)
    while engine.has_unfinished_requests:
        engine.step()
