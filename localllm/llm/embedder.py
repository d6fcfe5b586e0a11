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
from localllm.arch.describe import parse_config
from localllm.arch.pooling import Pooling, embedding_size, parse_pooling
from localllm.checkpoint.header import read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.checkpoint.tokenizer import read_tokenizer
from localllm.errors import LocalLLMError, UnsupportedModel
from localllm.hardware.device import device_context, dtype_name, free_bytes, release_cached, resolve_device
from localllm.hub.resolve import ModelRef
from localllm.llm.embedding_inputs import (
    EmbeddingInput,
    Embeddings,
    InputEncoder,
    batch_by_length,
    check_dimensions,
    never_gone,
    prompt_prefix,
    raise_if_gone,
    restore_order,
    truncate_dimensions,
)
from localllm.llm.find import resolve_or_fetch
from localllm.metrics import EngineStats, PhaseTimer
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit, shortage_error
from localllm.plan.memory import TOKEN_BUDGET, MemoryPlan, allocate_minimum
from localllm.runtime.batch import EncoderBatch
from localllm.runtime.device_errors import (
    gpu_failure_error,
    is_gpu_failure,
    is_out_of_memory,
    translate_device_errors,
)
from localllm.runtime.kernels.threads import threads_for
from localllm.runtime.model import Encoder
from localllm.runtime.model_loader import load_encoder, set_triton_cache_dir
from localllm.runtime.pooling import Pooler
from localllm.settings import Settings
from localllm.text.tokenizer import Tokenizer


class Embedder:
    """A model that is ready to give vectors. Safe to use from several threads, which take turns batch by batch;
    `with` closes it."""

    def __init__(
        self,
        ref: ModelRef,
        config: ModelConfig,
        pooling: Pooling,
        tokenizer: Tokenizer,
        model: Encoder,
        pooler: Pooler,
        memory: MemoryPlan,
        device: torch.device,
        threads: int,
        load_s: float,
        shortage: Callable[[], LocalLLMError],
    ):
        """threads: of the CPU, of an operation; shortage: what to tell where a batch finds no memory."""
        self.name, self.path = ref.name, ref.path
        self.config = config
        self.pooling = pooling
        self.tokenizer = tokenizer
        self.model: Encoder | None = model  # None once it is closed
        self.pooler = pooler
        self.memory = memory
        self.context = memory.context  # tokens
        self.dimension = embedding_size(config, pooling)
        self.weight_bytes = memory.weights.total
        self.torch_device = device
        self.device = str(device)
        self.dtype = dtype_name(model.dtype)
        self.kv_dtype = self.dtype  # in which keys and values live while a batch is computed
        self.load_s = load_s
        self.submitted_batches = self.finished_batches = self.prompt_tokens = (
            0  # batches, and tokens of those that are computed
        )
        self.shortage = shortage
        self.count_lock = threading.Lock()
        self.executor = ThreadPoolExecutor(1, "localllm-embedder", set_threads, (threads,))
        self.shut_down = weakref.finalize(self, self.executor.shutdown, cancel_futures=True)

    def __repr__(self) -> str:
        return f"<Embedder {self.name} on {self.device} in {self.dtype}, {self.dimension} dimensions>"

    def embed(
        self,
        inputs: EmbeddingInput | Sequence[EmbeddingInput],
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        prompt: str | None = None,
        gone: Callable[[], bool] = never_gone,
    ) -> Embeddings:
        """A vector of length one for each text, or for each list of token ids, which are taken as they are.

        dimensions: the first so many, of length one again, for models trained so (Matryoshka); truncate: cut what
        is longer than the context, and say so in `left_out`; prompt: a name of `pooling.prompts`, put before each
        text; gone: asked before each batch, whether nobody wants the vectors any more. Raises ContextOverflow and
        UsageError before anything is computed.
        """
        check_dimensions(dimensions, self.dimension)
        prefix = prompt_prefix(self.pooling.prompts, prompt, self.pooling.default_prompt)
        reads = InputEncoder(self.tokenizer, self.config.vocab_size, self.context, self.config.max_context)
        read = reads.encode(inputs, prefix, truncate=truncate)
        lengths = [len(ids) for ids in read.token_ids]
        pieces = []
        for places in batch_by_length(lengths, TOKEN_BUDGET[self.torch_device.type]):
            raise_if_gone(gone)
            some = [read.token_ids[place] for place in places]
            pieces.append((places, self.run_on_thread(partial(self.embed_batch, some))))
        vectors = restore_order(pieces, len(lengths))
        return Embeddings(truncate_dimensions(vectors, dimensions), tuple(lengths), read.left_out)

    def resize(self, context: int) -> None:
        """Let texts be longer, as far as the model has positions for them."""
        self.context = min(max(self.context, context), self.config.max_context)

    def stats(self) -> EngineStats:
        """In the words of an engine, whose cache and output it does not have; requests are counted by batch."""
        under_way = self.submitted_batches - self.finished_batches
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
            steps=self.finished_batches,
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

    def run_on_thread(self, function: Callable[[], np.ndarray]) -> np.ndarray:
        """On its own thread. Raises LocalLLMError after `close`."""
        with self.count_lock:
            self.submitted_batches += 1
        try:
            return self.executor.submit(contextvars.copy_context().run, function).result()
        except LocalLLMError:
            raise
        except Exception as error:
            if self.model is None or not self.shut_down.alive:
                raise LocalLLMError("the model is closed", "load it again") from None
            if is_out_of_memory(error):
                raise self.shortage() from error
            if is_gpu_failure(error):
                raise gpu_failure_error(error) from error
            raise
        finally:
            with self.count_lock:
                self.finished_batches += 1

    def embed_batch(self, token_ids: Sequence[Sequence[int]]) -> np.ndarray:
        """token_ids: shortest first -> [texts, dimension] float32"""
        assert self.model
        with torch.inference_mode(), device_context(self.torch_device):
            texts = EncoderBatch.from_token_ids(token_ids, self.torch_device)
            vectors = self.pooler.pool_batch(self.model(texts), texts).cpu().numpy()
        self.prompt_tokens += len(texts.token_ids)
        if not np.isfinite(vectors).all():
            raise LocalLLMError("the model computed NaN or infinity", "try --dtype float32")
        return vectors

    def close(self) -> None:
        """Free its memory. What is computed ends first; what waits ends with an error."""
        self.shut_down()
        self.model = None
        release_cached(self.torch_device)

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
    model: str | Path | ModelRef,
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
    wish = LoadOptions(context, dtype=settings.dtype if dtype == "auto" else dtype)
    ref = model if isinstance(model, ModelRef) else resolve_or_fetch(str(model), place, wish, force=force)
    start = time.perf_counter()
    header = read_header(ref.path)
    config = parse_config(header.config)
    if config.encoder is None:
        raise UnsupportedModel(
            f"{ref.name!r} gives tokens, not vectors", "localllm.load gives an LLM that can embed"
        )
    check_quantization(header.config)
    how = parse_pooling(header.config, config)
    tokenizer = read_tokenizer(header)
    fit = check_fit(header, FreeMemory(place.type, free_bytes(place)), wish, name=ref.name, force=force)
    memory = fit.memory or allocate_minimum(fit.needs, context)
    if place.type != "cpu":
        set_triton_cache_dir(settings.cache)
    kind: torch.dtype = getattr(torch, fit.dtype)
    short = partial(shortage_error, memory, str(place), fit.kv_dtype, header.quantization is not None)
    with torch.inference_mode(), device_context(place), translate_device_errors(short):
        encoder, pool = load_encoder(header, config, how, place, kind, memory.context, PhaseTimer())
    threads = threads_for(memory.weights.total, settings.threads)
    load_s = time.perf_counter() - start
    return Embedder(ref, config, how, tokenizer, encoder, pool, memory, place, threads, load_s, short)
