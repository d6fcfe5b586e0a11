"""The second step of loading: read the tokenizer and divide the memory, before the weights are read."""

from dataclasses import dataclass, replace

import torch

from localllm.arch.fields import ConfigFields
from localllm.errors import UsageError
from localllm.hardware.device import activation_bits_for, free_host_bytes
from localllm.llm.find import LoadRequest, LocalModel
from localllm.llm.prompt import ChatFormat, ChatFormats
from localllm.plan.fit import Fit, check_fit
from localllm.plan.memory import MemoryPlan, allocate_minimum, host_blocks
from localllm.quant.vectors import KV_DTYPES, KVDtype
from localllm.request import SamplingParams
from localllm.runtime.kernels.batch_invariance import check_deterministic, why_not_deterministic
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.output.formats import OutputFormat
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

MAX_UNSHARED_TOKENS = 128  # that only one vocabulary has, as in llama.cpp: versions of a family differ slightly


@dataclass(frozen=True)
class TextFormat:
    """The tokenizer and chat formats of a model."""

    tokenizer: Tokenizer
    own: ChatFormat  # of the model's own chat template
    others: ChatFormats


@dataclass(frozen=True)
class LoadPlan:
    """The text format, memory and dtypes of a model to load."""

    text: TextFormat
    recommended: SamplingParams
    fit: Fit
    memory: MemoryPlan
    dtype: torch.dtype
    kv_dtype: KVDtype
    deterministic: bool
    activation_bits: int  # of activations multiplied with packed weights on a CPU


def plan(model: LocalModel, request: LoadRequest) -> LoadPlan:
    """Read the tokenizer, and divide the device's memory.

    Raises DoesNotFit, UsageError for a grammar that the model cannot follow or a draft model with another
    vocabulary, UnsupportedModel if determinism was requested and is not supported.
    """
    header = model.header
    recommended = SamplingParams.from_generation_config(header.generation_config)
    with request.phases("tokenizer"):
        text = read_text_format(model)
        if request.grammar is not None:
            text.own.grammars.compile(request.grammar)
        if model.draft:
            draft_tokenizer = Tokenizer.from_checkpoint(model.draft.header.path, model.draft.header.gguf)
            check_same_vocabulary(text.tokenizer, draft_tokenizer, (model.ref.name, model.draft.name))
    with request.phases("device"):
        fit = check_fit(
            header,
            request.free_memory,
            model.options,
            name=model.ref.name,
            force=request.force,
            draft=model.draft and model.draft.needs,
        )
        memory = fit.memory or allocate_minimum(fit.needs, model.options.context)
        if request.device.type != "cpu":
            memory = replace(memory, host_blocks=host_blocks(memory, free_host_bytes() // request.ranks))
    dtype: torch.dtype = getattr(torch, fit.dtype)
    kv_dtype: KVDtype = KV_DTYPES.get(fit.kv_dtype, dtype)
    deterministic = request.deterministic or request.settings.deterministic
    if deterministic:
        check_deterministic(model.config, request.device, kv_dtype)
    elif request.deterministic is None:
        deterministic = why_not_deterministic(model.config, request.device, kv_dtype) is None
    return LoadPlan(
        text=text,
        recommended=recommended,
        fit=fit,
        memory=memory,
        dtype=dtype,
        kv_dtype=kv_dtype,
        deterministic=deterministic,
        activation_bits=activation_bits_for(request.settings.activations, model.options.dtype, fit.dtype),
    )


def read_text_format(model: LocalModel) -> TextFormat:
    """Read the tokenizer and chat template, and detect the output format and end-of-sequence tokens."""
    header, vocab_size = model.header, model.config.vocab_size
    end_ids = ConfigFields(header.generation_config).ids("eos_token_id")
    tokenizer = Tokenizer.from_checkpoint(header.path, header.gguf)
    output = OutputFormat.detect(tokenizer.chat_templates, tokenizer.added_tokens)
    eos_ids = frozenset([*end_ids, *model.config.eos_ids, *tokenizer.eos_ids])
    grammars = GrammarCompiler(tokenizer, vocab_size, eos_ids, output)
    renderer = ChatTemplate.from_tokenizer(tokenizer)  # also renders the templates of editions
    own = ChatFormat(renderer if tokenizer.chat_templates else None, output, grammars, eos_ids)
    return TextFormat(tokenizer, own, ChatFormats(tokenizer, vocab_size, eos_ids, renderer))


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, names: tuple[str, str]) -> None:
    """Compare the tokens of two vocabularies, whatever their files and splitting rules.

    names: of both models. Raises UsageError with the number of differences and the first one. A few tokens that
    only one of them has are accepted, as they are rarely drafted.
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
            f"the vocabularies of {names[1]} and {names[0]} differ: {count} of {max_size} tokens, first "
            f"{first}, which is {draft_token} and not {target_token}",
            "name a draft model of the same family",
        )
