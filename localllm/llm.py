"""The Python API: a loaded model and what it can be asked.

llm = localllm.load("demo")
print(llm.chat([{"role": "user", "content": "Tell me a story"}]).text)
"""

import secrets
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from localllm.arch.config import ModelConfig
from localllm.arch.cost import kv_bytes_per_token
from localllm.arch.families import describe
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.quantized import check_layout
from localllm.checkpoint.safetensors import Weights
from localllm.device import free_bytes, resolve_device, resolve_dtype
from localllm.errors import ContextOverflow, DoesNotFit, UsageError
from localllm.hub.names import resolve
from localllm.request import Completion, GenerationEvent, Request, SamplingParams
from localllm.runtime.engine import Engine
from localllm.runtime.load import Source
from localllm.runtime.model import Decoder
from localllm.runtime.runner import Runner
from localllm.runtime.state import BlockPool, OutOfBlocks
from localllm.settings import Settings
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer
from localllm.worker import Worker

BLOCK_SIZE = 16  # tokens
TOKEN_BUDGET = 512  # tokens a step; on two cores larger chunks prefill no faster and hold others up longer
MAX_RUNNING = 32  # sequences in one step
SMALL_MODEL_BYTES = 64_000_000  # a smaller model decodes faster on one thread than on two that wait for each other
CACHED_CONTEXTS = 8  # so many full contexts are kept for other sequences and later turns, memory allowing

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


def load(
    model: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    quant: str | None = None,
    context: int | None = None,
    settings: Settings | None = None,
) -> "LLM":
    """Load a model by alias, repository or folder.

    device: `auto`, `cpu`, `cuda`, `cuda:N`; dtype: `auto`, `float32`, `bfloat16`, `float16` (None: as the settings
    say, `auto` without them); context: most tokens of prompt and answer (None: as many as the model knows and
    memory holds). Raises the errors of `localllm.errors`: a model that is not found, not supported, damaged or
    does not fit is refused before its weights are read where that can be known.
    """
    start = time.perf_counter()
    settings = settings or Settings.from_environment()
    if quant is not None:
        raise UsageError(
            f"quantizing to {quant} while loading is not there yet", "load a checkpoint stored as INT8"
        )
    place = resolve_device(device or settings.device)
    ref = resolve(str(model))
    header = read_header(ref.path)
    config = describe(header.config)
    check_layout(header.config)
    kind = resolve_dtype(dtype or settings.dtype, stored_dtype(header), place)
    tokenizer = Tokenizer.from_folder(ref.path)
    template = ChatTemplate.of(tokenizer) if tokenizer.chat_templates else None
    if template:
        template.warm_up()  # its process starts while the weights are read
    free = free_bytes(place)
    need = weight_bytes(header, kind)
    if need > free:
        raise DoesNotFit(
            f"the weights of {ref.name} need {gigabytes(need)} in {name_of(kind)}, {gigabytes(free)} are free",
            "name a smaller model, or free memory",
        )
    tokens_per_block = BLOCK_SIZE * kv_bytes_per_token(config, kind.itemsize)
    context, blocks = plan_context(config, context, tokens_per_block, free - need)
    with torch.inference_mode():
        decoder = Decoder(config, Source(Weights(header), place, kind))
        runner = Runner(decoder, blocks, BLOCK_SIZE, kind, place)
    engine = Engine(runner, BlockPool(blocks, BLOCK_SIZE), TOKEN_BUDGET, MAX_RUNNING)
    threads = settings.threads or (1 if need < SMALL_MODEL_BYTES else torch.get_num_threads())
    return LLM(ref.name, header, config, tokenizer, template, engine, context, need, threads, start)


def plan_context(config: ModelConfig, asked: int | None, block_bytes: int, free: int) -> tuple[int, int]:
    """How long one sequence may be, and how many blocks the cache has; half of the free memory is left alone."""
    if asked is not None and not 0 < asked <= config.max_context:
        raise UsageError(
            f"a context of {asked} tokens is asked for", f"this model was made for 1 to {config.max_context}"
        )
    longest = -(-(asked or config.max_context) // BLOCK_SIZE)
    affordable = free // 2 // block_bytes
    if affordable < (longest if asked else 1):
        raise DoesNotFit(
            f"a context of {asked or BLOCK_SIZE} tokens needs {gigabytes(longest * block_bytes)}, "
            f"{gigabytes(free)} are free beside the weights and half of that is kept for the rest",
            f"--context {affordable * BLOCK_SIZE} fits" if affordable else "free memory",
        )
    context = min(asked or config.max_context, affordable * BLOCK_SIZE)
    return context, min(affordable, CACHED_CONTEXTS * -(-context // BLOCK_SIZE))


def stored_dtype(header: Header) -> str:
    """The dtype of most weights."""
    sizes: dict[str, int] = {}
    for tensor in header.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.elements
    floats = {dtype: size for dtype, size in sizes.items() if dtype.startswith(("F", "BF"))}
    return max(floats, key=lambda dtype: floats[dtype], default="F32")


def weight_bytes(header: Header, dtype: torch.dtype) -> int:
    """What the weights take in memory: integers as they are stored, floats in `dtype`."""
    return sum(t.nbytes if t.dtype == "I8" else t.elements * dtype.itemsize for t in header.tensors.values())


def gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class LLM:
    """A model that is ready to answer. Safe to use from several threads; `with` closes it."""

    def __init__(
        self,
        name: str,
        header: Header,
        config: ModelConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        engine: Engine,
        context: int,
        weight_bytes: int,
        threads: int,
        started: float,
    ):
        self.name = name
        self.path = header.path
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.engine = engine
        self.context = context  # tokens
        self.weight_bytes = weight_bytes
        self.device = str(engine.runner.device)
        self.dtype = name_of(engine.runner.model.norm.dtype)
        self.default_params = SamplingParams.from_generation_config(header.generation_config)
        stops = header.generation_config.get("eos_token_id", [])
        stops = stops if isinstance(stops, list) else [stops]
        self.eos_ids = frozenset([*stops, *config.eos_ids, *tokenizer.eos_ids]) - {None}
        self.worker = Worker(engine, tokenizer, threads)
        self.load_s = time.perf_counter() - started
        self.waited_for_load_s = self.load_s  # the first request waited for it, later ones did not

    @property
    def has_chat_template(self) -> bool:
        return self.template is not None

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        tools: Sequence[Message] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Request:
        """Text as it is, token ids as they are, or messages through the chat template.

        Raises ContextOverflow where the prompt leaves no room, UsageError where it is empty or not for this model.
        """
        arrival = time.perf_counter()
        params = params or self.default_params
        ids = self.encode(prompt, tools, template_arguments)
        if not ids:
            raise UsageError("the prompt is empty", "give it at least one token")
        beyond = next((t for t in ids if not 0 <= t < self.config.vocab_size), None)
        if beyond is not None:
            raise UsageError(
                f"{beyond} is no token of this model", f"its ids are 0 to {self.config.vocab_size - 1}"
            )
        room_for_answer = 0 if params.max_tokens == 0 else 1
        if len(ids) + room_for_answer > self.context:
            longer = self.config.max_context >= len(ids) + room_for_answer
            raise ContextOverflow(
                len(ids),
                self.context,
                f"give --context {len(ids) + (params.max_tokens or 256)} or a shorter prompt"
                if longer
                else f"this model was made for {self.config.max_context}: give a shorter prompt",
            )
        return Request(tuple(ids), params, arrival)

    def encode(
        self, prompt: Prompt, tools: Sequence[Message] | None, template_arguments: Mapping[str, Any] | None
    ) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids = [part for part in prompt if isinstance(part, int)]
        messages = [part for part in prompt if isinstance(part, Mapping)]
        if len(ids) == len(prompt):
            return ids
        if len(messages) < len(prompt):
            raise UsageError("the prompt is neither text nor token ids nor messages", "give one of the three")
        if self.template is None:
            raise UsageError(f"{self.name} has no chat template", "give the prompt as text, or --raw")
        chat = self.template.render(messages, tools=tools, arguments=template_arguments)
        return self.tokenizer.encode_chat(chat)

    def submit(self, request: Request) -> Generator[GenerationEvent, None, None]:
        """The answer to a prepared request, piece by piece; closing the iterator cancels it."""
        params, prompt = request.params, len(request.prompt_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        limit = self.context if params.max_tokens is None else min(self.context, prompt + params.max_tokens)
        load_s, self.waited_for_load_s = self.waited_for_load_s, 0.0
        return self.worker.stream(request, seed, self.eos_ids, limit, load_s)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        tools: Sequence[Message] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Generator[GenerationEvent, None, None]:
        """`prepare` and `submit`."""
        return self.submit(self.prepare(prompt, params, tools, template_arguments))

    def generate(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Completion:
        """Continue text or token ids, without a chat template."""
        request = self.prepare(prompt, params)
        return collect(request, self.submit(request))

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        tools: Sequence[Message] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Answer a conversation through the model's chat template."""
        request = self.prepare(messages, params, tools, template_arguments)
        return collect(request, self.submit(request))

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[T, vocab] float32 logits of one forward pass over the ids. Raises as `prepare` does."""
        request = self.prepare(token_ids, SamplingParams(max_tokens=0))
        try:
            return self.worker.call(lambda: self.engine.logits(list(request.prompt_ids))).clone()
        except OutOfBlocks:
            raise DoesNotFit("the cache is full of other sequences", "wait for them, or raise --context") from None

    def close(self) -> None:
        self.worker.close()
        if self.template:
            self.template.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def collect(request: Request, events: Iterable[GenerationEvent]) -> Completion:
    """A whole answer from its pieces."""
    pieces = list(events)
    last = pieces[-1]
    assert last.finish_reason and last.metrics and last.seed is not None
    return Completion(
        text="".join(e.text for e in pieces),
        token_ids=tuple(t for e in pieces for t in e.token_ids),
        finish_reason=last.finish_reason,
        metrics=last.metrics,
        seed=last.seed,
        prompt_ids=request.prompt_ids,
        logprobs=tuple(p for e in pieces for p in e.logprobs),
        prompt_logprobs=tuple(p for e in pieces for p in e.prompt_logprobs),
    )
