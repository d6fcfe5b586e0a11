"""Runs one step of a model on its device: copies of blocks and rows, the forward pass, logits, the draw."""

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime.batch import Batch, CannotCapture
from localllm.runtime.host_to_device import upload_values
from localllm.runtime.kernels.batch_invariance import batch_invariance
from localllm.runtime.kv_cache.sequence_state import CacheCopies
from localllm.runtime.kv_cache.tensors import KVCache, LatentCache, LayerCache, RecurrentCache, make_caches
from localllm.runtime.model import Decoder
from localllm.runtime.sampler import sample
from localllm.runtime.step import Readback, Step, StepOutput

if TYPE_CHECKING:
    from localllm.runtime.cuda_graphs import CudaGraphs, GraphOutput
    from localllm.runtime.gpu_sampler import GpuSampler

NO_LOGITS = torch.empty(0, 0)


class Runner:
    """`asynchronous`: does the device work on while the host goes on?

    `state_slots`: of recurrent states, for models that have recurrent layers; kv_dtype: as `make_caches`;
    max_running:
    most sequences in a step; graph_max_len: most tokens of one, where steps are captured as graphs, else None;
    deterministic: what is computed of a token does not depend on the tokens beside it, on a CPU alone.
    """

    def __init__(
        self,
        model: Decoder,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        state_slots: int = 0,
        kv_dtype: torch.dtype | None = None,
        max_running: int = 1,
        graph_max_len: int | None = None,
        deterministic: bool = False,
    ):
        self.model = model
        self.deterministic = deterministic
        self.device = device
        self.asynchronous = device.type != "cpu"
        mixers = [layer.mixer for layer in model.config.layers]
        spare = int(graph_max_len is not None)  # one block and one row more, for what pads a step
        self.caches = make_caches(mixers, blocks, block_size, state_slots, dtype, device, kv_dtype, spare)
        each = dict.fromkeys(self.caches)  # layers that share keys and values share a cache
        self.paged_caches = [cache for cache in each if isinstance(cache, KVCache | LatentCache)]
        self.recurrent_caches = [cache for cache in each if isinstance(cache, RecurrentCache)]
        self.newest_tokens = torch.zeros(
            max_running, dtype=torch.int64, device=device
        )  # [rows], tokens drawn last
        self.gpu_sampler: GpuSampler | None = None
        self.graphs: CudaGraphs | None = None
        off = "LOCALLLM_GRAPHS is off, or Triton has no kernels for this device"
        self.no_graphs_reason = off if graph_max_len is None else ""  # why not, where it is so
        if graph_max_len is not None:
            # Here, as they need Triton, which is not everywhere.
            gpu_sampler = importlib.import_module("localllm.runtime.gpu_sampler")
            cuda_graphs = importlib.import_module("localllm.runtime.cuda_graphs")
            self.gpu_sampler = gpu_sampler.GpuSampler(max_running, graph_max_len, model.config.vocab_size, device)
            self.graphs = cuda_graphs.CudaGraphs(
                model,
                self.caches,
                self.gpu_sampler,
                self.newest_tokens,
                block_size,
                graph_max_len,
                blocks,
                state_slots,
            )

    def capture_decode_step(self, params: SamplingParams) -> None:
        """Capture the step that a single answer drawn by these parameters is made of."""
        if self.graphs:
            try:
                self.no_graphs_reason = self.graphs.capture_decode_step(params)
            except CannotCapture as reason:
                self.graphs, self.no_graphs_reason = None, str(reason)

    def samples_on_device(self, params: SamplingParams) -> bool:
        """Does the device itself count the tokens that are drawn by these parameters?"""
        return self.gpu_sampler is not None and self.gpu_sampler.supports(params)

    def captured_widths(self, sequences: int) -> tuple[int, ...]:
        """How many tokens each of so many may bring, so that the step can be captured; () where none is. Recurrent
        layers save their state before each draft, which no graph does."""
        return self.graphs.captured_widths(sequences) if self.graphs and not self.recurrent_caches else ()

    def run(self, step: Step) -> StepOutput:
        """What a step brings, in one launch where its kind can be captured, else kernel by kernel."""
        replay = self.find_graph(step) if self.graphs else None
        if replay is None:
            return self.run_eagerly(step)
        self.apply_copies(step.copies)
        found = replay(step)
        self.copy_states(save for state in step.states for save in state.end_of_step_copies)
        kept = None if found.logits is None else found.logits.clone()  # the next launch writes there
        return StepOutput(Readback(found.sampled_ids), kept, NO_LOGITS)

    def find_graph(self, step: Step) -> "Callable[[Step], GraphOutput] | None":
        """The graph of steps of this kind."""
        assert self.graphs
        key = self.graphs.key_of(step)
        if isinstance(key, str):
            return None
        try:
            return self.graphs.get(key)
        except CannotCapture as reason:  # nor can it for another step
            self.graphs, self.no_graphs_reason = None, str(reason)
            return None

    def run_eagerly(self, step: Step) -> StepOutput:
        batch = Batch.from_states(step.states, step.token_ids, step.logit_index, self.device, step.copies)
        if step.unread_tokens:
            index, rows = (
                upload_values(each, torch.int64, self.device) for each in zip(*step.unread_tokens, strict=True)
            )
            batch.token_ids[index] = self.newest_tokens[rows]
        logits, others = self.launch(batch).tensor_split([len(step.sampling_specs)])
        kept = logits.clone() if step.keep_logits else None  # the draw changes its logits
        choices = (self.gpu_sampler.sample if self.gpu_sampler else sample)(logits, step.sampling_specs)
        if step.token_slots:
            last = (
                choices
                if len(choices) == len(step.token_slots)
                else choices[upload_values(step.last_spec_indices, torch.int64, self.device)]
            )
            self.newest_tokens[upload_values(step.token_slots, torch.int64, self.device)] = last
        return StepOutput(Readback(choices), kept, others)

    def launch(self, batch: Batch) -> Tensor:
        """Logits [N, vocab] float32 of the tokens in `batch.logit_index`."""
        return self.forward(batch, self.model)

    def hidden_states(self, batch: Batch) -> Tensor:
        """[T, hidden] float32 of all the batch's tokens: what the head would read."""
        return self.forward(batch, lambda *given: self.model.norm(self.model.hidden_states(*given)))

    def forward(self, batch: Batch, compute: Callable[[Batch, list[LayerCache]], Tensor]) -> Tensor:
        self.apply_copies(batch.copies)
        with batch_invariance(self.deterministic):
            found = compute(batch, self.caches).float()
        self.copy_states(batch.state_saves)
        return found

    def free(self) -> None:
        """Let go of the weights, the files that they are mapped from, and the caches: nothing can run after it."""
        del self.model, self.caches, self.paged_caches, self.recurrent_caches, self.graphs, self.gpu_sampler

    def apply_copies(self, copies: CacheCopies) -> None:
        for run in copies.blocks:
            for cache in self.paged_caches:
                cache.copy_blocks(run)
        self.copy_states(copies.states)

    def copy_states(self, copies: Iterable[tuple[int, int]]) -> None:
        for source, target in copies:
            for cache in self.recurrent_caches:
                cache.copy_state(source, target)
