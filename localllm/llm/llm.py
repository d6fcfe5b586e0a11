"""The Python API of a loaded model.

llm = localllm.load("demo")
print(llm.chat([{"role": "user", "content": "Tell me a story"}]).text)
"""

import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from localllm.arch.config import ModelConfig
from localllm.errors import ContextOverflow, DoesNotFit, UsageError
from localllm.hardware.device import dtype_name
from localllm.hardware.measure import Rates, can_measure, device_rates, stored_rates
from localllm.hub.resolve import ModelRef
from localllm.llm.cache_allocation import CacheAllocation
from localllm.llm.decoder_embeddings import PoolingType, embed_inputs
from localllm.llm.embedding_inputs import EmbeddingInput, Embeddings, InputEncoder, never_gone
from localllm.llm.prompt import ChatFormat, ChatFormats, PromptEncoder
from localllm.llm.worker import Deliver, Stream, Worker
from localllm.metrics import EngineStats, Metrics, Slot, StepReads, Stopwatch
from localllm.modelfile.edition import Edition
from localllm.modelfile.options import to_sampling_params
from localllm.plan import expected, runs, step_times
from localllm.plan.memory import MemoryPlan
from localllm.plan.runs import Run
from localllm.plan.speed import step_reads
from localllm.plan.step_times import StepSetup
from localllm.receipts import provenance, receipt
from localllm.request import (
    CACHE_SCOPE,
    CLIENT,
    PREFIX_NAMES,
    SEED_BITS,
    ChatRequest,
    Completion,
    EventType,
    GenerationEvent,
    Prompt,
    Request,
    SamplingParams,
    ToolUse,
    require_int,
)
from localllm.runtime.kernels.registry import used_kernels
from localllm.runtime.kv_cache.sequence_state import OutOfBlocks
from localllm.runtime.kv_cache.snapshot import CacheIdentity
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.draft_model import DraftModel
from localllm.settings import Settings
from localllm.text.grammar.functions import build_tool_constraint, request_tool_constraint
from localllm.text.messages import Message
from localllm.text.output.formats import OutputFormat
from localllm.text.output.reader import OutputParser, PlainParser
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

PROMPT_TAIL_TOKENS = 16


@dataclass(frozen=True)
class ModelOrigin:
    """Which model was loaded, and how."""

    ref: ModelRef
    source: Path  # the files that were quantized, if `quant` is set; otherwise the path of `ref`
    quant: str | None
    draft: str
    draft_model: str | None  # its name
    setup: Run  # identifies comparable runs
    load_s: float
    load_phases: Mapping[str, float]  # seconds, in order; docs/cli.md describes the phases
    read_bytes_per_s: float | None  # while copying weights to a GPU; None: mapped
    layout_file: Path | None  # from which laid-out weights are mapped
    layout_note: str  # about keeping the layout; empty if there is nothing to report
    settings: Settings


@dataclass(eq=False)
class ModelParts:
    """The parts of a loaded model, which all its editions share."""

    origin: ModelOrigin
    config: ModelConfig
    recommended: SamplingParams  # by the model itself, regardless of the edition
    tokenizer: Tokenizer
    chat_format: ChatFormat  # of the model's own template
    chat_formats: ChatFormats  # of other templates
    worker: Worker
    caches: CacheAllocation
    kv_dtype: str
    activation_bits: int  # of activations multiplied with packed weights on a CPU
    pending_load_s: float = 0.0  # of the load that the first request waited for

    def __post_init__(self) -> None:
        self.pending_load_s = self.origin.load_s
        # Also called without references and at exit, when a thread inside a kernel would abort the interpreter.
        self.close = weakref.finalize(
            self, close_all, self.worker, self.chat_formats.renderer, self.caches.draft_model
        )

    @cached_property
    def cache_identity(self) -> CacheIdentity:
        """See `LLM.cache_identity`."""
        worker, path = self.worker, self.origin.ref.path
        return self.caches.identity(worker.engine, path, self.activation_bits, worker.threads)


class LLM:
    """A loaded language model. Safe to use from several threads; `with` closes it.

    Editions of a model are separate LLMs that share its parts: closing one closes all of them.
    """

    def __init__(self, parts: ModelParts, edition: Edition | None = None):
        """edition: its messages, template and parameters are defaults of each request. Raises UsageError for
        inconsistent parameters, DamagedModel for a template that cannot be compiled."""
        self.parts = parts
        self.edition = edition
        self.origin = parts.origin
        self.name = parts.origin.ref.name
        self.path = parts.origin.ref.path
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.worker = parts.worker
        self.layout_file, self.layout_note = parts.origin.layout_file, parts.origin.layout_note
        self.weight_bytes = parts.caches.memory.weights.total
        self.device = str(parts.worker.engine.device)
        self.dtype = dtype_name(parts.worker.engine.dtype)
        self.kv_dtype = parts.kv_dtype
        self.activation_bits = parts.activation_bits
        self.deterministic = parts.worker.engine.deterministic
        self.recommended = self.default_params = parts.recommended
        self.chat_format = parts.chat_format
        if edition:
            self.default_params = to_sampling_params(edition.parameters, parts.recommended)
        if edition and edition.template:
            self.chat_format = parts.chat_formats.get(edition.template)
        self.prompt_encoder = PromptEncoder(
            self.name, parts.tokenizer, self.chat_format.template, parts.config.vocab_size, edition
        )
        self.load_s = parts.origin.load_s
        self.load_phases = parts.origin.load_phases
        self.read_bytes_per_s = parts.origin.read_bytes_per_s
        self.measured_rates: Rates | None = None  # by this process
        self.close = parts.close
        """End the engine and free its memory; unfinished answers fail with an error."""

    @property
    def cache_identity(self) -> CacheIdentity:
        """The properties that the bits of cached keys and values depend on. The first time, this reads megabytes
        of the model's files."""
        return self.parts.cache_identity

    def __repr__(self) -> str:
        return f"<LLM {self.name} on {self.device} in {self.dtype}, context {self.context}>"

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return self.memory.context

    @property
    def max_context(self) -> int:
        """Maximum context that the model supports, in tokens."""
        return self.config.max_context

    @property
    def memory(self) -> MemoryPlan:
        """The memory plan as currently allocated."""
        return self.parts.caches.memory

    @property
    def without_graphs(self) -> str:
        """Why steps are not captured as CUDA graphs; empty if they are, and on a CPU."""
        return self.worker.engine.no_graphs_reason

    @property
    def blocks(self) -> int:
        """Number of blocks in the KV cache."""
        return self.worker.engine.block_count

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.worker.engine.block_size

    @property
    def reads(self) -> StepReads:
        """Bytes that a decode step reads, and the measured bandwidth, None before `measure_rates`."""
        return self._reads

    def measure_rates(self) -> None:
        """Measure this machine's bandwidth for `reads` between two steps, unless its rates are known.

        Takes less than a second. Rates of a busy machine are discarded; the others are stored. Nothing is measured
        if little memory is free. Raises LocalLLMError after `close`.
        """
        engine, settings = self.worker.engine, self.origin.settings

        def measure() -> Rates:
            return device_rates(engine.device, engine.dtype, settings, remeasure=False, note=lambda text: None)

        if self.reads.bandwidth is None and can_measure(engine.device):
            rates = self.worker.call(measure)
            if not rates.from_busy_machine:
                self.measured_rates = rates
                del self._reads

    @cached_property
    def _reads(self) -> StepReads:
        engine, settings = self.worker.engine, self.origin.settings
        measured = self.measured_rates or stored_rates(engine.device, engine.dtype, settings)
        reached = runs.median_rates(runs.read(settings.home / "runs.jsonl", lambda text: None), self.origin.setup)
        # As in a plan: a bandwidth that answers have reached is possible.
        bandwidth = max(measured.read, reached.bandwidth if reached else 0) if measured else None
        token_bytes = self.memory.block_bytes / self.block_tokens
        return step_reads(self.config, self.memory.weights, self.dtype, self.kv_dtype, token_bytes, bandwidth)

    def resize(self, context: int | None) -> None:
        """Change the context without reading the weights again; None: as many tokens as fit.

        Running answers are computed again and continue, those that are too long end with ContextOverflow, and the
        prefix cache is cleared. If DoesNotFit or UsageError is raised, nothing has changed.
        """
        worker, caches = self.worker, self.parts.caches

        def replan() -> None:
            plan = caches.plan_resize(worker.engine, context)
            worker.reconfigure(plan.context, lambda: caches.resize(worker.engine, plan, self.parts.recommended))

        worker.call(replan)

    def stats(self) -> EngineStats:
        """Return the engine's statistics, from any thread, without waiting for the engine."""
        return self.worker.stats()

    def slots(self) -> list[Slot]:
        """Return the state of each request, from any thread, without waiting for the engine."""
        return self.worker.slots()

    def prefer_throughput(self) -> None:
        """Accept any number of waiting requests, and choose step sizes for throughput, as for batches."""
        self.worker.prefer_throughput()

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return self.chat_format.eos_ids

    @property
    def has_chat_template(self) -> bool:
        return self.chat_format.template is not None

    @property
    def thinks(self) -> bool:
        """Whether the chat template supports reasoning before the answer."""
        template = self.chat_format.template
        return template is not None and OutputFormat.detect(template.sources, ()).can_reason

    def with_edition(self, edition: Edition | None) -> "LLM":
        """Return an LLM with another edition, or none, that shares the engine. Raises the errors of `LLM`."""
        return LLM(self.parts, edition)

    def prepare(self, chat: ChatRequest) -> Request:
        """Turn a chat request into token ids and limits for the engine.

        Raises ContextOverflow if the prompt leaves no space for an answer; UsageError if it is empty or the model
        does not support it, or if a grammar, a required call or a strict function cannot be enforced.
        """
        arrival = time.perf_counter()
        params = chat.params or self.default_params
        if (chat.tools or chat.template_arguments or chat.think is not None) and not chat.is_chat:
            raise UsageError("tools and template arguments require a chat", "give the prompt as messages")
        if not all(isinstance(tool, Mapping) for tool in chat.tools or ()):
            raise UsageError("a tool is not an object", "give each a type and a function")
        tool_constraint = build_tool_constraint(chat.tools or (), chat.tool_use, params.grammar)
        if tool_constraint and params.ignore_eos:
            raise UsageError("ignore_eos cannot be used with required or strict tool calls", "leave it out")
        context = chat.context
        if context is None and self.edition:
            context = self.edition.context
        context = None if context is None else require_int("context", context, minimum=1)

        def check(text: str) -> None:
            if min_tokens := self.tokenizer.min_token_count(text, self.context):
                self.check_context(len(chat.before) + min_tokens, params.max_tokens, context, at_least=True)

        ids = self.prompt_encoder.token_ids(chat, check)
        invalid_id = next((t for t in params.logit_bias if t >= self.config.vocab_size), None)
        if invalid_id is not None:
            raise UsageError(
                f"logit_bias names the token {invalid_id}", f"token ids end at {self.config.vocab_size - 1}"
            )
        request = Request(
            prompt_ids=tuple(ids),
            params=params,
            arrival=arrival,
            is_chat=chat.is_chat,
            tools=tuple(chat.tools or ()),
            priority=require_int("priority", chat.priority),
            context=context,
            tool_use=chat.tool_use,
            inspect=chat.inspect,
            keep=chat.keep,
            cache_scope=CACHE_SCOPE.get(),
            client=CLIENT.get(),
            slot=chat.slot,
            prefix_names=PREFIX_NAMES.get(),
        )
        self.max_len(request)
        if constraint := tool_constraint or params.grammar:
            self.chat_format.grammars.compile(constraint, self.prompt_tail(request))
        return request

    def encode(self, chat: ChatRequest) -> list[int]:
        """Return the token ids of the prompt, even if they exceed the context."""
        return self.prompt_encoder.encode(chat)

    def template_arguments(
        self, given: Mapping[str, Any], *, think: bool | None = None, with_tools: bool = False
    ) -> dict[str, Any]:
        """Return the arguments for the chat template, with `think` translated to the template's own variable.

        Raises UsageError for arguments or switches that the template does not support.
        """
        if self.chat_format.template is not None:
            return self.chat_format.template.template_arguments(given, think=think, with_tools=with_tools)
        if given or think is not None:
            raise UsageError(f"{self.name} has no chat template to give arguments to", "leave them out")
        return {}

    def submit(
        self, request: Request, deliver: Deliver | None = None, wake: Callable[[], object] | None = None
    ) -> Stream:
        """Start answering a prepared request.

        deliver: called with the events of each step, the last of which may be the error that ends the answer; the
        returned stream then serves only to close it. wake: called after that, once for all answers of the step
        that have the same. Both are called on the engine's thread, which they must not block. Raises Busy if too
        many requests wait, ContextOverflow if the request no longer fits after `resize`, LocalLLMError if the
        model is closed.
        """
        self.worker.check_queue()  # before any other work
        params, limit = request.params, self.max_len(request)
        constraint, grammars = request_tool_constraint(request) or params.grammar, self.chat_format.grammars
        load_s, self.parts.pending_load_s = self.parts.pending_load_s, 0.0
        sequence = Sequence(
            request,
            seed=secrets.randbits(SEED_BITS) if params.seed is None else params.seed,
            eos_ids=self.chat_format.eos_ids,
            max_len=limit,
            stopwatch=Stopwatch(request.arrival, load_s),
            constraint=constraint
            and grammars.follow(constraint, self.prompt_tail(request), limit - len(request.prompt_ids)),
        )
        parser, shown_ids = self.output_parser(request)
        return self.worker.submit(sequence, self, parser, shown_ids, deliver, wake)

    def max_len(self, request: Request) -> int:
        """Return the maximum tokens of prompt and answer. Raises ContextOverflow like `check_context`."""
        prompt, answer = len(request.prompt_ids), request.params.max_tokens
        context = self.check_context(prompt, answer, request.context)
        return context if answer is None else min(context, prompt + answer)

    def check_context(
        self, prompt_len: int, max_tokens: int | None, context: int | None, *, at_least: bool = False
    ) -> int:
        """Return the context, limited by the model's. Raises ContextOverflow if the prompt leaves no space for an
        answer. at_least: `prompt_len` is a lower bound."""
        context = self.context if context is None else min(self.context, context)
        required = prompt_len + (0 if max_tokens == 0 else 1)
        if required > context:
            max_context = self.config.max_context
            suggested = "more" if at_least else min(max_context, prompt_len + (max_tokens or 256))
            remedy = (
                f"give --context {suggested} or a shorter prompt"
                if required <= max_context
                else f"this model supports {max_context}: give a shorter prompt"
            )
            raise ContextOverflow(prompt_len, context, remedy, at_least=at_least)
        return context

    def output_parser(self, request: Request) -> tuple[OutputParser, frozenset[int]]:
        """Return the parser of a request's output, and the special tokens that must be decoded for it."""
        if not request.is_chat:
            return PlainParser(), frozenset()
        output = self.chat_format.output
        output = output.for_required_call() if request.tool_use.must_call else output
        special, markup = self.tokenizer.special_ids, output.markup(with_tools=bool(request.tools))
        shown = frozenset(token for token, literal in special.items() if literal in markup)
        return output.make_parser(self.prompt_tail(request) or "", request.tools), shown

    def prompt_tail(self, request: Request) -> str | None:
        """Return the end of a chat's prompt, which may already begin the reasoning."""
        tail = request.prompt_ids[-PROMPT_TAIL_TOKENS:]
        return self.tokenizer.decode(tail, skip_special=False) if request.is_chat else None

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        tools: ListLike[Message] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        tool_use: ToolUse | None = None,
        *,
        inspect: int | None = None,
    ) -> Stream:
        """Answer text, token ids or messages as a stream of events. The arguments are those of ChatRequest."""
        return self.answer(
            ChatRequest(
                prompt, params, tools, template_arguments or {}, tool_use=tool_use or ToolUse(), inspect=inspect
            )
        )

    def answer(self, chat: ChatRequest) -> Stream:
        """Prepare and submit a request."""
        return self.submit(self.prepare(chat))

    def generate(self, prompt: str | ListLike[int], params: SamplingParams | None = None) -> Completion:
        """Continue text or token ids, without a chat template."""
        request = self.prepare(ChatRequest(prompt, params))
        return collect_completion(request, self.submit(request))

    def chat(
        self,
        messages: ListLike[Message],
        params: SamplingParams | None = None,
        tools: ListLike[Message] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        tool_use: ToolUse | None = None,
    ) -> Completion:
        """Answer a conversation through the model's chat template.

        messages: with `role` and `content`, and for an assistant optionally `reasoning_content` and `tool_calls`;
        tools: functions that the model may call, in OpenAI's format; template_arguments: as in the method of that
        name; tool_use: which of the tools the model must call.
        """
        if isinstance(messages, str):
            raise UsageError("chat takes a list of messages", "generate and stream continue a text")
        request = self.prepare(
            ChatRequest(messages, params, tools, template_arguments or {}, tool_use=tool_use or ToolUse())
        )
        return collect_completion(request, self.submit(request))

    def logits(self, token_ids: ListLike[int]) -> Tensor:
        """Return the [tokens, vocab] float32 logits of a forward pass. Raises the errors of `prepare`, and
        DoesNotFit if other sequences occupy the cache."""
        ids = list(self.prepare(ChatRequest(token_ids, SamplingParams(max_tokens=0))).prompt_ids)
        engine = self.worker.engine
        try:
            return self.worker.call(lambda: engine.logits(ids)).clone()
        except OutOfBlocks:
            raise DoesNotFit("the cache is full of other sequences", "wait for them, or raise --context") from None

    def embed(
        self,
        inputs: EmbeddingInput | ListLike[EmbeddingInput],
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        prompt: str | None = None,
        pooling: PoolingType = "last",
        gone: Callable[[], bool] = never_gone,
    ) -> Embeddings:
        """Return embeddings with norm 1, [texts, hidden_size], of the last hidden state, as `Embedder.embed`.

        pooling: `last` token or `mean` of all. Answers continue meanwhile, and the texts are not cached.
        Embeddings of a model that was not trained for it distinguish texts less well than those of an embedding
        model.
        """
        c = self.config
        return embed_inputs(
            self.worker,
            InputEncoder(self.tokenizer, c.vocab_size, self.context, c.max_context),
            c.hidden_size,
            inputs,
            dimensions=dimensions,
            truncate=truncate,
            prompt=prompt,
            pooling=pooling,
            gone=gone,
        )

    def provenance(self) -> tuple[receipt.Model, receipt.Setup]:
        """Return the model's identity and its setup, for receipts. Reads megabytes of its files."""
        engine = self.worker.engine
        setup = provenance.setup(
            engine.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            activation_bits=self.activation_bits,
            threads=self.worker.threads,
            context=self.context,
            token_budget=engine.token_budget,
            block_size=engine.block_size,
            draft=self.origin.draft,
            draft_model=self.origin.draft_model,
            deterministic=self.deterministic,
            position=self.parts.caches.position,
        )
        return provenance.model(self.name, self.path, self.origin.source, self.origin.quant), setup

    def kernels(self) -> receipt.Kernels:
        """Return the kernels that this process has used so far, by operation."""
        return used_kernels()

    def record(self, metrics: Metrics, home: Path, note: Callable[[str], None]) -> None:
        """Store the speed of an answer that ran alone, for the predictions of `plan`. note: called with the reason
        if it cannot be stored."""
        if self.parts.caches.ranks > 1:  # predictions are those of one process
            return
        if run := expected.measured_run(
            self.origin.setup, self.config, self.memory.weights, self.kv_dtype, metrics
        ):
            runs.record(home, run, note)

    @property
    def step_setup(self) -> StepSetup:
        """The properties that the durations of its steps depend on."""
        setup = self.origin.setup
        return StepSetup(setup.model, setup.device, setup.dtype, self.kv_dtype, setup.threads)

    def record_steps(self, home: Path, note: Callable[[str], None], name: str | None = None) -> None:
        """Store the durations of steps since the last call, for the predictions of `simulate`. note: as in
        `record`; name: of the model, if it was not loaded by it."""
        if self.parts.caches.ranks > 1:
            return
        times = self.worker.step_times  # which the engine's thread appends to meanwhile
        steps = [times.popleft() for _ in range(len(times))]
        waits = self.worker.entry_waits
        entry_waits = [waits.popleft() for _ in range(len(waits))]
        if steps:
            setup = replace(self.step_setup, model=name) if name else self.step_setup
            rows = [(*shape, seconds) for shape, seconds in steps]
            step_times.record(home, setup, rows, note, entry_waits)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def close_all(worker: Worker, template: ChatTemplate, draft_model: DraftModel | None) -> None:
    """Close the parts of a model that have threads, processes or device memory."""
    worker.close()
    if draft_model:
        draft_model.free()
    template.close()


def collect_completion(request: Request, events: Iterable[GenerationEvent]) -> Completion:
    """Join the events of an answer."""
    answer = list(events)
    last = answer[-1]
    assert last.finish_reason and last.metrics and last.seed is not None
    return Completion(
        text="".join(e.text for e in answer if e.kind is EventType.CONTENT),
        token_ids=tuple(t for e in answer for t in e.token_ids),
        finish_reason=last.finish_reason,
        metrics=last.metrics,
        seed=last.seed,
        prompt_ids=request.prompt_ids,
        logprobs=tuple(p for e in answer for p in e.logprobs),
        prompt_logprobs=tuple(p for e in answer for p in e.prompt_logprobs),
        reasoning="".join(e.text for e in answer if e.kind is EventType.REASONING),
        tool_calls=tuple(e.tool_call for e in answer if e.tool_call),
        stop_string=last.stop_string,
    )
