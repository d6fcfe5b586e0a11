"""The Python API: a loaded model and what it can be asked.

llm = localllm.load("demo")
print(llm.chat([{"role": "user", "content": "Tell me a story"}]).text)
"""

import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from localllm.arch.config import ModelConfig
from localllm.errors import ContextOverflow, DoesNotFit, UsageError
from localllm.hardware.device import dtype_name
from localllm.hardware.measure import Rates, can_measure, device_rates, stored_rates
from localllm.hub.resolve import ModelRef
from localllm.llm.cache_allocation import CacheAllocation
from localllm.llm.decoder_embeddings import PoolingType, embed_inputs
from localllm.llm.embedding_inputs import EmbeddingInput, Embeddings, never_gone
from localllm.llm.embedding_inputs import InputEncoder as TextReads
from localllm.llm.prompt import ChatFormat, ChatFormats, PromptEncoder
from localllm.llm.worker import Deliver, Stream, Worker
from localllm.metrics import EngineStats, Metrics, Slot, StepReads, Stopwatch
from localllm.modelfile.edition import Edition
from localllm.modelfile.options import to_sampling_params
from localllm.plan import expected, runs
from localllm.plan.memory import MemoryPlan
from localllm.plan.runs import Run
from localllm.plan.speed import step_reads
from localllm.receipts import provenance, receipt
from localllm.request import (
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
from localllm.runtime.sequence import Sequence
from localllm.runtime.speculation.draft_model import DraftModel
from localllm.settings import Settings
from localllm.text.grammar.functions import build_tool_constraint, request_tool_constraint
from localllm.text.messages import Message
from localllm.text.output.formats import OutputFormat
from localllm.text.output.reader import OutputParser, PlainParser
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

PROMPT_TAIL_TOKENS = 16  # tokens


@dataclass(frozen=True)
class ModelOrigin:
    """Which model this is, and how it was loaded."""

    ref: ModelRef
    source: Path  # another than the ref's where `quant` has made something of it
    quant: str | None
    draft: str
    draft_model: str | None  # what loads it
    setup: Run  # what its answers are compared with
    load_s: float
    load_phases: Mapping[str, float]  # seconds, in their order: docs/cli.md has what each is
    read_bytes_per_s: float | None  # of the weights' files, on their way to a GPU; None: mapped
    settings: Settings


@dataclass(eq=False)
class ModelParts:
    """What `load` makes once, and every edition of the model shares."""

    origin: ModelOrigin
    config: ModelConfig
    recommended: SamplingParams  # by the model itself, whatever its edition
    tokenizer: Tokenizer
    chat_format: ChatFormat  # of the model's own template
    chat_formats: ChatFormats  # of other templates
    worker: Worker
    caches: CacheAllocation
    kv_dtype: str
    activation_bits: int  # that a CPU keeps where activations meet packed weights
    pending_load_s: float = 0.0  # the first request waited for it, later ones did not

    def __post_init__(self) -> None:
        self.pending_load_s = self.origin.load_s
        # Also when the last reference goes, and at exit: a thread inside a kernel would abort the interpreter.
        self.close = weakref.finalize(
            self, close_all, self.worker, self.chat_formats.renderer, self.caches.draft_model
        )


class LLM:
    """A model that is ready to answer. Safe to use from several threads; `with` closes it.

    Editions of one model are several of these over the same parts: closing one closes all of them.
    """

    def __init__(self, parts: ModelParts, edition: Edition | None = None):
        """edition: its messages, template and parameters precede those of a request. Raises UsageError for
        parameters that make no sense together, DamagedModel for a template that cannot be compiled."""
        self.parts = parts
        self.edition = edition
        self.origin = parts.origin
        self.name = parts.origin.ref.name
        self.path = parts.origin.ref.path
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.worker = parts.worker
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
        """End the engine and free its memory. Answers under way end with an error."""

    def __repr__(self) -> str:
        return f"<LLM {self.name} on {self.device} in {self.dtype}, context {self.context}>"

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.memory.context

    @property
    def memory(self) -> MemoryPlan:
        """As it is allocated now."""
        return self.parts.caches.memory

    @property
    def without_graphs(self) -> str:
        """As `Engine.no_graphs_reason`."""
        return self.worker.engine.no_graphs_reason

    @property
    def blocks(self) -> int:
        """Blocks of the KV cache."""
        return self.worker.engine.block_count

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
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
        known = runs.median_rates(runs.read(settings.home / "runs.jsonl", lambda text: None), self.origin.setup)
        # As a plan has it: what answers have reached can be reached.
        bandwidth = max(measured.read, known.bandwidth if known else 0) if measured else None
        token_bytes = self.memory.block_bytes / self.block_tokens
        return step_reads(self.config, self.memory.weights, self.dtype, self.kv_dtype, token_bytes, bandwidth)

    def resize(self, context: int | None) -> None:
        """Another most length of prompt and answer, None for as many tokens as fit, without reading weights again.

        Between two steps: answers under way are computed again as far as they are and go on, those that are too
        long end with ContextOverflow; the prefix cache is empty. Raises DoesNotFit and UsageError, with nothing
        changed.
        """
        worker, caches = self.worker, self.parts.caches

        def replan() -> None:
            planned = caches.plan_resize(worker.engine, context)
            worker.reconfigure(
                planned.context, lambda: caches.resize(worker.engine, planned, self.parts.recommended)
            )

        worker.call(replan)

    def stats(self) -> EngineStats:
        """What the engine is doing, and what it has done so far: from any thread, and for nothing."""
        return self.worker.stats()

    def slots(self) -> list[Slot]:
        """The requests that it has: from any thread, and for nothing."""
        return self.worker.slots()

    def prefer_throughput(self) -> None:
        """For work that nobody waits for token by token: any number of requests may wait, and steps are as large
        as is fastest for all together."""
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
        """Whether its chat template has a place for reasoning before the answer."""
        template = self.chat_format.template
        return template is not None and OutputFormat.detect(template.sources, ()).can_reason

    def edited(self, edition: Edition | None) -> "LLM":
        """The same engine with an edition's messages, template and parameters, or with none. Raises as `LLM`."""
        return LLM(self.parts, edition)

    def prepare(self, chat: ChatRequest) -> Request:
        """Turn a question into token ids and limits for the engine.

        Raises ContextOverflow where the prompt leaves no room for an answer; UsageError where it is empty or does
        not suit this model, or where a grammar, a required call or a strict function cannot be kept to.
        """
        arrival = time.perf_counter()
        params = chat.params or self.default_params
        if (chat.tools or chat.template_arguments or chat.think is not None) and not chat.is_chat:
            raise UsageError("tools and template arguments are for a chat", "give the prompt as messages")
        if not all(isinstance(tool, Mapping) for tool in chat.tools or ()):
            raise UsageError("a tool is not an object", "give each a type and a function")
        tool_constraint = build_tool_constraint(chat.tools or (), chat.tool_use, params.grammar)
        if tool_constraint and params.ignore_eos:
            raise UsageError("ignore_eos goes on where a call ends", "leave it out")
        context = chat.context
        if context is None and self.edition:
            context = self.edition.context
        context = None if context is None else require_int("context", context, minimum=1)

        def check(text: str) -> None:
            if fewest := self.tokenizer.min_token_count(text, self.context):
                self.check_context(len(chat.before) + fewest, params.max_tokens, context, at_least=True)

        ids = self.prompt_encoder.token_ids(chat, check)
        forbidden = next((t for t in params.logit_bias if t >= self.config.vocab_size), None)
        if forbidden is not None:
            raise UsageError(f"logit_bias names the token {forbidden}", f"ids end at {self.config.vocab_size - 1}")
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
        )
        self.max_len(request)
        if constraint := tool_constraint or params.grammar:
            self.chat_format.grammars.compile(constraint, self.prompt_tail(request))
        return request

    def encode(self, chat: ChatRequest) -> list[int]:
        """Token ids of the prompt as `prepare` reads it, whatever room the context has for it."""
        return self.prompt_encoder.encode(chat)

    def template_arguments(
        self, given: Mapping[str, Any], *, think: bool | None = None, with_tools: bool = False
    ) -> dict[str, Any]:
        """Arguments for the chat template, `think` translated into the template's own words.

        Raises UsageError for an argument that the template does not read, or a switch that it does not have.
        """
        if self.chat_format.template is not None:
            return self.chat_format.template.template_arguments(given, think=think, with_tools=with_tools)
        if given or think is not None:
            raise UsageError(f"{self.name} has no chat template to give arguments to", "leave them out")
        return {}

    def submit(self, request: Request, deliver: Deliver | None = None) -> Stream:
        """Begin to answer a prepared request. Raises Busy at once where too many wait, ContextOverflow where it
        has no place since `resize`, and LocalLLMError where the model was closed.

        deliver: takes each piece, or the error that ends the answer, on the engine's thread, which it must not
        hold up; the stream that is returned is then there to be closed, not read.
        """
        self.worker.check_queue()  # before anything is done for it
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
        router, shown = self.output_parser(request)
        return self.worker.submit(sequence, self, router, shown, deliver)

    def max_len(self, request: Request) -> int:
        """Of prompt and answer together. Raises ContextOverflow where the prompt leaves no room."""
        prompt, answer = len(request.prompt_ids), request.params.max_tokens
        context = self.check_context(prompt, answer, request.context)
        return context if answer is None else min(context, prompt + answer)

    def check_context(
        self, prompt_len: int, max_tokens: int | None, context: int | None, *, at_least: bool = False
    ) -> int:
        """The context, no more than the model's, where the tokens of a prompt leave room for an answer in it; else
        raises ContextOverflow. at_least: there may be more of them."""
        context = self.context if context is None else min(self.context, context)
        least = prompt_len + (0 if max_tokens == 0 else 1)
        if least > context:
            longest = self.config.max_context
            asked = "more" if at_least else min(longest, prompt_len + (max_tokens or 256))
            remedy = (
                f"give --context {asked} or a shorter prompt"
                if least <= longest
                else f"this model was made for {longest}: give a shorter prompt"
            )
            raise ContextOverflow(prompt_len, context, remedy, at_least=at_least)
        return context

    def output_parser(self, request: Request) -> tuple[OutputParser, frozenset[int]]:
        """What tells the parts of the answer apart, and the special tokens that it must see for that."""
        if not request.is_chat:
            return PlainParser(), frozenset()
        output = self.chat_format.output
        output = output.for_required_call() if request.tool_use.must_call else output
        special, markup = self.tokenizer.special_ids, output.markup(with_tools=bool(request.tools))
        shown = frozenset(token for token, literal in special.items() if literal in markup)
        return output.make_parser(self.prompt_tail(request) or "", request.tools), shown

    def prompt_tail(self, request: Request) -> str | None:
        """How the prompt of a chat ends, which tells whether it has begun the model's thoughts."""
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
        """Answer text, token ids or messages piece by piece. The arguments are those of ChatRequest."""
        return self.answer(
            ChatRequest(
                prompt, params, tools, template_arguments or {}, tool_use=tool_use or ToolUse(), inspect=inspect
            )
        )

    def answer(self, chat: ChatRequest) -> Stream:
        """`prepare` and `submit`."""
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

        A message has `role` and `content`, a text; an assistant's maybe `reasoning_content` and `tool_calls`, too.
        tools: functions that the model may call, in OpenAI's form; template_arguments: see `template_arguments`;
        tool_use: what it must call.
        """
        if isinstance(messages, str):
            raise UsageError("chat takes a list of messages", "generate and stream continue a text")
        request = self.prepare(
            ChatRequest(messages, params, tools, template_arguments or {}, tool_use=tool_use or ToolUse())
        )
        return collect_completion(request, self.submit(request))

    def logits(self, token_ids: ListLike[int]) -> Tensor:
        """[T, vocab] float32 logits of one forward pass over the ids. Raises as `prepare` does."""
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
        """Vectors of length one of what the last layer gives, as `Embedder.embed`: of the last token or the mean
        of all, [texts, hidden_size]. Answers go on meanwhile; texts that were embedded are not kept in the cache.

        A model that was not trained for it gives vectors that tell texts apart less well than an embedder's.
        """
        c = self.config
        return embed_inputs(
            self.worker,
            TextReads(self.tokenizer, c.vocab_size, self.context, c.max_context),
            c.hidden_size,
            inputs,
            dimensions=dimensions,
            truncate=truncate,
            prompt=prompt,
            pooling=pooling,
            gone=gone,
        )

    def provenance(self) -> tuple[receipt.Model, receipt.Setup]:
        """Which model this is, and what it runs on, with and in, for receipts. Reads megabytes of its files."""
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
        )
        return provenance.model(self.name, self.path, self.origin.source, self.origin.quant), setup

    def kernels(self) -> receipt.Kernels:
        """Those that this process has called so far, by operation."""
        return used_kernels()

    def record(self, metrics: Metrics, home: Path, note: Callable[[str], None]) -> None:
        """Keep what an answer that was alone reached, so that `plan` predicts the next better. `note` is told why
        it cannot be kept."""
        if run := expected.measured_run(
            self.origin.setup, self.config, self.memory.weights, self.kv_dtype, metrics
        ):
            runs.record(home, run, note)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def close_all(worker: Worker, template: ChatTemplate, draft_model: DraftModel | None) -> None:
    worker.close()
    if draft_model:
        draft_model.free()
    template.close()


def collect_completion(request: Request, events: Iterable[GenerationEvent]) -> Completion:
    """A whole answer from its pieces."""
    pieces = list(events)
    last = pieces[-1]
    assert last.finish_reason and last.metrics and last.seed is not None
    return Completion(
        text="".join(e.text for e in pieces if e.kind is EventType.CONTENT),
        token_ids=tuple(t for e in pieces for t in e.token_ids),
        finish_reason=last.finish_reason,
        metrics=last.metrics,
        seed=last.seed,
        prompt_ids=request.prompt_ids,
        logprobs=tuple(p for e in pieces for p in e.logprobs),
        prompt_logprobs=tuple(p for e in pieces for p in e.prompt_logprobs),
        reasoning="".join(e.text for e in pieces if e.kind is EventType.REASONING),
        tool_calls=tuple(e.tool_call for e in pieces if e.tool_call),
        stop_string=last.stop_string,
    )
