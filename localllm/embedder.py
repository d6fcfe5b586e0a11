"""A loaded encoder: texts in, vectors out, many at once.

embedder = localllm.load_embedder("nomic-ai/nomic-embed-text-v1.5")
print(embedder.embed(["search_query: who wrote it?"]).vectors)
"""

import contextvars
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from localllm.arch.config import ModelConfig
from localllm.arch.describe import describe
from localllm.arch.pooling import Pooling, dimension, pooling
from localllm.checkpoint.header import read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.checkpoint.tokenizer import read_tokenizer
from localllm.device import dtype_name, free_bytes, on, release, resolve_device
from localllm.embedding import (
    Embeddings,
    Input,
    Reads,
    batches,
    check_dimensions,
    check_wanted,
    in_order,
    never,
    prefix_of,
    shortened,
)
from localllm.errors import LocalLLMError, UnsupportedModel
from localllm.hub.resolve import ModelRef, resolve, to_pull
from localllm.metrics import EngineStats, Phases
from localllm.plan.fit import Space, Wish, check
from localllm.plan.memory import TOKEN_BUDGET, Memory, allocate_least
from localllm.plan.shortage import shortage
from localllm.runtime.build import keep_kernels, load_encoder
from localllm.runtime.encoder import Encoder
from localllm.runtime.faults import broken, gpu_failed, out_of_memory, telling
from localllm.runtime.kernels.threads import threads_for
from localllm.runtime.pooling import Pool
from localllm.runtime.texts import Texts
from localllm.settings import Settings
from localllm.text.tokenizer import Tokenizer


class Embedder:
    """A model that is ready to give vectors. Safe to use from several threads, which take turns batch by batch;
    `with` closes it."""

    def __init__(
        self,
        ref: ModelRef,
        config: ModelConfig,
        how: Pooling,
        tokenizer: Tokenizer,
        model: Encoder,
        pool: Pool,
        memory: Memory,
        device: torch.device,
        threads: int,
        load_s: float,
        short: Callable[[], LocalLLMError],
    ):
        """threads: of the CPU, of an operation; short: what to tell where a batch finds no memory."""
        self.name, self.path = ref.name, ref.path
        self.config = config
        self.pooling = how
        self.tokenizer = tokenizer
        self.model: Encoder | None = model  # None once it is closed
        self.pool = pool
        self.memory = memory
        self.context = memory.context  # tokens
        self.dimension = dimension(config, how)
        self.weight_bytes = memory.weights.total
        self.place = device
        self.device = str(device)
        self.dtype = dtype_name(model.dtype)
        self.kv_dtype = self.dtype  # in which keys and values live while a batch is computed
        self.load_s = load_s
        self.asked = self.done = self.prompt_tokens = 0  # batches, and tokens of those that are computed
        self.short = short
        self.counting = threading.Lock()
        self.thread = ThreadPoolExecutor(1, "localllm-embedder", set_threads, (threads,))
        self.shut = weakref.finalize(self, self.thread.shutdown, cancel_futures=True)

    def __repr__(self) -> str:
        return f"<Embedder {self.name} on {self.device} in {self.dtype}, {self.dimension} dimensions>"

    def embed(
        self,
        inputs: Input | Sequence[Input],
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        prompt: str | None = None,
        gone: Callable[[], bool] = never,
    ) -> Embeddings:
        """A vector of length one for each text, or for each list of token ids, which are taken as they are.

        dimensions: the first so many, of length one again, for models trained so (Matryoshka); truncate: cut what
        is longer than the context, and say so in `left_out`; prompt: a name of `pooling.prompts`, put before each
        text; gone: asked before each batch, whether nobody wants the vectors any more. Raises ContextOverflow and
        UsageError before anything is computed.
        """
        check_dimensions(dimensions, self.dimension)
        prefix = prefix_of(self.pooling.prompts, prompt, self.pooling.default_prompt)
        reads = Reads(self.tokenizer, self.config.vocab_size, self.context, self.config.max_context)
        read = reads.token_ids(inputs, prefix, truncate=truncate)
        lengths = [len(ids) for ids in read.token_ids]
        pieces = []
        for places in batches(lengths, TOKEN_BUDGET[self.place.type]):
            check_wanted(gone)
            some = [read.token_ids[place] for place in places]
            pieces.append((places, self.call(partial(self.compute, some))))
        vectors = in_order(pieces, len(lengths))
        return Embeddings(shortened(vectors, dimensions), tuple(lengths), read.left_out)

    def resize(self, context: int) -> None:
        """Let texts be longer, as far as the model has positions for them."""
        self.context = min(max(self.context, context), self.config.max_context)

    def stats(self) -> EngineStats:
        """In the words of an engine, whose cache and output it does not have; requests are counted by batch."""
        under_way = self.asked - self.done
        running = min(under_way, 1)
        return EngineStats(
            running=running,
            waiting=under_way - running,
            most_waiting=sys.maxsize,
            context=self.context,
            blocks=0,
            block_tokens=0,
            used_blocks=0,
            cached_blocks=0,
            evicted_blocks=0,
            steps=self.done,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0,
            lookups=0,
            hits=0,
            output_tokens=0,
            draft_tokens=0,
            accepted_tokens=0,
            preemptions=0,
            cancelled=0,
            finished={},
        )

    def call(self, function: Callable[[], np.ndarray]) -> np.ndarray:
        """On its own thread. Raises LocalLLMError after `close`."""
        with self.counting:
            self.asked += 1
        try:
            return self.thread.submit(contextvars.copy_context().run, function).result()
        except LocalLLMError:
            raise
        except Exception as error:
            if self.model is None or not self.shut.alive:
                raise LocalLLMError("the model is closed", "load it again") from None
            if out_of_memory(error):
                raise self.short() from error
            if gpu_failed(error):
                raise broken(error) from error
            raise
        finally:
            with self.counting:
                self.done += 1

    def compute(self, token_ids: Sequence[Sequence[int]]) -> np.ndarray:
        """token_ids: shortest first -> [texts, dimension] float32"""
        assert self.model
        with torch.inference_mode(), on(self.place):
            texts = Texts.of(token_ids, self.place)
            vectors = self.pool.of_texts(self.model(texts), texts).cpu().numpy()
        self.prompt_tokens += len(texts.token_ids)
        if not np.isfinite(vectors).all():
            raise LocalLLMError("the model computed NaN or infinity", "try --dtype float32")
        return vectors

    def close(self) -> None:
        """Free its memory. What is computed ends first; what waits ends with an error."""
        self.shut()
        self.model = None
        release(self.place)

    def __enter__(self) -> "Embedder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def set_threads(threads: int) -> None:
    """Of the calling thread."""
    torch.get_num_threads()  # else its first operation would take over what another thread has set
    torch.set_num_threads(threads)


def load_embedder(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    context: int | None = None,
    settings: Settings | None = None,
    force: bool = False,
) -> Embedder:
    """Load an encoder, or a decoder that is meant for vectors, by name, repository, folder or GGUF file; one of
    the Hub that is not here is pulled first.

    context: the longest text, in tokens (None: what it was trained for); the rest as in `load`. Raises
    UnsupportedModel for a model that is for chats: `load` gives an LLM, which can embed, too.
    """
    settings = settings or Settings.from_environment()
    place = resolve_device(settings.device if device == "auto" else device)
    wish = Wish(context, dtype=settings.dtype if dtype == "auto" else dtype)
    if repo := to_pull(str(model)):
        from localllm.fetch import Logged, fetch  # with the Hub's library 0.1 s that others need not wait for

        fetch(repo, Logged(), lambda: Space(place.type, free_bytes(place)), wish, force=force)
    start = time.perf_counter()
    ref = resolve(str(model))
    header = read_header(ref.path)
    config = describe(header.config)
    if config.encoder is None:
        raise UnsupportedModel(
            f"{ref.name!r} gives tokens, not vectors", "localllm.load gives an LLM that can embed"
        )
    check_quantization(header.config)
    how = pooling(header.config, config)
    tokenizer = read_tokenizer(header)
    fit = check(header, Space(place.type, free_bytes(place)), wish, name=ref.name, force=force)
    memory = fit.memory or allocate_least(fit.needs, context)
    if place.type != "cpu":
        keep_kernels(settings.cache)
    kind: torch.dtype = getattr(torch, fit.dtype)
    short = partial(shortage, memory, str(place), fit.kv_dtype, header.quantization is not None)
    with torch.inference_mode(), on(place), telling(short):
        encoder, pool = load_encoder(header, config, how, place, kind, memory.context, Phases())
    threads = threads_for(memory.weights.total, settings.threads)
    load_s = time.perf_counter() - start
    return Embedder(ref, config, how, tokenizer, encoder, pool, memory, place, threads, load_s, short)
