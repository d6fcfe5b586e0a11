"""A generated model behind the real engine, contexts that nobody had to compute, and the time of its steps."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu.clock import finished
from bench.gpu.generated import Form, RandomSource, config_of
from bench.gpu.setting import Setting
from localllm.arch.config import ModelConfig
from localllm.arch.cost import SequenceStep, WeightBytes, bytes_read, parameter_count
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
ANSWER = 512  # tokens that there is room for, behind each context
WINDOWS = 3
ELEMENT_BYTES = {"bf16": 2.0, "int8": 1.01, "int4": 0.6}  # about, with scales and an embedding that stays in bf16
ROOM = 3 * 2**30


@dataclass(frozen=True)
class Model:
    config: ModelConfig
    weights: WeightBytes
    engine: Engine

    def step_bytes(self, context: int, batch: int) -> int:
        """What a step of so many sequences has to read, each once."""
        share = SequenceStep(tokens=1, context=context, sequences=batch)
        return bytes_read(self.config, self.weights, (share,), DTYPE.itemsize)


@torch.inference_mode()
def generate(
    shape: dict[str, Any],
    form: Form,
    setting: Setting,
    context: int,
    sequences: int = 1,
    source: type[RandomSource] = RandomSource,
    kv_dtype: KVDtype | None = None,
) -> Model:
    """With a cache for so many sequences of `context` tokens and an answer, full of random numbers.

    kv_dtype: as `make_caches`."""
    config = config_of(shape, form)
    weights = source(form, setting.device, DTYPE, config.tie_embeddings)
    decoder = Decoder(config, weights, context + ANSWER)
    blocks = sequences * blocks_for(context + ANSWER)
    captured = context + ANSWER if setting.device.type == "cuda" else None
    runner = Runner(
        decoder, blocks, BLOCK_SIZE, DTYPE, setting.device, 0, kv_dtype, max(MIN_RUNNING, sequences), captured
    )
    for cache in runner.paged_caches:
        for part in vars(cache).values():
            if isinstance(part, torch.Tensor):
                part.copy_(torch.randn(part.shape, device=part.device, dtype=DTYPE))
    return Model(
        config,
        weights.made.weights,
        Engine(runner, BlockPool(blocks, BLOCK_SIZE), TOKEN_BUDGET[setting.device.type], runner.max_running),
    )


def needed_bytes(shape: dict[str, Any], form: Form, context: int, sequences: int = 1) -> int:
    """Of memory, with some room for what is computed."""
    config = config_of(shape, form)
    step = (SequenceStep(1, context + ANSWER, sequences=sequences),)
    weights = WeightBytes(round(parameter_count(config) * ELEMENT_BYTES[form]), 0, 0, 0)
    return bytes_read(config, weights, step, DTYPE.itemsize) + ROOM


def ask(model: Model, prompt: list[int], answer: int) -> Sequence:
    """A greedy request, handed to the engine."""
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    sequence = Sequence(Request(tuple(prompt), params, 0.0), 0, frozenset(), len(prompt) + answer, Stopwatch(0.0))
    model.engine.add_sequence(sequence)
    return sequence


def prompt_of(model: Model, tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (tokens,), generator=generator).tolist()


def remember(model: Model, prompt: list[int]) -> None:
    """Let the engine find the prompt's blocks, whatever numbers are in them, as if it had computed them."""
    state = SequenceState(model.engine.pool)
    state.extend(len(prompt))
    state.cache_full_blocks(prompt)
    state.free()


class Guesses:
    """So many drafts in each step, which random models hardly ever agree with."""

    def __init__(self, count: int):
        self.count = count

    def may_draft(self, sequence: Sequence) -> bool:
        return True

    def draft(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.draft_ids = sequence.token_ids[-1:] * min(self.count, sequence.max_drafts)

    def on_verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        pass

    def on_step(self, sequences: int, drafts: int, seconds: float) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass


@torch.inference_mode()
def step_seconds(model: Model, context: int, batch: int, steps: int, drafts: int = 0) -> tuple[float, float]:
    """Decode of so many sequences that stand at `context` -> the median seconds of a step, and how far the windows
    of `steps` steps are apart as a share of it. Tokens are read as anybody reads them. drafts: of each sequence,
    that each step verifies."""
    engine, device = model.engine, model.engine.device
    engine.drafter = Guesses(drafts) if drafts else None
    begun = min(steps, 8)
    assert begun + steps * WINDOWS < ANSWER
    # No more than they can say: what is reserved for each decides how many run at once.
    tokens = min(ANSWER, (begun + steps * WINDOWS) * (1 + drafts) + 1)
    prompts = [prompt_of(model, context, seed) for seed in range(batch)]
    for prompt in prompts:
        remember(model, prompt)
    sequences = [ask(model, prompt, tokens) for prompt in prompts]
    until(engine, sequences, begun)
    times = []
    for _ in range(WINDOWS):
        before, start = tokens_of(sequences), finished(device)
        for _ in range(steps):
            engine.step()
        times.append((finished(device) - start) / steps)
        assert tokens_of(sequences) - before >= steps * batch, "a step brought less than one token a sequence"
    let_go(engine, sequences)
    middle = statistics.median(times)
    return middle, (max(times) - min(times)) / middle


def until(engine: Engine, sequences: list[Sequence], tokens: int) -> None:
    """Steps until each has answered so many tokens."""
    for _ in range(100_000):
        if all(len(s.token_ids) - s.prompt_len >= tokens for s in sequences):
            return
        if any(event.error for event in engine.step()):
            raise RuntimeError("the model computed no number")
    raise RuntimeError("the engine does not get on")


def tokens_of(sequences: Iterable[Sequence]) -> int:
    return sum(len(s.token_ids) for s in sequences)


def let_go(engine: Engine, sequences: Iterable[Sequence]) -> None:
    """Ends answers, and the step that is still under way for them."""
    for sequence in sequences:
        engine.cancel(sequence)
    while engine.has_unfinished_requests:
        engine.step()
