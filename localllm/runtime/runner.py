"""Runs one step of a model on its device: copies of blocks and rows, the forward pass, logits, the draw."""

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime.batch import Batch, CannotCapture
from localllm.runtime.cache import KVCache, LatentCache, LayerCache, RecurrentCache, make_caches
from localllm.runtime.kernels.forms import each_row_alone
from localllm.runtime.model import Decoder
from localllm.runtime.sampler import sample
from localllm.runtime.sent import sent
from localllm.runtime.state import Copies
from localllm.runtime.step import Drawn, Readback, Step

if TYPE_CHECKING:
    from localllm.runtime.drawer import Drawer
    from localllm.runtime.graphs import Graphs, Results

NO_OTHERS = torch.empty(0, 0)


class Runner:
    """`asynchronous`: does the device work on while the host goes on?

    `rows`: of recurrent states, for models that have recurrent layers; kv_dtype: as `make_caches`; max_running:
    most sequences in a step; context: most tokens of one, where steps are captured as graphs, else None;
    deterministic: what is computed of a token does not depend on the tokens beside it, on a CPU alone.
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
        context: int | None = None,
        deterministic: bool = False,
    ):
        self.model = model
        self.deterministic = deterministic
        self.device = device
        self.asynchronous = device.type != "cpu"
        mixers = [layer.mixer for layer in model.config.layers]
        spare = int(context is not None)  # one block and one row more, for what pads a step
        self.caches = make_caches(mixers, blocks, block_size, rows, dtype, device, kv_dtype, spare)
        each = dict.fromkeys(self.caches)  # layers that share keys and values share a cache
        self.paged = [cache for cache in each if isinstance(cache, KVCache | LatentCache)]
        self.recurrent = [cache for cache in each if isinstance(cache, RecurrentCache)]
        self.newest = torch.zeros(max_running, dtype=torch.int64, device=device)  # [rows], tokens drawn last
        self.drawer: Drawer | None = None
        self.graphs: Graphs | None = None
        off = "LOCALLLM_GRAPHS is off, or Triton has no kernels for this device"
        self.without_graphs = off if context is None else ""  # why not, where it is so
        if context is not None:
            # Here, as they need Triton, which is not everywhere.
            drawer, graphs = (importlib.import_module(f"localllm.runtime.{name}") for name in ("drawer", "graphs"))
            self.drawer = drawer.Drawer(max_running, context, model.config.vocab_size, device)
            self.graphs = graphs.Graphs(
                model, self.caches, self.drawer, self.newest, block_size, context, blocks, rows
            )

    def prepare(self, params: SamplingParams) -> None:
        """Capture the step that a single answer drawn by these parameters is made of."""
        if self.graphs:
            try:
                self.without_graphs = self.graphs.prepare(params)
            except CannotCapture as reason:
                self.graphs, self.without_graphs = None, str(reason)

    def counts(self, params: SamplingParams) -> bool:
        """Does the device itself count the tokens that are drawn by these parameters?"""
        return self.drawer is not None and self.drawer.counts(params)

    def widths(self, sequences: int) -> tuple[int, ...]:
        """How many tokens each of so many may bring, so that the step can be captured; () where none is. Recurrent
        layers save their state before each draft, which no graph does."""
        return self.graphs.widths(sequences) if self.graphs and not self.recurrent else ()

    def run(self, step: Step) -> Drawn:
        """What a step brings, in one launch where its kind can be captured, else kernel by kernel."""
        replay = self.captured(step) if self.graphs else None
        if replay is None:
            return self.run_eagerly(step)
        self.copy(step.copies)
        found = replay(step)
        self.copy_rows(save for state in step.states for save in state.saves_at_end)
        kept = None if found.logits is None else found.logits.clone()  # the next launch writes there
        return Drawn(Readback(found.choices), kept, NO_OTHERS)

    def captured(self, step: Step) -> "Callable[[Step], Results] | None":
        """The graph of steps of this kind."""
        assert self.graphs
        key = self.graphs.key_of(step)
        if isinstance(key, str):
            return None
        try:
            return self.graphs.of(key)
        except CannotCapture as reason:  # nor can it for another step
            self.graphs, self.without_graphs = None, str(reason)
            return None

    def run_eagerly(self, step: Step) -> Drawn:
        batch = Batch.of(step.states, step.token_ids, step.logit_index, self.device, step.copies)
        if step.unread:
            index, rows = (sent(each, torch.int64, self.device) for each in zip(*step.unread, strict=True))
            batch.token_ids[index] = self.newest[rows]
        logits, others = self.launch(batch).tensor_split([len(step.draws)])
        kept = logits.clone() if step.keeps_logits else None  # the draw changes its logits
        choices = (self.drawer.draw if self.drawer else sample)(logits, step.draws)
        if step.rows:
            last = (
                choices if len(choices) == len(step.rows) else choices[sent(step.lasts, torch.int64, self.device)]
            )
            self.newest[sent(step.rows, torch.int64, self.device)] = last
        return Drawn(Readback(choices), kept, others)

    def launch(self, batch: Batch) -> Tensor:
        """Logits [N, vocab] float32 of the tokens in `batch.logit_index`."""
        return self.forward(batch, self.model)

    def hidden(self, batch: Batch) -> Tensor:
        """[T, hidden] float32 of all the batch's tokens: what the head would read."""
        return self.forward(batch, lambda *given: self.model.norm(self.model.hidden(*given)))

    def forward(self, batch: Batch, compute: Callable[[Batch, list[LayerCache]], Tensor]) -> Tensor:
        self.copy(batch.copies)
        with each_row_alone(self.deterministic):
            found = compute(batch, self.caches).float()
        self.copy_rows(batch.saves)
        return found

    def free(self) -> None:
        """Let go of the weights, the files that they are mapped from, and the caches: nothing can run after it."""
        del self.model, self.caches, self.paged, self.recurrent, self.graphs, self.drawer

    def copy(self, copies: Copies) -> None:
        for run in copies.blocks:
            for cache in self.paged:
                cache.copy_blocks(run)
        self.copy_rows(copies.rows)

    def copy_rows(self, copies: Iterable[tuple[int, int]]) -> None:
        for source, target in copies:
            for cache in self.recurrent:
                cache.copy_row(source, target)
