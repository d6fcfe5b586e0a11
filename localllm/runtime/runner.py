"""Runs one step of a model on its device: copies of blocks and states, forward pass, logits and sampling."""

import importlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localllm.metrics import TierMove
from localllm.quant.vectors import KVDtype
from localllm.request import SamplingParams
from localllm.runtime.batch import Batch, CannotCapture, upload_values
from localllm.runtime.kernels import triton_unsupported
from localllm.runtime.kernels.batch_invariance import batch_invariance
from localllm.runtime.kv_cache.host_copies import NamedCaches
from localllm.runtime.kv_cache.sequence_state import NO_COPIES, CacheCopies, SequenceState
from localllm.runtime.kv_cache.tensors import KVCache, LatentCache, LayerCache, RecurrentCache, make_caches
from localllm.runtime.kv_cache.tiers import CopyRun
from localllm.runtime.model import Decoder
from localllm.runtime.sampler import logprob_table, sample
from localllm.runtime.step import PendingOutput, Readback, Step, StepOutput

if TYPE_CHECKING:
    from localllm.runtime.cuda_graphs import CudaGraphs, GraphOutput
    from localllm.runtime.gpu_sampler import GpuSampler


@dataclass
class PendingStep:
    """A step of which other stages compute the rest."""

    count: int  # hidden states that it returns
    hidden: Tensor | None = None  # [count, hidden], once received


class Runner:
    """Runs a model's steps on one device.

    `asynchronous` says whether the device computes while the host continues, and `concurrent_steps` how many steps
    the stages of a pipeline compute at a time, each of them in order. state_slots: recurrent states to
    allocate, for models with recurrent layers; kv_dtype: see `make_caches`; max_running: most sequences in a step;
    graph_max_len: most tokens of a sequence if steps are captured as CUDA graphs, otherwise None; deterministic:
    results of a token do not depend on the other tokens of its step (CPU only).
    """

    def __init__(
        self,
        model: Decoder,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        state_slots: int = 0,
        kv_dtype: KVDtype | None = None,
        max_running: int = 1,
        graph_max_len: int | None = None,
        deterministic: bool = False,
    ):
        self.model = model
        self.device_blocks = blocks
        self.move_clock = MoveClock(device)
        self.deterministic = deterministic
        self.device = device
        self.asynchronous = device.type != "cpu"
        # On a GPU, the next step is launched ahead of reading instead.
        self.concurrent_steps = 1 if self.asynchronous or model.ranks is None else model.ranks.concurrent_steps
        self.pending_steps = deque[PendingStep]()  # steps whose hidden states have not come back, oldest first
        mixers = [layer.mixer for layer in model.config.layers]
        spare = int(graph_max_len is not None)  # one more block and state slot, for padding
        self.caches = make_caches(mixers, blocks, block_size, state_slots, dtype, device, kv_dtype, spare)
        caches = dict.fromkeys(self.caches)  # layers that share keys and values share a cache
        self.paged_caches = [cache for cache in caches if isinstance(cache, KVCache | LatentCache)]
        self.recurrent_caches = [cache for cache in caches if isinstance(cache, RecurrentCache)]
        shard, stage = model.ranks.shard if model.ranks else None, model.config.stage
        rank = shard.rank if shard and shard.size > 1 else None
        self.named_caches = NamedCaches(self.caches, stage.first if stage else 0, rank)
        # [token slots], sampled last.
        self.newest_tokens = torch.zeros(max_running, dtype=torch.int64, device=device)
        self.gpu_sampler: GpuSampler | None = None
        self.graphs: CudaGraphs | None = None
        self.no_graphs_reason = ""  # empty while graphs are used
        if graph_max_len is None:
            self.no_graphs_reason = triton_unsupported(device) or "LOCALLLM_GRAPHS is off"
        if graph_max_len is not None:
            # Imported here because they need Triton, which is not available everywhere.
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

    @property
    def max_running(self) -> int:
        """Most sequences in a step."""
        return len(self.newest_tokens)

    def capture_decode_step(self, params: SamplingParams) -> None:
        """Capture the step that decodes a single sequence with these parameters."""
        if self.graphs:
            try:
                self.no_graphs_reason = self.graphs.capture_decode_step(params)
            except CannotCapture as reason:
                self.graphs, self.no_graphs_reason = None, str(reason)

    def samples_on_device(self, params: SamplingParams, end_tokens: int) -> bool:
        """Return whether sequences without grammar and drafts are sampled on the device, which then counts their
        tokens for penalties.
        """
        return self.gpu_sampler is not None and self.gpu_sampler.supports(params, end_tokens)

    def captured_widths(self, sequences: int) -> tuple[int, ...]:
        """Return the numbers of tokens per sequence for which a step is captured; () if there are none.

        Recurrent layers save their state before each draft, which no graph does.
        """
        return self.graphs.captured_widths(sequences) if self.graphs and not self.recurrent_caches else ()

    def run(self, step: Step) -> StepOutput | PendingOutput:
        """Run a step: as one graph launch if it can be captured, otherwise kernel by kernel.

        With concurrent steps, only the first stage has run when this returns.
        """
        replay = self.find_graph(step) if self.graphs else None
        if replay is None:
            return self.run_eagerly(step)
        self.apply_copies(step.copies)
        output = replay(step)
        self.copy_states(save for state in step.states for save in state.end_of_step_copies)
        logprobs = None
        if output.logits is not None and step.logprobs is not None:
            logprobs = logprob_table(output.logits.log_softmax(-1), output.sampled_ids, step.logprobs)
        kept_logits = None
        if output.logits is not None and step.keep_logits:
            kept_logits = output.logits.clone()  # the next launch overwrites them
        return StepOutput(Readback(output.sampled_ids, logprobs), kept_logits)

    def find_graph(self, step: Step) -> "Callable[[Step], GraphOutput] | None":
        """Return the launcher of the graph for this step, or None if there is no such graph."""
        assert self.graphs
        key = self.graphs.key_of(step)
        if isinstance(key, str):
            return None
        try:
            return self.graphs.get(key)
        except CannotCapture as reason:  # no other step could be captured either
            self.graphs, self.no_graphs_reason = None, str(reason)
            return None

    def run_eagerly(self, step: Step) -> StepOutput | PendingOutput:
        """Run a step kernel by kernel."""
        has_unread = bool(step.unread_tokens)
        batch = self.make_batch(step.states, step.token_ids, step.logit_index, step.copies, has_unread=has_unread)
        if step.unread_tokens:
            index, token_slots = (
                upload_values(each, torch.int64, self.device) for each in zip(*step.unread_tokens, strict=True)
            )
            batch.token_ids[index] = self.newest_tokens[token_slots]
            if self.model.ranks:
                self.model.ranks.broadcast(batch.token_ids)
        if self.concurrent_steps == 1:
            return self.sample(step, self.launch(batch))
        self.compute(batch, self.model.run_layers)
        pending = PendingStep(len(step.logit_index))
        self.pending_steps.append(pending)
        return PendingOutput(lambda: self.sample(step, self.finish(pending)))

    def finish(self, step: PendingStep) -> Tensor:
        """Wait for the hidden states of a step, and return its logits [N, vocab] float32."""
        while step.hidden is None:
            self.receive_oldest()
        with self.reported_errors(), batch_invariance(self.deterministic):
            return self.model.logits(step.hidden).float()

    def receive_hidden(self) -> None:
        """Wait for the hidden states of all steps in flight, also of those that nobody reads any more."""
        while self.pending_steps:
            self.receive_oldest()

    def receive_oldest(self) -> None:
        with self.reported_errors():
            step = self.pending_steps.popleft()
            step.hidden = self.model.receive_back(step.count)

    def sample(self, step: Step, logits: Tensor) -> StepOutput:
        """Sample the tokens of a step. logits: [N, vocab] float32, as `logit_index` selects them"""
        logits, others = logits.tensor_split([len(step.sampling_specs)])
        # Sampling modifies its logits.
        kept_logits = logits.clone() if step.keep_logits else None
        logs = logits.log_softmax(-1) if step.logprobs is not None else None
        choices = (self.gpu_sampler.sample if self.gpu_sampler else sample)(logits, step.sampling_specs)
        if step.token_slots:
            last = (
                choices
                if len(choices) == len(step.token_slots)
                else choices[upload_values(step.last_spec_indices, torch.int64, self.device)]
            )
            self.newest_tokens[upload_values(step.token_slots, torch.int64, self.device)] = last
        logprobs = None if logs is None else logprob_table(logs, choices, step.logprobs or 0)
        prompt_logprobs = None
        if step.prompt_next_ids:
            next_ids = upload_values(step.prompt_next_ids, torch.int64, self.device)
            prompt_logprobs = logprob_table(others.log_softmax(-1), next_ids, step.prompt_logprobs)
        return StepOutput(Readback(choices, logprobs, prompt_logprobs), kept_logits)

    def make_batch(
        self,
        states: list[SequenceState],
        token_ids: list[list[int]],
        logit_index: list[int],
        copies: CacheCopies = NO_COPIES,
        *,
        hidden: bool = False,
        has_unread: bool = False,
    ) -> Batch:
        """Build a batch that is computed next, by all ranks if there are several: see `Batch.from_states`.

        hidden: by `hidden_states`, not by `launch`; has_unread: the caller sets token ids that the device knows
        """
        if self.model.ranks:
            self.model.ranks.send_step(
                states, token_ids, logit_index, copies, hidden=hidden, has_unread=has_unread
            )
        return Batch.from_states(states, token_ids, logit_index, self.device, copies)

    def launch(self, batch: Batch) -> Tensor:
        """Compute logits [N, vocab] float32 of the tokens in `batch.logit_index`."""
        return self.forward(batch, self.model)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Compute [T, hidden] float32 of all tokens of the batch: the input of the head."""
        return self.forward(batch, self.model.normed_hidden_states)

    def forward(self, batch: Batch, compute: Callable[[Batch, list[LayerCache]], Tensor]) -> Tensor:
        """Compute a batch whose results come back at once, after those of the steps in flight."""
        self.receive_hidden()
        return self.compute(batch, compute).float()

    def compute(self, batch: Batch, compute: Callable[[Batch, list[LayerCache]], Tensor]) -> Tensor:
        with self.reported_errors():
            self.apply_copies(batch.copies)
            with batch_invariance(self.deterministic):
                output = compute(batch, self.caches)
            self.copy_states(batch.state_saves)
            return output

    @contextmanager
    def reported_errors(self) -> Iterator[None]:
        """Raise errors as those of a step of several processes, if there are several."""
        try:
            yield
        except CannotCapture:
            raise
        except Exception as error:
            if self.model.ranks is None:
                raise
            raise self.model.ranks.step_failed(error) from error

    def free(self) -> None:
        """Release the weights, the files they are mapped from and the caches. Nothing can run afterwards."""
        del self.model, self.caches, self.paged_caches, self.recurrent_caches, self.named_caches
        del self.graphs, self.gpu_sampler

    def apply_copies(self, copies: CacheCopies) -> None:
        with self.move_clock.measure(**self.tier_bytes(copies.blocks)):
            for run in copies.blocks:
                for cache in self.paged_caches:
                    cache.copy_blocks(run)
        self.copy_states(copies.states)

    def tier_bytes(self, runs: Iterable[CopyRun]) -> dict[str, int]:
        """Return the bytes of these copies that move between the device and the host tier."""
        limit, moved = self.device_blocks, {"device_to_host": 0, "host_to_device": 0}
        for source, target, count in runs:
            if (source < limit) != (target < limit):
                moved["device_to_host" if source < limit else "host_to_device"] += count * self.block_bytes
        return moved

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block in all caches."""
        return sum(
            tensor.on_device[: tensor.block_size].nbytes for cache in self.paged_caches for tensor in cache.tiered
        )

    def copy_states(self, copies: Iterable[tuple[int, int]]) -> None:
        for source, target in copies:
            for cache in self.recurrent_caches:
                cache.copy_state(source, target)


class MoveClock:
    """Measures how many bytes blocks have when they move between the device and the host, and how long that takes.

    On a GPU, copies are timed by events, which are read once the device has passed them; otherwise on the engine's
    thread, which executes them.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.moves = {"device_to_host": TierMove(), "host_to_device": TierMove()}
        self.pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, dict[str, int]]] = deque()

    @contextmanager
    def measure(self, **nbytes: int) -> Iterator[None]:
        """Measure the copies within `with`. nbytes: their sizes by name of the move, which share the time"""
        if not any(nbytes.values()):
            yield
            return
        if self.device.type != "cuda":
            began = perf_counter()
            yield
            self.add(nbytes, perf_counter() - began)
            return
        self.collect()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self.device)
        begin.record(stream)
        yield
        end.record(stream)
        self.pending.append((begin, end, nbytes))

    def collect(self) -> None:
        """Add the copies that the device has executed."""
        while self.pending and self.pending[0][1].query():
            begin, end, nbytes = self.pending.popleft()
            self.add(nbytes, begin.elapsed_time(end) / 1000)

    def add(self, nbytes: dict[str, int], seconds: float) -> None:
        total = sum(nbytes.values())
        for name, count in nbytes.items():
            if count:
                before = self.moves[name]
                self.moves[name] = TierMove(before.bytes + count, before.seconds + seconds * count / total)
