"""Runs one step of a model on its device: copies of blocks and rows, the forward pass, logits, the draw."""

from collections.abc import Iterable

import torch
from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.cache import KVCache, LatentCache, RecurrentCache, make_caches
from localllm.runtime.model import Decoder
from localllm.runtime.sampler import sample
from localllm.runtime.sent import sent
from localllm.runtime.step import Drawn, Readback, Step


class Runner:
    """Eager execution. `asynchronous`: does the device work on while the host goes on?

    `rows`: of recurrent states, for models that have recurrent layers; kv_dtype: as `make_caches`; max_running:
    most sequences in a step.
    """

    def __init__(
        self,
        model: Decoder,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        rows: int = 0,
        kv_dtype: torch.dtype | None = None,
        max_running: int = 1,
    ):
        self.model = model
        self.device = device
        self.asynchronous = device.type != "cpu"
        mixers = [layer.mixer for layer in model.config.layers]
        self.caches = make_caches(mixers, blocks, block_size, rows, dtype, device, kv_dtype)
        each = dict.fromkeys(self.caches)  # layers that share keys and values share a cache
        self.paged = [cache for cache in each if isinstance(cache, KVCache | LatentCache)]
        self.recurrent = [cache for cache in each if isinstance(cache, RecurrentCache)]
        self.newest = torch.zeros(max_running, dtype=torch.int64, device=device)  # [rows], tokens drawn last

    def run(self, step: Step) -> Drawn:
        batch = Batch.of(step.states, step.token_ids, step.logit_index, self.device, step.copies)
        if step.unread:
            index, rows = (sent(each, torch.int64, self.device) for each in zip(*step.unread, strict=True))
            batch.token_ids[index] = self.newest[rows]
        logits, others = self.launch(batch).tensor_split([len(step.draws)])
        kept = logits.clone() if step.keeps_logits else None  # the draw changes its logits
        choices = sample(logits, step.draws)
        if step.rows:
            self.newest[sent(step.rows, torch.int64, self.device)] = choices
        return Drawn(Readback(choices), kept, others)

    def launch(self, batch: Batch) -> Tensor:
        """Logits [N, vocab] float32 of the tokens in `batch.logit_index`."""
        for source, target in batch.copies.blocks:
            for cache in self.paged:
                cache.copy_block(source, target)
        self.copy_rows(batch.copies.rows)
        logits = self.model(batch, self.caches).float()
        self.copy_rows(batch.saves)
        return logits

    def free(self) -> None:
        """Let go of the weights, the files that they are mapped from, and the caches: nothing can run after it."""
        del self.model, self.caches, self.paged, self.recurrent

    def copy_rows(self, copies: Iterable[tuple[int, int]]) -> None:
        for source, target in copies:
            for cache in self.recurrent:
                cache.copy_row(source, target)
