"""Compares two models over one text: how far the second is from the first, and how fast both are.

Both are loaded at once if they fit into memory, otherwise in turn, with the first model's logits in a temporary
file.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

from torch import Tensor

from localllm.comparison.subject import Subject, fits_together, shared_vocab_size, shared_windows
from localllm.formatting import format_bytes
from localllm.llm.llm import LLM
from localllm.quality import measure
from localllm.quality.report import Answers, Error, Quality, Scored, Side
from localllm.quality.text import EVALUATION_NAME, EVALUATION_TEXT, MAX_TOKENS, Windows
from localllm.request import SamplingParams
from localllm.runtime.batch import Batch, EncoderBatch
from localllm.runtime.engine import Engine
from localllm.runtime.kernels.norm import FollowingNorm, Norm
from localllm.runtime.kv_cache.sequence_state import SequenceState
from localllm.runtime.kv_cache.tensors import LayerCache
from localllm.runtime.model import Layer
from localllm.settings import Settings
from localllm.text.tokenizer import Tokenizer

LOGITS_PER_CHUNK = 2**25  # logits at once: 134 MB
PROBED_LAYER_TOKENS = 128  # tokens at the beginning of the text whose layer outputs are captured
PROMPT_TOKENS, ANSWER_TOKENS = 32, 64


class LogitsReader:
    """A model that reads windows of text, as a `measure.LogitsFunction`."""

    def __init__(self, llm: LLM, vocab: int):
        """vocab: number of tokens to give logits for."""
        self.llm = llm
        self.vocab = vocab
        self.tokens = 0
        self.seconds = 0.0

    def __call__(self, ids: Sequence[int]) -> Iterator[Tensor]:
        worker = self.llm.worker
        pieces = stream_logits(worker.engine, ids, max(1, LOGITS_PER_CHUNK // self.vocab))
        try:
            while True:
                start = time.perf_counter()
                piece = worker.call(lambda: next(pieces, None))
                if piece is None:
                    break
                self.seconds += time.perf_counter() - start
                self.tokens += len(piece)
                yield piece[:, : self.vocab]
        finally:
            worker.call(pieces.close)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class ProbeResult:
    dtype: str
    kv_dtype: str | None  # of the KV cache, if it differs
    decode_tokens_per_s: float  # for the first answer
    answers: list[tuple[int, ...]]  # token ids, to each prompt
    layers: list[Tensor]  # [T, hidden] float32, after each layer


def probe(llm: LLM, windows: Windows, prompts: Sequence[Sequence[int]]) -> ProbeResult:
    """Return greedy answers to the prompts, as long as the context allows, and the layers' outputs."""
    available = llm.context - max(map(len, prompts))
    greedy = SamplingParams(temperature=0, max_tokens=min(ANSWER_TOKENS, available), ignore_eos=True)
    completions = [llm.generate(prompt, greedy) for prompt in prompts]
    layers = llm.worker.call(
        lambda: capture_layer_outputs(llm.worker.engine, windows.ids[0][:PROBED_LAYER_TOKENS])
    )
    kv_dtype = llm.kv_dtype if llm.kv_dtype != llm.dtype else None
    return ProbeResult(
        llm.dtype,
        kv_dtype,
        completions[0].metrics.tokens_per_s,
        [completion.token_ids for completion in completions],
        layers,
    )


def choose_prompts(windows: Windows) -> list[tuple[int, ...]]:
    """Return the beginning of the text, and of its middle window."""
    chosen = dict.fromkeys((windows.ids[0], windows.ids[len(windows.ids) // 2]))
    return [ids[: min(PROMPT_TOKENS, max(1, len(ids) // 2))] for ids in chosen]


def compare_models(
    reference: Subject,
    candidate: Subject,
    settings: Settings,
    text: str | None = None,
    *,
    text_name: str = EVALUATION_NAME,
    window: int | None = None,
    tokens: int = MAX_TOKENS,
    note: Callable[[str], None] = lambda line: None,
) -> Quality:
    """Return a report without the recipe and the matrices, which the quantizer adds.

    text: None for the project's own; window: most tokens seen at once, None for the default, limited by both
    models' contexts; tokens: most tokens of the text; note: receives a line for the user. Raises UsageError for
    models with different vocabularies and a text that is too short, DoesNotFit, DiskFull, and what `load` raises.
    """
    vocab = shared_vocab_size(reference, candidate)
    text = EVALUATION_TEXT.read_text(encoding="utf-8") if text is None else text
    windows = shared_windows(reference, candidate, text, window=window, tokens=tokens)
    prompts = choose_prompts(windows)
    longest = min(reference.config.max_context, candidate.config.max_context)
    widest = max(len(ids) for ids in windows.ids)
    context = min(longest, max(widest, max(map(len, prompts)) + ANSWER_TOKENS))
    together = fits_together(reference, candidate, context)
    with ExitStack() as resources:
        first = resources.enter_context(closing(reference.load(context)))
        reference_probe, reference_logits = probe(first, windows, prompts), LogitsReader(first, vocab)
        logits: measure.LogitsFunction = reference_logits
        if not together:
            needed = measure.logits_bytes(windows, vocab)
            note(
                f"note: memory does not hold {reference.name} and {candidate.name} together, so they run one "
                f"after the other, with {format_bytes(needed)} of logits in a temporary file in {settings.home}"
            )
            logits = resources.enter_context(measure.open_logits_file(settings.home, needed))
            logits.record(reference_logits, windows)
            first.close()
        second = resources.enter_context(closing(candidate.load(context)))
        candidate_probe, candidate_logits = probe(second, windows, prompts), LogitsReader(second, vocab)
        distance = measure.measure_distance(logits, candidate_logits, windows)
    return Quality(
        make_side(reference, reference_probe, reference_logits),
        make_side(candidate, candidate_probe, candidate_logits),
        Scored(text_name, windows.tokens, windows.scored, widest),
        distance,
        tuple(compare_answers(reference.tokenizer, prompts, reference_probe, candidate_probe)),
        layer_errors(reference_probe, candidate_probe),
    )


def make_side(subject: Subject, probe: ProbeResult, reading: LogitsReader) -> Side:
    decode = probe.decode_tokens_per_s
    return Side(
        subject.name,
        subject.header.stored_bytes,
        probe.dtype,
        probe.kv_dtype,
        text_tokens_per_s=reading.tokens_per_s,
        decode_tokens_per_s=None if math.isnan(decode) else decode,
    )


def layer_errors(reference: ProbeResult, other: ProbeResult) -> tuple[Error, ...]:
    """Return the error after each layer, if both models have the same number of layers and width."""
    if [layer.shape for layer in reference.layers] != [layer.shape for layer in other.layers]:
        return ()
    pairs = zip(reference.layers, other.layers, strict=True)
    return tuple(Error(f"layer {i}", measure.output_error(a, b)) for i, (a, b) in enumerate(pairs))


def compare_answers(
    tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], reference: ProbeResult, other: ProbeResult
) -> list[Answers]:
    answers = []
    for prompt, reference_ids, other_ids in zip(prompts, reference.answers, other.answers, strict=True):
        same_tokens = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(reference_ids, other_ids, strict=True)
            )
        )
        before = [*prompt, *reference_ids[:same_tokens]]
        answers.append(
            Answers(
                tokenizer.decode(prompt),
                len(reference_ids),
                same_tokens,
                continuation_text(tokenizer, prompt, reference_ids[:same_tokens]),
                continuation_text(tokenizer, before, reference_ids[same_tokens:]),
                continuation_text(tokenizer, before, other_ids[same_tokens:]),
            )
        )
    return answers


def continuation_text(tokenizer: Tokenizer, prefix_ids: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of `ids` in context: SentencePiece omits the space at the beginning of a text."""
    begin, whole = tokenizer.decode(prefix_ids), tokenizer.decode([*prefix_ids, *ids])
    return whole[len(begin) :] if whole.startswith(begin) else tokenizer.decode(ids)


def stream_logits(engine: Engine, token_ids: Sequence[int], chunk_len: int) -> Generator[Tensor]:
    """Yield logits [chunk, vocab] float32 chunk by chunk; the last chunk may be shorter. Do not modify them.

    Runs alongside the engine's other work, on the engine's thread. Raises OutOfBlocks if the KV cache has too few
    free blocks for the tokens.
    """
    state = SequenceState(engine.pool)
    try:
        for begin in range(0, len(token_ids), chunk_len):
            chunk = list(token_ids[begin : begin + chunk_len])
            state.extend(len(chunk))
            all_indices = list(range(len(chunk)))
            yield engine.runner.launch(
                engine.runner.make_batch([state], [chunk], all_indices, engine.pool.drain_copies())
            )
    finally:
        state.free()


def capture_layer_outputs(engine: Engine, token_ids: Sequence[int]) -> list[Tensor]:
    """Return the output [T, hidden] float32 of each layer, on the CPU. Call it on the engine's thread."""
    model, outputs = engine.runner.model, []
    layers = model.layers
    watched: list[Layer] = [ObservedLayer(layer, lambda x: outputs.append(x.float().cpu())) for layer in layers]
    model.layers = watched
    try:
        engine.logits(list(token_ids))
    finally:
        model.layers = layers
    return outputs


class ObservedLayer(Layer):
    """A layer with the same weights that reports its output."""

    def __init__(self, layer: Layer, on_output: Callable[[Tensor], None]):
        vars(self).update(vars(layer))
        self.on_output = on_output

    def __call__(
        self,
        x: Tensor,
        batch: Batch | EncoderBatch,
        cache: LayerCache | None,
        token_input: Tensor | None,
        norm: Norm | None = None,
        following: FollowingNorm | None = None,
    ) -> Tensor:
        x = super().__call__(x, batch, cache, token_input, norm, following)
        self.on_output(x)
        return x
