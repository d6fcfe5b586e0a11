"""The second step of loading: what the model is given, and how it is spoken to, before its weights are read."""

from dataclasses import dataclass, replace

import torch

from localllm.arch.fields import ConfigFields
from localllm.checkpoint.tokenizer import read_tokenizer
from localllm.errors import UsageError
from localllm.hardware.device import activation_bits_for, free_host_bytes
from localllm.llm.find import FoundModel, LoadRequest
from localllm.llm.prompt import ChatFormat, ChatFormats
from localllm.plan.fit import Fit, check_fit
from localllm.plan.memory import MemoryPlan, allocate_minimum, host_blocks
from localllm.quant.vectors import KV_DTYPES
from localllm.request import SamplingParams
from localllm.runtime.kernels.batch_invariance import check_deterministic, why_not_deterministic
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.output.formats import OutputFormat
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextFormat:
    """How the model reads and writes text."""

    tokenizer: Tokenizer
    own: ChatFormat  # of the model's own chat template
    others: ChatFormats


@dataclass(frozen=True)
class LoadPlan:
    """What a model will be given."""

    text: TextFormat
    recommended: SamplingParams
    fit: Fit
    memory: MemoryPlan
    dtype: torch.dtype
    kv_dtype: torch.dtype
    deterministic: bool
    activation_bits: int  # that a CPU keeps where activations meet packed weights


def plan(found: FoundModel, request: LoadRequest) -> LoadPlan:
    """Read the tokenizer, and share out the device's memory.

    Raises DoesNotFit, UsageError for a grammar that the model cannot keep to or a draft model with another
    vocabulary, UnsupportedModel where determinism was asked for and does not hold.
    """
    header = found.header
    recommended = SamplingParams.from_generation_config(header.generation_config)
    with request.phases("tokenizer"):
        text = read_text_format(found)
        if request.grammar is not None:
            text.own.grammars.compile(request.grammar)
        if found.draft:
            draft_tokenizer = read_tokenizer(found.draft.header)
            check_same_vocabulary(text.tokenizer, draft_tokenizer, (found.ref.name, found.draft.name))
    with request.phases("device"):
        fit = check_fit(
            header,
            request.free_memory,
            found.options,
            name=found.ref.name,
            force=request.force,
            draft=found.draft and found.draft.needs,
        )
        memory = fit.memory or allocate_minimum(fit.needs, found.options.context)
        if request.device.type != "cpu":
            memory = replace(memory, host_blocks=host_blocks(memory, free_host_bytes()))
    dtype: torch.dtype = getattr(torch, fit.dtype)
    kv_dtype: torch.dtype = KV_DTYPES.get(fit.kv_dtype, dtype)
    deterministic = request.deterministic or request.settings.deterministic
    if deterministic:
        check_deterministic(found.config, request.device, kv_dtype)
    elif request.deterministic is None:
        deterministic = why_not_deterministic(found.config, request.device, kv_dtype) is None
    return LoadPlan(
        text=text,
        recommended=recommended,
        fit=fit,
        memory=memory,
        dtype=dtype,
        kv_dtype=kv_dtype,
        deterministic=deterministic,
        activation_bits=activation_bits_for(request.settings.activations, found.options.dtype, fit.dtype),
    )


def read_text_format(found: FoundModel) -> TextFormat:
    """The tokenizer, the chat template, and how answers are parsed and end."""
    header, vocab_size = found.header, found.config.vocab_size
    end_ids = ConfigFields(header.generation_config).ids("eos_token_id")
    tokenizer = read_tokenizer(header)
    output = OutputFormat.detect(tokenizer.chat_templates, tokenizer.added_tokens)
    eos_ids = frozenset([*end_ids, *found.config.eos_ids, *tokenizer.eos_ids])
    grammars = GrammarCompiler(tokenizer, vocab_size, eos_ids, output)
    renderer = ChatTemplate.from_tokenizer(tokenizer)  # without templates of its own it renders those of editions
    own = ChatFormat(renderer if tokenizer.chat_templates else None, output, grammars, eos_ids)
    return TextFormat(tokenizer, own, ChatFormats(tokenizer, vocab_size, eos_ids, renderer))


# Tokens that only one of them has, as in llama.cpp: versions of a family differ slightly.
MAX_UNSHARED_TOKENS = 128


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, names: tuple[str, str]) -> None:
    """Compare the tokens themselves, rather than names of files or how texts are split.

    names: of both models. Raises UsageError with the number of differences and the first. Tokens that only one of
    them has are rarely drafted, so that a few are accepted.
    """
    max_size = max(target.vocab_size, draft.vocab_size)
    pairs = [(target.token(i), draft.token(i)) for i in range(max_size)]
    differ = [
        i
        for i, (target_token, draft_token) in enumerate(pairs)
        if target_token != draft_token and None not in (target_token, draft_token)
    ]
    unshared = [i for i, pair in enumerate(pairs) if pair.count(None) == 1]
    first = next(iter(differ or unshared), None)
    if first is not None and (differ or len(unshared) > MAX_UNSHARED_TOKENS):
        target_token, draft_token = (f"{token!r}" if token is not None else "no token" for token in pairs[first])
        count = len(differ) + len(unshared)
        raise UsageError(
            f"{names[1]} has another vocabulary than {names[0]}: {count} of {max_size} tokens differ, first "
            f"{first}, which is {draft_token} and not {target_token}",
            "name a draft model of the same family",
        )
