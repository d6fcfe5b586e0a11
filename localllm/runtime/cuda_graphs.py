"""Steps in which every sequence brings equally many tokens, as decoding does, launched as one CUDA graph.

A graph is captured once for a number of sequences (a bucket, the rest of which is padded) and of tokens each; what
differs from step to step lies in buffers on the device. How long contexts are is among it, and no graph depends on
it. While the same sequences go on, the device knows all of the next step itself and the host sends nothing: it
keeps a copy of the few numbers that describe a step, lets it follow the device's, and sends only what differs.

On a CPU nothing is captured, and a step is launched kernel by kernel from the same buffers: for tests.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from localllm.request import SamplingParams
from localllm.runtime.batch import Batch, CannotCapture
from localllm.runtime.device_errors import is_out_of_memory
from localllm.runtime.gpu_sampler import BucketSampler, GpuSampler, SamplingVariant, variant_of
from localllm.runtime.host_to_device import upload_into
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

BATCH_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32)  # sequences
NO_MEMORY_REASON = "no memory was left to capture a step"
MAX_GRAPH_TOKENS = 127  # of a graph: from 128 rows on products unpack weights (kernels/gpu/dequantize.py)
QUERY_LENS = (1, 4, 8, 16)  # tokens of each: one to continue, or more to verify drafts


@dataclass(frozen=True)
class GraphKey:
    """What a graph is captured for."""

    bucket: int
    count: int  # tokens of each sequence
    variant: SamplingVariant  # of draws
    keep_logits: bool


@dataclass(frozen=True)
class GraphOutput:
    """Where a graph leaves what it computed, until the next one runs."""

    sampled_ids: Tensor  # [bucket * count] int64
    logits: Tensor | None  # [bucket * count, vocab] float32 as the model gave them


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
        """newest_tokens: [places] int64, tokens drawn last; max_len: most tokens of a sequence; spare_block,
        padding_state:
        of the caches, for what pads a step."""
        self.model, self.caches, self.newest_tokens, self.block_size = model, caches, newest_tokens, block_size
        self.device, most = newest_tokens.device, len(newest_tokens)
        self.buckets = sorted({min(bucket, most) for bucket in BATCH_BUCKETS})
        self.gpu_sampler, self.padding_block, self.padding_state = gpu_sampler, padding_block, padding_state
        self.max_sequences = most
        self.host_inputs = self.padding_inputs()  # as `inputs` are on the device
        self.inputs = torch.tensor(self.host_inputs, dtype=torch.int64, device=self.device)
        self.host_tables: list[list[int]] = [[] for _ in range(most)]  # as `tables` are on the device
        self.tables = torch.zeros(most, -(-max_len // block_size), dtype=torch.int32, device=self.device)

        def empty(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        tokens = most * QUERY_LENS[-1]
        self.token_ids, self.positions, self.slot_mapping = (empty(tokens, torch.int64) for _ in range(3))
        self.context_len, self.state_slots = (empty(most, torch.int32) for _ in range(2))
        self.captured: dict[GraphKey, Callable[[], GraphOutput] | None] = {}  # None: no memory was left for it
        on_gpu = self.device.type == "cuda"
        self.memory_pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self.capture_stream = torch.cuda.Stream(self.device) if on_gpu else None  # a capture wants one of its own

    def key_of(self, step: Step) -> GraphKey | str:
        """Of the graph that does this step, or why none does."""
        count = len(step.token_ids[0])
        if count not in QUERY_LENS or any(c != count for c in step.token_counts):
            return "its sequences bring different numbers of tokens, or many"
        bucket = self.bucket(len(step.states))
        if bucket * count > MAX_GRAPH_TOKENS:
            return "so many tokens that products unpack weights into a buffer that is not the graph's"
        if step.logit_index != list(range(sum(step.token_counts))) or len(step.sampling_specs) != len(
            step.logit_index
        ):
            return "not every token is drawn from"
        if any(save.length < state.length for state in step.states for save in state.state_saves):
            return "a recurrent state is saved within it"
        kind = variant_of(step.sampling_specs, self.model.config.vocab_size)
        if kind.unsupported_reason:
            return kind.unsupported_reason
        return GraphKey(bucket, count, kind, step.keep_logits)

    def bucket(self, sequences: int) -> int:
        return self.buckets[bisect_left(self.buckets, sequences)]

    def captured_widths(self, sequences: int) -> tuple[int, ...]:
        """How many tokens each may bring."""
        return tuple(width for width in QUERY_LENS if self.bucket(sequences) * width <= MAX_GRAPH_TOKENS)

    def capture_decode_step(self, params: SamplingParams) -> str:
        """Capture a step of one sequence and one token. Why not, where it is so, else "". Raises CannotCapture."""
        kind = variant_of([SamplingSpec(params, 0, 0, [], Counter())], self.model.config.vocab_size)
        return kind.unsupported_reason or (
            "" if self.get(GraphKey(1, 1, kind, keep_logits=False)) else NO_MEMORY_REASON
        )

    def get(self, key: GraphKey) -> Callable[[Step], GraphOutput] | None:
        """Captured when it is first asked for; None where no memory was left for that. Raises CannotCapture."""
        if key not in self.captured:
            try:
                self.captured[key] = self.capture(key)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self.captured[key] = None  # others may have room, and this one is not tried in every step
        return partial(self.launch, key) if self.captured[key] else None

    def launch(self, key: GraphKey, step: Step) -> GraphOutput:
        """The choices and logits of the step's tokens, in buffers that the next launch writes to again."""
        self.fill_inputs(key, step)
        replay = self.captured[key]
        assert replay
        found = replay()
        self.advance_host_inputs(key, len(step.states))
        count = len(step.sampling_specs)
        return GraphOutput(found.sampled_ids[:count], None if found.logits is None else found.logits[:count])

    def fill_inputs(self, key: GraphKey, step: Step) -> None:
        """What the device does not know yet of the step, and only that, is sent."""
        wanted = self.padding_inputs()
        unread = {token for token, _ in step.unread_tokens}
        for i, (state, tokens) in enumerate(zip(step.states, step.token_ids, strict=True)):
            wanted[NEWEST_INDEX][i], wanted[STATE_SLOT][i] = step.token_slots[i], state.state_slot or 0
            wanted[CONTEXT_LEN][i] = state.length - key.count
            for at, token in enumerate(tokens):
                wanted[FIRST_TOKEN + at][i] = NEWEST_TOKEN if i * key.count + at in unread else token
            self.upload_block_table(i, state.block_table)
        self.upload_inputs(wanted)
        self.sampler_of(key).prepare(step.sampling_specs)

    def upload_inputs(self, wanted: list[list[int]]) -> None:
        if wanted != self.host_inputs:
            upload_into(self.inputs, torch.tensor(wanted))
            self.host_inputs = wanted  # not before: where no memory can be pinned, the device has what it had

    def padding_inputs(self) -> list[list[int]]:
        """The inputs of a step that is padding alone."""
        return [
            [PADDING if field == CONTEXT_LEN else 0] * self.max_sequences
            for field in range(FIRST_TOKEN + QUERY_LENS[-1])
        ]

    def advance_host_inputs(self, key: GraphKey, sequences: int) -> None:
        """Does to the host's copy what `ends.end` does on the device."""
        for i in range(sequences):
            self.host_inputs[CONTEXT_LEN][i] += key.count
            for at in range(key.count):
                self.host_inputs[FIRST_TOKEN + at][i] = NEWEST_TOKEN

    def upload_block_table(self, index: int, table: list[int]) -> None:
        known = self.host_tables[index]
        if known != table:
            same = next((i for i, (a, b) in enumerate(zip(known, table, strict=False)) if a != b), len(known))
            if same < len(table):
                upload_into(self.tables[index, same : len(table)], torch.tensor(table[same:], dtype=torch.int32))
            self.host_tables[index] = list(table)

    def capture(self, key: GraphKey) -> Callable[[], GraphOutput]:
        """Raises CannotCapture where a part of the model needs to see the step on the host."""
        self.upload_inputs(self.padding_inputs())  # so that trying changes nothing
        self.sampler_of(key).prepare([])
        if self.capture_stream is None:
            self.run(key)
            return partial(self.run, key)
        self.run(key)  # compiles kernels and makes what they keep, which a capture cannot
        graph = torch.cuda.CUDAGraph()
        # Not by `torch.cuda.graph`: that gives back what was set apart for steps, and leaves this thread on its
        # stream where a capture fails.
        with torch.cuda.stream(self.capture_stream):
            try:
                graph.capture_begin(pool=self.memory_pool, capture_error_mode="thread_local")
                try:
                    results = self.run(key)
                finally:
                    graph.capture_end()
            except Exception as error:
                cause = error.__context__ or error  # the end of a capture that failed fails as well
                if isinstance(cause, Exception) and is_out_of_memory(cause):
                    raise
                raise CannotCapture(str(cause).partition("\n")[0]) from error

        def replay() -> GraphOutput:
            graph.replay()
            return results

        return replay

    def run(self, key: GraphKey) -> GraphOutput:
        """The step of the sequences in `inputs`, kernel by kernel."""
        columns = self.columns(key)
        ends.begin_step(columns)
        logits = self.model(self.batch(key, columns), self.caches).float()
        kept = logits.clone() if key.keep_logits else None  # the draw changes its logits
        choices = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        self.sampler_of(key).launch(key.variant, logits, choices)
        ends.end_step(columns, choices)
        return GraphOutput(choices, kept)

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
        """Without the host's view of sequences: it would be that of the step in which the graph was captured."""
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
