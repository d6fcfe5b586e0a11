"""CUDA graphs for steps in which every sequence has the same number of new tokens, as in decoding.

A graph is captured once per number of sequences (a bucket, padded) and tokens per sequence; everything that
differs from step to step is in buffers on the device, context lengths included. While the same sequences continue,
the device already has all inputs of the next step: the host keeps a copy of the few numbers that describe a step,
advances it as the device does, and uploads only what differs.

On a CPU nothing is captured, and a step is launched kernel by kernel from the same buffers: for tests.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime.batch import Batch, CannotCapture, upload_into
from localllm.runtime.device_errors import is_out_of_memory
from localllm.runtime.gpu_sampler import BucketSampler, GpuSampler, SamplingVariant, variant_of
from localllm.runtime.kernels.gpu import step as ends
from localllm.runtime.kernels.gpu.step import (
    CONTEXT_LEN,
    FIRST_TOKEN,
    NEWEST_INDEX,
    NEWEST_TOKEN,
    PADDING,
    STATE_SLOT,
    StepColumns,
)
from localllm.runtime.kv_cache.tensors import LayerCache
from localllm.runtime.model import Decoder
from localllm.runtime.sampler import SamplingSpec
from localllm.runtime.step import Step

BATCH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 120)  # sequences; more exceed MAX_GRAPH_TOKENS
NO_MEMORY_REASON = "no memory was left to capture a step"
MAX_GRAPH_TOKENS = 127  # per graph: from 128 rows on, products dequantize weights (kernels/gpu/dequantize.py)
QUERY_LENS = (1, 4, 8, 16)  # tokens per sequence: one to decode, more to verify drafts


@dataclass(frozen=True)
class GraphKey:
    """Key of a captured graph."""

    bucket: int
    count: int  # tokens per sequence
    variant: SamplingVariant  # of the sampling kernels
    keep_logits: bool


@dataclass(frozen=True)
class GraphOutput:
    """Buffers with the results of a graph, valid until the next launch."""

    sampled_ids: Tensor  # [bucket * count] int64
    logits: Tensor | None  # [bucket * count, vocab] float32, unmodified by sampling


class CudaGraphs:
    def __init__(
        self,
        model: Decoder,
        caches: list[LayerCache],
        gpu_sampler: GpuSampler,
        newest_tokens: Tensor,
        block_size: int,
        max_len: int,
        padding_block: int,
        padding_state: int,
    ):
        """newest_tokens: [token slots] int64, sampled last; max_len: maximum tokens per sequence; padding_block,
        padding_state: block and state slot of the caches that padding writes to.
        """
        self.model, self.caches, self.newest_tokens, self.block_size = model, caches, newest_tokens, block_size
        self.device, max_sequences = newest_tokens.device, len(newest_tokens)
        self.buckets = sorted({min(bucket, max_sequences) for bucket in (*BATCH_BUCKETS, max_sequences)})
        self.gpu_sampler, self.padding_block, self.padding_state = gpu_sampler, padding_block, padding_state
        self.max_sequences = max_sequences
        self.host_inputs = self.padding_inputs()  # mirrors `inputs`
        self.inputs = torch.tensor(self.host_inputs, dtype=torch.int64, device=self.device)
        self.host_tables: list[list[int]] = [[] for _ in range(max_sequences)]  # mirrors `tables`
        self.tables = torch.zeros(max_sequences, -(-max_len // block_size), dtype=torch.int32, device=self.device)

        def empty(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        tokens = max_sequences * QUERY_LENS[-1]
        self.token_ids, self.positions, self.slot_mapping = (empty(tokens, torch.int64) for _ in range(3))
        self.context_len, self.state_slots = (empty(max_sequences, torch.int32) for _ in range(2))
        self.captured: dict[GraphKey, Callable[[], GraphOutput] | None] = {}  # None: out of memory
        self.memory_pool: Any = None  # of all graphs; torch has no public type for it
        # Capturing requires a stream of its own.
        self.capture_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def key_of(self, step: Step) -> GraphKey | str:
        """Return the key of the graph for this step, or the reason why there is none."""
        count = len(step.token_ids[0])
        if count not in QUERY_LENS or any(c != count for c in step.token_counts):
            return "its sequences have different numbers of new tokens, or many"
        bucket = self.bucket(len(step.states))
        if bucket * count > MAX_GRAPH_TOKENS:
            return "so many tokens that products unpack weights into a buffer that is not the graph's"
        if step.logit_index != list(range(sum(step.token_counts))) or len(step.sampling_specs) != len(
            step.logit_index
        ):
            return "not every token is sampled from"
        if any(save.length < state.length for state in step.states for save in state.state_saves):
            return "a recurrent state is saved within the step"
        variant = variant_of(step.sampling_specs, self.model.config.vocab_size)
        if variant.unsupported_reason:
            return variant.unsupported_reason
        return GraphKey(bucket, count, variant, step.uses_logits)

    def bucket(self, sequences: int) -> int:
        return self.buckets[bisect_left(self.buckets, sequences)]

    def captured_widths(self, sequences: int) -> tuple[int, ...]:
        """Return the numbers of tokens per sequence for which a step of this many sequences can be captured."""
        return tuple(width for width in QUERY_LENS if self.bucket(sequences) * width <= MAX_GRAPH_TOKENS)

    def capture_decode_step(self, params: SamplingParams) -> str:
        """Capture a step of one sequence and one token. Returns the reason if it cannot be, otherwise "".

        Raises CannotCapture.
        """
        variant = variant_of([SamplingSpec(params, 0, 0, [], Counter())], self.model.config.vocab_size)
        return variant.unsupported_reason or (
            "" if self.get(GraphKey(1, 1, variant, keep_logits=False)) else NO_MEMORY_REASON
        )

    def warm_up(self) -> None:
        """Launch the kernels that only captured steps call, with padding, so that they are compiled."""
        self.upload_inputs(self.padding_inputs())
        for count in QUERY_LENS:
            key = GraphKey(1, count, SamplingVariant(is_random=False, has_penalties=False), keep_logits=False)
            columns = self.columns(key)
            ends.begin_step(columns)
            ends.end_step(columns, torch.zeros(count, dtype=torch.int64, device=self.device))

    def get(self, key: GraphKey) -> Callable[[Step], GraphOutput] | None:
        """Return the launcher of a graph, captured on first use; None if memory ran out. Raises CannotCapture."""
        if key not in self.captured:
            try:
                self.captured[key] = self.capture(key)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Remembered, so that it is not retried in every step; other graphs may still fit.
                self.captured[key] = None
        return partial(self.launch, key) if self.captured[key] else None

    def launch(self, key: GraphKey, step: Step) -> GraphOutput:
        """Run a step, and return its sampled ids and logits in buffers that the next launch overwrites."""
        self.fill_inputs(key, step)
        replay = self.captured[key]
        assert replay
        output = replay()
        self.advance_host_inputs(key, len(step.states))
        count = len(step.sampling_specs)
        return GraphOutput(output.sampled_ids[:count], None if output.logits is None else output.logits[:count])

    def fill_inputs(self, key: GraphKey, step: Step) -> None:
        """Upload the inputs of the step that the device does not have yet."""
        inputs = self.padding_inputs()
        unread = {token for token, _ in step.unread_tokens}
        for i, (state, tokens) in enumerate(zip(step.states, step.token_ids, strict=True)):
            inputs[NEWEST_INDEX][i], inputs[STATE_SLOT][i] = step.token_slots[i], state.state_slot or 0
            inputs[CONTEXT_LEN][i] = state.length - key.count
            for index, token in enumerate(tokens):
                inputs[FIRST_TOKEN + index][i] = NEWEST_TOKEN if i * key.count + index in unread else token
            self.upload_block_table(i, state.block_table)
        self.upload_inputs(inputs)
        self.sampler_of(key).prepare(step.sampling_specs)

    def upload_inputs(self, inputs: list[list[int]]) -> None:
        if inputs != self.host_inputs:
            upload_into(self.inputs, torch.tensor(inputs))
            # Only afterwards: if pinning memory fails, the device still has the old values.
            self.host_inputs = inputs

    def padding_inputs(self) -> list[list[int]]:
        """Return the inputs of a step that is only padding."""
        return [
            [PADDING if field == CONTEXT_LEN else 0] * self.max_sequences
            for field in range(FIRST_TOKEN + QUERY_LENS[-1])
        ]

    def advance_host_inputs(self, key: GraphKey, sequences: int) -> None:
        """Advance the host's copy as `ends.end_step` does on the device."""
        for i in range(sequences):
            self.host_inputs[CONTEXT_LEN][i] += key.count
            for index in range(key.count):
                self.host_inputs[FIRST_TOKEN + index][i] = NEWEST_TOKEN

    def upload_block_table(self, index: int, table: list[int]) -> None:
        uploaded = self.host_tables[index]
        if uploaded != table:
            common_len = next(
                (i for i, (a, b) in enumerate(zip(uploaded, table, strict=False)) if a != b), len(uploaded)
            )
            if common_len < len(table):
                upload_into(
                    self.tables[index, common_len : len(table)],
                    torch.tensor(table[common_len:], dtype=torch.int32),
                )
            self.host_tables[index] = list(table)

    def capture(self, key: GraphKey) -> Callable[[], GraphOutput]:
        """Capture a graph. Raises CannotCapture if a part of the model needs the step's spans on the host."""
        self.upload_inputs(self.padding_inputs())  # so that the trial run changes no state
        self.sampler_of(key).prepare([])
        if self.capture_stream is None:
            self.run(key)
            return partial(self.run, key)
        self.run(key)  # compiles kernels and allocates their buffers, which is not allowed while capturing
        if not any(self.captured.values()):  # a pool ends with its last graph
            self.memory_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self.device.index or 0]
        random_state = generator.clone_state()
        # Not `torch.cuda.graph`: it empties the allocator's cache and leaves this thread on its stream if a
        # capture fails.
        with torch.cuda.stream(self.capture_stream):
            try:
                graph.capture_begin(pool=self.memory_pool, capture_error_mode="thread_local")
                try:
                    results = self.run(key)
                finally:
                    graph.capture_end()
            except Exception as error:
                # torch leaves it capturing, and any later use of it by the program would fail.
                generator.graphsafe_set_state(random_state)
                cause = error.__context__ or error  # ending a failed capture fails as well
                if isinstance(cause, Exception) and is_out_of_memory(cause):
                    raise
                raise CannotCapture(str(cause).partition("\n")[0]) from error

        def replay() -> GraphOutput:
            graph.replay()
            return results

        return replay

    def run(self, key: GraphKey) -> GraphOutput:
        """Run the step of the sequences in `inputs`, kernel by kernel."""
        columns = self.columns(key)
        ends.begin_step(columns)
        logits = self.model(self.batch(key, columns), self.caches).float()
        kept_logits = logits.clone() if key.keep_logits else None  # sampling modifies its logits
        choices = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        self.sampler_of(key).launch(key.variant, logits, choices)
        ends.end_step(columns, choices)
        return GraphOutput(choices, kept_logits)

    def sampler_of(self, key: GraphKey) -> BucketSampler:
        return self.gpu_sampler.bucket_sampler(key.bucket * key.count)

    def columns(self, key: GraphKey) -> StepColumns:
        tokens = key.bucket * key.count
        return StepColumns(
            self.inputs,
            self.newest_tokens,
            self.tables,
            self.token_ids[:tokens],
            self.positions[:tokens],
            self.slot_mapping[:tokens],
            self.context_len[: key.bucket],
            self.state_slots[: key.bucket],
            key.count,
            self.block_size,
            self.padding_block,
            self.padding_state,
        )

    def batch(self, key: GraphKey, columns: StepColumns) -> Batch:
        """Return a batch without the host's view of sequences, which would be that of the step that was
        captured.
        """
        starts = torch.arange(0, key.bucket * key.count + 1, key.count, dtype=torch.int32, device=self.device)
        return Batch(
            token_ids=columns.token_ids,
            positions=columns.positions,
            query_start=starts,
            context_len=columns.context_len,
            block_table=self.tables[: key.bucket],
            slot_mapping=columns.slot,
            logit_index=None,
            block_size=self.block_size,
            max_query_len=key.count,
            uniform_query_len=key.count,
            state_slots=columns.state_slots,
        )
