"""What is to be compared: models of this machine, not loaded yet; whether they may be compared, and on what."""

from collections.abc import Callable
from dataclasses import dataclass

from localllm.arch.config import ModelConfig
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.checkpoint.tokenizer import read_tokenizer
from localllm.errors import UsageError
from localllm.hardware.device import free_bytes, resolve_device
from localllm.hub.resolve import resolve_model
from localllm.llm import loader
from localllm.llm.llm import LLM
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit, fit_model
from localllm.quality.text import WINDOW_TOKENS, Windows, split_into_windows
from localllm.settings import Settings
from localllm.text.tokenizer import Tokenizer

SAME_TOKENIZER_REMEDY = "name two models of one tokenizer"


@dataclass(frozen=True)
class Subject:
    name: str
    header: Header
    config: ModelConfig
    tokenizer: Tokenizer
    device: str  # as `resolve_device` takes it
    dtype: str
    kv_dtype: str  # of keys and values
    load: Callable[[int], LLM]  # with room for so many tokens


def find_subject(
    name: str,
    settings: Settings,
    *,
    device: str | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
) -> Subject:
    """By alias, repository, folder or GGUF file; None leaves a choice to the settings. Raises what `load` raises
    before it reads weights."""
    ref = resolve_model(name)
    header = read_header(ref.path)
    config = parse_config(header.config)
    check_quantization(header.config)
    place, kind, kept = device or settings.device, dtype or settings.dtype, kv_dtype or settings.kv_dtype

    def load(context: int) -> LLM:
        return loader.load(name, device=place, dtype=kind, kv_dtype=kept, context=context, settings=settings)

    return Subject(ref.name, header, config, read_tokenizer(header), place, kind, kept, load)


def shared_vocab_size(reference: Subject, other: Subject) -> int:
    """How many tokens both know: what the tables of weights have beyond the tokenizer's is padding.

    Raises UsageError, naming the first token that is not the same.
    """
    size = min(reference.config.vocab_size, other.config.vocab_size)
    for index in range(max(reference.tokenizer.vocab_size, other.tokenizer.vocab_size)):
        ours, theirs = reference.tokenizer.token(index), other.tokenizer.token(index)
        if ours is not None and theirs is not None and ours != theirs:
            raise UsageError(
                f"token {index} is {ours!r} in {reference.name} and {theirs!r} in {other.name}",
                SAME_TOKENIZER_REMEDY,
            )
        if index >= size and (ours is not None or theirs is not None):
            smaller = min(reference, other, key=lambda one: one.config.vocab_size).name
            raise UsageError(
                f"{smaller} has {size} tokens, and the other knows {ours or theirs!r}", SAME_TOKENIZER_REMEDY
            )
    return size


def shared_windows(reference: Subject, other: Subject, text: str, *, window: int | None, tokens: int) -> Windows:
    """window, tokens: as `compare` takes them. Raises UsageError where the two read the text differently, know no
    window of that size, or have too little text."""
    longest = min(reference.config.max_context, other.config.max_context)
    if window is not None and window > longest:
        raise UsageError(f"a window of {window} tokens is asked for", f"both models know {longest}")
    size = min(WINDOW_TOKENS, longest) if window is None else window
    ours, theirs = (
        split_into_windows(text, one.tokenizer, window=size, max_tokens=tokens) for one in (reference, other)
    )
    for number, (a, b) in enumerate(zip(ours.ids, theirs.ids, strict=False)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            raise UsageError(
                f"from token {number * size + at} on, {reference.name} reads the text as "
                f"{_shown(reference, a[at:])} and {other.name} as {_shown(other, b[at:])}",
                SAME_TOKENIZER_REMEDY,
            )
    if len(ours.ids) != len(theirs.ids):
        raise UsageError(
            f"{reference.name} reads the text as {ours.tokens} tokens, {other.name} as {theirs.tokens}",
            SAME_TOKENIZER_REMEDY,
        )
    return ours


def fits_together(reference: Subject, other: Subject, context: int) -> bool:
    """Does memory hold both at once? Raises DoesNotFit where it does not even hold each alone."""
    place = resolve_device(reference.device)
    free = free_bytes(place)

    def wish(one: Subject) -> LoadOptions:
        return LoadOptions(context, dtype=one.dtype, kv_dtype=one.kv_dtype)

    alone = [
        check_fit(one.header, FreeMemory(place.type, free), wish(one), name=one.name) for one in (reference, other)
    ]
    memory = alone[0].memory
    taken = memory.total + memory.workspace if memory else free
    left = FreeMemory(place.type, free - taken)
    return fit_model(other.header, other.config, left, wish(other), name=other.name).fits


def _shown(one: Subject, ids: tuple[int, ...]) -> str:
    return " ".join(repr(one.tokenizer.token(index) or index) for index in ids[:3]) or "ended"
