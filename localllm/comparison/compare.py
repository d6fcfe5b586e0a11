"""Compares two models over one text: how far the second is from the first, and how fast both are.

Both are loaded at once if they fit into memory, otherwise in turn, with the first model's logits in a temporary
file.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from localllm.comparison.look import ANSWER_TOKENS, LogitsReader, ProbeResult, choose_prompts, probe
from localllm.comparison.subject import Subject, fits_together, shared_vocab_size, shared_windows
from localllm.formatting import format_bytes
from localllm.quality import cache, measure
from localllm.quality.report import Answers, Error, Quality, Scored, Side
from localllm.quality.text import EVALUATION_NAME, EVALUATION_TEXT, MAX_TOKENS
from localllm.settings import Settings
from localllm.text.tokenizer import Tokenizer


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
            needed = cache.logits_bytes(windows, vocab)
            note(
                f"note: memory does not hold {reference.name} and {candidate.name} together, so they run one "
                f"after the other, with {format_bytes(needed)} of logits in a temporary file in {settings.home}"
            )
            logits = resources.enter_context(cache.open_logits_file(settings.home, needed))
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
    for prompt, ours, theirs in zip(prompts, reference.answers, other.answers, strict=True):
        same_tokens = sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True))
        )
        before = [*prompt, *ours[:same_tokens]]
        answers.append(
            Answers(
                tokenizer.decode(prompt),
                len(ours),
                same_tokens,
                continuation_text(tokenizer, prompt, ours[:same_tokens]),
                continuation_text(tokenizer, before, ours[same_tokens:]),
                continuation_text(tokenizer, before, theirs[same_tokens:]),
            )
        )
    return answers


def continuation_text(tokenizer: Tokenizer, prefix_ids: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of `ids` in context: SentencePiece omits the space at the beginning of a text."""
    begin, whole = tokenizer.decode(prefix_ids), tokenizer.decode([*prefix_ids, *ids])
    return whole[len(begin) :] if whole.startswith(begin) else tokenizer.decode(ids)
