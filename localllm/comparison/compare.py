"""Two models over one text: how far the second is from the first, and how fast both are.

Both are held at once where memory holds both, else one after the other, the logits of the first in a temporary
file.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

from localllm.comparison.look import ANSWER_TOKENS, Reading, Seen, look, prompts_of
from localllm.comparison.subject import Subject, fit_together, vocabulary, windows_for
from localllm.quality import kept, measure
from localllm.quality.report import Answers, Error, Quality, Scored, Side
from localllm.quality.text import EVALUATION, EVALUATION_NAME, MOST_TOKENS
from localllm.settings import Settings
from localllm.text.tokenizer import Tokenizer
from localllm.units import size


def compare(
    reference: Subject,
    other: Subject,
    settings: Settings,
    text: str | None = None,
    *,
    text_name: str = EVALUATION_NAME,
    window: int | None = None,
    tokens: int = MOST_TOKENS,
    note: Callable[[str], None] = lambda line: None,
) -> Quality:
    """All of a report but the recipe and the matrices, which are the quantizer's to add.

    text: None is the project's own; window: tokens that are seen at once, None for the usual, or what both models
    know where that is less; tokens: of the text, at most; note: takes a line for the person. Raises UsageError for
    models of two vocabularies and a text that is too short, DoesNotFit, DiskFull, and what `load` raises.
    """
    vocab = vocabulary(reference, other)
    text = EVALUATION.read_text(encoding="utf-8") if text is None else text
    windows = windows_for(reference, other, text, window=window, tokens=tokens)
    prompts = prompts_of(windows)
    longest = min(reference.config.max_context, other.config.max_context)
    widest = max(len(ids) for ids in windows.ids)
    context = min(longest, max(widest, max(map(len, prompts)) + ANSWER_TOKENS))
    together = fit_together(reference, other, context)
    with ExitStack() as held:
        first = held.enter_context(closing(reference.load(context)))
        seen, ours = look(first, windows, prompts), Reading(first, vocab)
        logits: measure.Logits = ours
        if not together:
            needed = kept.bytes_of(windows, vocab)
            note(
                f"note: memory does not hold {reference.name} and {other.name} together, so they run one after "
                f"the other, with {size(needed)} of logits in a temporary file in {settings.home}"
            )
            logits = held.enter_context(kept.keeping(settings.home, needed))
            logits.record(ours, windows)
            first.close()
        second = held.enter_context(closing(other.load(context)))
        seen_of_other, theirs = look(second, windows, prompts), Reading(second, vocab)
        distance = measure.distance(logits, theirs, windows)
    return Quality(
        side(reference, seen, ours),
        side(other, seen_of_other, theirs),
        Scored(text_name, windows.tokens, windows.scored, widest),
        distance,
        tuple(answers(reference.tokenizer, prompts, seen, seen_of_other)),
        layer_errors(seen, seen_of_other),
    )


def side(subject: Subject, seen: Seen, reading: Reading) -> Side:
    decode = seen.decode_tokens_per_s
    return Side(
        subject.name,
        subject.header.stored_bytes,
        seen.dtype,
        seen.kv_dtype,
        text_tokens_per_s=reading.tokens_per_s,
        decode_tokens_per_s=None if math.isnan(decode) else decode,
    )


def layer_errors(reference: Seen, other: Seen) -> tuple[Error, ...]:
    """After each layer, if the two have as many, of one width."""
    if [x.shape for x in reference.layers] != [x.shape for x in other.layers]:
        return ()
    pairs = zip(reference.layers, other.layers, strict=True)
    return tuple(Error(f"layer {i}", measure.output_error(a, b)) for i, (a, b) in enumerate(pairs))


def answers(tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], reference: Seen, other: Seen) -> list[Answers]:
    found = []
    for prompt, ours, theirs in zip(prompts, reference.answers, other.answers, strict=True):
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True)))
        before = [*prompt, *ours[:same]]
        found.append(
            Answers(
                tokenizer.decode(prompt),
                len(ours),
                same,
                continuation(tokenizer, prompt, ours[:same]),
                continuation(tokenizer, before, ours[same:]),
                continuation(tokenizer, before, theirs[same:]),
            )
        )
    return found


def continuation(tokenizer: Tokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """The text of `ids` where it stands: SentencePiece leaves out the space at the begin of a text."""
    begin, whole = tokenizer.decode(before), tokenizer.decode([*before, *ids])
    return whole[len(begin) :] if whole.startswith(begin) else tokenizer.decode(ids)
