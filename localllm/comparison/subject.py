"""The models to compare, not loaded yet; whether they can be compared, and on which text."""

from collections.abc import Callable
from dataclasses import dataclass

from localllm.arch.config import ModelConfig
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.errors import UsageError
from localllm.hardware.device import free_bytes, resolve_device
from localllm.hub.resolve import resolve_model
from localllm.llm import loader
from localllm.llm.llm import LLM
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit, fit_model
from localllm.quality.text import WINDOW_TOKENS, Windows, split_into_windows
from localllm.settings import Settings
from localllm.text.tokenizer import Tokenizer

AS_IN_SETTINGS = LoadOptions()
SAME_TOKENIZER_REMEDY = "name two models with the same tokenizer"


@dataclass(frozen=True)
class Subject:
    name: str
    header: Header
    config: ModelConfig
    tokenizer: Tokenizer
    device: str  # as given to `resolve_device`
    dtype: str
    kv_dtype: str  # of the KV cache
    load: Callable[[int], LLM]  # with a given context


def find_subject(
    name: str, settings: Settings, *, device: str | None = None, options: LoadOptions = AS_IN_SETTINGS
) -> Subject:
    """Find a model by alias, repository, folder or GGUF file, to load it as stored. device: None for that of the
    settings. Raises what `load` raises before it reads weights.
    """
    ref = resolve_model(name)
    header = read_header(ref.path)
    config = parse_config(header.config)
    check_quantization(header.config)
    chosen_device = device or settings.device
    dtype = settings.dtype if options.dtype == "auto" else options.dtype
    kv_dtype = settings.kv_dtype if options.kv_dtype == "auto" else options.kv_dtype

    def load(context: int) -> LLM:
        return loader.load(
            name,
            device=chosen_device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            context=context,
            settings=settings,
            tensor_parallel=options.tensor_parallel,
            pipeline_parallel=options.stage_shares or options.pipeline_parallel,
            expert_parallel=options.expert_parallel,
            workers=options.workers,
            token_file=options.token_file,
        )

    return Subject(
        ref.name,
        header,
        config,
        Tokenizer.from_checkpoint(header.path, header.gguf),
        chosen_device,
        dtype,
        kv_dtype,
        load,
    )


def shared_vocab_size(reference: Subject, other: Subject) -> int:
    """Return the number of tokens that both models have; rows beyond the tokenizer's tokens are padding.

    Raises UsageError, naming the first token that differs.
    """
    size = min(reference.config.vocab_size, other.config.vocab_size)
    for token in range(max(reference.tokenizer.vocab_size, other.tokenizer.vocab_size)):
        reference_token, other_token = reference.tokenizer.token(token), other.tokenizer.token(token)
        if reference_token is not None and other_token is not None and reference_token != other_token:
            raise UsageError(
                f"token {token} is {reference_token!r} in {reference.name} and {other_token!r} in {other.name}",
                SAME_TOKENIZER_REMEDY,
            )
        if token >= size and (reference_token is not None or other_token is not None):
            smaller = min(reference, other, key=lambda one: one.config.vocab_size).name
            raise UsageError(
                f"{smaller} has {size} tokens, but the other also has {reference_token or other_token!r}",
                SAME_TOKENIZER_REMEDY,
            )
    return size


def shared_windows(reference: Subject, other: Subject, text: str, *, window: int | None, tokens: int) -> Windows:
    """window, tokens: as for `compare_models`. Raises UsageError if the models tokenize the text differently, do
    not support the window, or the text is too short.
    """
    longest = min(reference.config.max_context, other.config.max_context)
    if window is not None and window > longest:
        raise UsageError(f"a window of {window} tokens is too large", f"both models support at most {longest}")
    size = min(WINDOW_TOKENS, longest) if window is None else window
    windows, other_windows = (
        split_into_windows(text, one.tokenizer, window=size, max_tokens=tokens) for one in (reference, other)
    )
    for number, (a, b) in enumerate(zip(windows.ids, other_windows.ids, strict=False)):
        if a != b:
            position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            raise UsageError(
                f"from token {number * size + position} on, {reference.name} reads the text as "
                f"{_shown(reference, a[position:])} and {other.name} as {_shown(other, b[position:])}",
                SAME_TOKENIZER_REMEDY,
            )
    if len(windows.ids) != len(other_windows.ids):
        raise UsageError(
            f"{reference.name} reads the text as {windows.tokens} tokens, {other.name} as {other_windows.tokens}",
            SAME_TOKENIZER_REMEDY,
        )
    return windows


def fits_together(reference: Subject, other: Subject, context: int) -> bool:
    """Return whether both fit into memory at once. Raises DoesNotFit if one does not fit alone."""
    target = resolve_device(reference.device)
    free = free_bytes(target)

    def options(one: Subject) -> LoadOptions:
        return LoadOptions(context, dtype=one.dtype, kv_dtype=one.kv_dtype)

    separate = [
        check_fit(one.header, FreeMemory(target.type, free), options(one), name=one.name)
        for one in (reference, other)
    ]
    memory = separate[0].memory
    used = memory.total + memory.workspace if memory else free
    remaining = FreeMemory(target.type, free - used)
    return fit_model(other.header, other.config, remaining, options(other), name=other.name).fits


def _shown(one: Subject, ids: tuple[int, ...]) -> str:
    return " ".join(repr(one.tokenizer.token(index) or index) for index in ids[:3]) or "ended"
