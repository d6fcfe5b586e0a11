"""Embedder: a loaded encoder that computes embeddings in batches.

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

import numpy as np
import torch

from localllm.arch.config import ModelConfig
from localllm.arch.describe import parse_config
from localllm.arch.pooling import Pooling, embedding_size, parse_pooling
from localllm.checkpoint.header import read_header
from localllm.checkpoint.layouts import check_quantization
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
from localllm.runtime.kernels.threads import threads_for, use_threads
from localllm.runtime.model import Encoder
from localllm.runtime.model_loader import compile_encoder_kernels, load_encoder, set_triton_cache_dir
from localllm.runtime.pooling import Pooler
from localllm.settings import Settings
from localllm.text.tokenizer import Tokenizer


class Embedder:
    """A loaded embedding model. Safe to use from several threads, whose batches take turns; `with` closes it."""

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
        """threads: CPU threads per operation; shortage: returns the error for a batch without enough memory."""
        self.name, self.path = ref.name, ref.path
        self.config = config
        self.pooling = pooling
        self.tokenizer = tokenizer
        self.model: Encoder | None = model  # None after `close`
        self.pooler = pooler
        self.memory = memory
        self.context = memory.context  # tokens
        self.dimension = embedding_size(config, pooling)
        self.weight_bytes = memory.weights.total
        self.torch_device = device
        self.device = str(device)
        self.dtype = dtype_name(model.dtype)
        self.kv_dtype = self.dtype  # of keys and values while a batch is computed
        self.load_s = load_s
        self.submitted_batches = self.finished_batches = 0
        self.prompt_tokens = 0  # of finished batches
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
        """Return an embedding with norm 1 for each text or list of token ids.

        dimensions: return only the first ones, normalized again, for models trained for it (Matryoshka).
        truncate: truncate inputs longer than the context, and report it in `left_out`.
        prompt: a name in `pooling.prompts`, of a prefix for each text.
        gone: called before each batch; True aborts, because the client has disconnected.
        Raises ContextOverflow and UsageError before anything is computed.
        """
        check_dimensions(dimensions, self.dimension)
        prefix = prompt_prefix(self.pooling.prompts, prompt, self.pooling.default_prompt)
        encoder = InputEncoder(self.tokenizer, self.config.vocab_size, self.context, self.config.max_context)
        encoded = encoder.encode(inputs, prefix, truncate=truncate)
        lengths = [len(ids) for ids in encoded.token_ids]
        batches = []
        for indices in batch_by_length(lengths, TOKEN_BUDGET[self.torch_device.type]):
            raise_if_gone(gone)
            texts = [encoded.token_ids[index] for index in indices]
            batches.append((indices, self.run_on_thread(partial(self.embed_batch, texts))))
        vectors = restore_order(batches, len(lengths))
        return Embeddings(truncate_dimensions(vectors, dimensions), tuple(lengths), encoded.left_out)

    def resize(self, context: int) -> None:
        """Extend the context, at most to the model's maximum."""
        self.context = min(max(self.context, context), self.config.max_context)

    def stats(self) -> EngineStats:
        """Return an engine's statistics, with batches as requests, and 0 for cache and output."""
        unfinished = self.submitted_batches - self.finished_batches
        running = min(unfinished, 1)
        return EngineStats(
            running=running,
            waiting=unfinished - running,
            most_waiting=sys.maxsize,
            context=self.context,
            steps=self.finished_batches,
            prompt_tokens=self.prompt_tokens,
        )

    def run_on_thread(self, function: Callable[[], np.ndarray]) -> np.ndarray:
        """Run a function on the embedder's thread. Raises LocalLLMError after `close`."""
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
        """Return [texts, dimension] float32. token_ids: of each text, shortest first."""
        assert self.model
        with torch.inference_mode(), device_context(self.torch_device):
            texts = EncoderBatch.from_token_ids(token_ids, self.torch_device)
            vectors = self.pooler.pool_batch(self.model(texts), texts).cpu().numpy()
        self.prompt_tokens += len(texts.token_ids)
        if not np.isfinite(vectors).all():
            raise LocalLLMError("the model computed NaN or infinity", "try --dtype float32")
        return vectors

    def close(self) -> None:
        """Free the model's memory after the current batch; waiting ones fail with an error."""
        self.shut_down()
        self.model = None
        release_cached(self.torch_device)

    def __enter__(self) -> "Embedder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def set_threads(threads: int) -> None:
    """Set the number of CPU threads per operation for the calling thread."""
    torch.get_num_threads()  # otherwise the first operation would adopt the number that another thread has set
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
    """Load an embedding model by name, repository, folder or GGUF file; it is pulled from the Hub first if it is
    missing.

    context: maximum tokens of a text (None: as in training). Other arguments and errors are those of `load`.
    Raises UnsupportedModel for a model that generates tokens: `load` returns an LLM, which can embed, too.
    """
    settings = settings or Settings.from_environment()
    torch_device = resolve_device(settings.device if device == "auto" else device)
    options = LoadOptions(context, dtype=settings.dtype if dtype == "auto" else dtype)
    if not isinstance(model, ModelRef):
        model = resolve_or_fetch(str(model), torch_device, options, force=force)
    start = time.perf_counter()
    header = read_header(model.path)
    config = parse_config(header.config)
    if config.encoder is None:
        raise UnsupportedModel(
            f"{model.name!r} is not an embedding model", "localllm.load returns an LLM, which can embed, too"
        )
    check_quantization(header.config)
    pooling = parse_pooling(header.config, config)
    tokenizer = Tokenizer.from_checkpoint(header.path, header.gguf)
    free_memory = FreeMemory(torch_device.type, free_bytes(torch_device))
    fit = check_fit(header, free_memory, options, name=model.name, force=force)
    memory = fit.memory or allocate_minimum(fit.needs, context)
    if torch_device.type != "cpu":
        set_triton_cache_dir(settings.cache)
    torch_dtype: torch.dtype = getattr(torch, fit.dtype)
    shortage = partial(shortage_error, memory, str(torch_device), fit.kv_dtype, header.quantization is not None)
    threads = threads_for(memory.weights.total, settings.threads)
    with (
        torch.inference_mode(),
        device_context(torch_device),
        use_threads(threads),
        translate_device_errors(shortage),
    ):
        encoder, pooler = load_encoder(
            header, config, pooling, torch_device, torch_dtype, memory.context, PhaseTimer()
        )
        if torch_device.type == "cpu":
            compile_encoder_kernels(encoder, pooler, threads)
    return Embedder(
        model,
        config,
        pooling,
        tokenizer,
        encoder,
        pooler,
        memory,
        torch_device,
        threads,
        time.perf_counter() - start,
        shortage,
    )
