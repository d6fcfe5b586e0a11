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
from localllm.runtime.cache import LayerCache
from localllm.runtime.drawer import Drawer
from localllm.runtime.draws import Draws, Kind, kind_of
from localllm.runtime.faults import out_of_memory
from localllm.runtime.kernels.gpu import step as ends
from localllm.runtime.kernels.gpu.step import LENGTH, NEWEST, NOBODY, PLACE, ROW, TOKENS, Columns
from localllm.runtime.model import Decoder
from localllm.runtime.sampler import Row
from localllm.runtime.sent import fill
from localllm.runtime.step import Step

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32)  # sequences
NO_MEMORY = "no memory was left to capture a step"
MOST_TOKENS = 127  # of a graph: from 128 rows on products unpack weights (kernels/gpu/dequantize.py)
WIDTHS = (1, 4, 8, 16)  # tokens of each: one to continue, or more to verify drafts


@dataclass(frozen=True)
class Key:
    """What a graph is captured for."""

    bucket: int
    count: int  # tokens of each sequence
    kind: Kind  # of draws
    keeps_logits: bool


@dataclass(frozen=True)
class Results:
    """Where a graph leaves what it computed, until the next one runs."""

    choices: Tensor  # [bucket * count] int64
    logits: Tensor | None  # [bucket * count, vocab] float32 as the model gave them


class Graphs:
    def __init__(
        self,
        model: Decoder,
        caches: list[LayerCache],
        drawer: Drawer,
        newest: Tensor,
        block_size: int,
        context: int,
        spare_block: int,
        spare_row: int,
    ):
        """newest: [places] int64, tokens drawn last; context: most tokens of a sequence; spare_block, spare_row:
        of the caches, for what pads a step."""
        self.model, self.caches, self.newest, self.block_size = model, caches, newest, block_size
        self.device, most = newest.device, len(newest)
        self.buckets = sorted({min(bucket, most) for bucket in BUCKETS})
        self.drawer, self.spare_block, self.spare_row = drawer, spare_block, spare_row
        self.most = most
        self.host = self.nobody()  # as `inputs` are on the device
        self.inputs = torch.tensor(self.host, dtype=torch.int64, device=self.device)
        self.known: list[list[int]] = [[] for _ in range(most)]  # as `tables` are on the device
        self.tables = torch.zeros(most, -(-context // block_size), dtype=torch.int32, device=self.device)

        def empty(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        tokens = most * WIDTHS[-1]
        self.token_ids, self.positions, self.slot = (empty(tokens, torch.int64) for _ in range(3))
        self.context_len, self.rows = (empty(most, torch.int32) for _ in range(2))
        self.captured: dict[Key, Callable[[], Results] | None] = {}  # None: no memory was left for it
        on_gpu = self.device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self.aside = torch.cuda.Stream(self.device) if on_gpu else None  # a capture wants one of its own

    def key_of(self, step: Step) -> Key | str:
        """Of the graph that does this step, or why none does."""
        count = len(step.token_ids[0])
        if count not in WIDTHS or any(c != count for c in step.counts):
            return "its sequences bring different numbers of tokens, or many"
        bucket = self.bucket(len(step.states))
        if bucket * count > MOST_TOKENS:
            return "so many tokens that products unpack weights into a buffer that is not the graph's"
        if step.logit_index != list(range(sum(step.counts))) or len(step.draws) != len(step.logit_index):
            return "not every token is drawn from"
        if any(save.length < state.length for state in step.states for save in state.saves):
            return "a recurrent state is saved within it"
        kind = kind_of(step.draws, self.model.config.vocab_size)
        if kind.refused:
            return kind.refused
        return Key(bucket, count, kind, step.keeps_logits)

    def bucket(self, sequences: int) -> int:
        return self.buckets[bisect_left(self.buckets, sequences)]

    def widths(self, sequences: int) -> tuple[int, ...]:
        """How many tokens each may bring."""
        return tuple(width for width in WIDTHS if self.bucket(sequences) * width <= MOST_TOKENS)

    def prepare(self, params: SamplingParams) -> str:
        """Capture a step of one sequence and one token. Why not, where it is so, else "". Raises CannotCapture."""
        kind = kind_of([Row(params, 0, 0, [], Counter())], self.model.config.vocab_size)
        return kind.refused or ("" if self.of(Key(1, 1, kind, keeps_logits=False)) else NO_MEMORY)

    def of(self, key: Key) -> Callable[[Step], Results] | None:
        """Captured when it is first asked for; None where no memory was left for that. Raises CannotCapture."""
        if key not in self.captured:
            try:
                self.captured[key] = self.capture(key)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                self.captured[key] = None  # others may have room, and this one is not tried in every step
        return partial(self.launch, key) if self.captured[key] else None

    def launch(self, key: Key, step: Step) -> Results:
        """The choices and logits of the step's tokens, in buffers that the next launch writes to again."""
        self.fill(key, step)
        replay = self.captured[key]
        assert replay
        found = replay()
        self.follow(key, len(step.states))
        count = len(step.draws)
        return Results(found.choices[:count], None if found.logits is None else found.logits[:count])

    def fill(self, key: Key, step: Step) -> None:
        """What the device does not know yet of the step, and only that, is sent."""
        wanted = self.nobody()
        unread = {token for token, _ in step.unread}
        for i, (state, tokens) in enumerate(zip(step.states, step.token_ids, strict=True)):
            wanted[PLACE][i], wanted[ROW][i] = step.rows[i], state.row or 0
            wanted[LENGTH][i] = state.length - key.count
            for at, token in enumerate(tokens):
                wanted[TOKENS + at][i] = NEWEST if i * key.count + at in unread else token
            self.fill_table(i, state.table)
        self.send(wanted)
        self.draws_of(key).set(step.draws)

    def send(self, wanted: list[list[int]]) -> None:
        if wanted != self.host:
            fill(self.inputs, torch.tensor(wanted))
            self.host = wanted  # not before: where no memory can be pinned, the device has what it had

    def nobody(self) -> list[list[int]]:
        """The inputs of a step that is padding alone."""
        return [[NOBODY if field == LENGTH else 0] * self.most for field in range(TOKENS + WIDTHS[-1])]

    def follow(self, key: Key, sequences: int) -> None:
        """Does to the host's copy what `ends.end` does on the device."""
        for i in range(sequences):
            self.host[LENGTH][i] += key.count
            for at in range(key.count):
                self.host[TOKENS + at][i] = NEWEST

    def fill_table(self, index: int, table: list[int]) -> None:
        known = self.known[index]
        if known != table:
            same = next((i for i, (a, b) in enumerate(zip(known, table, strict=False)) if a != b), len(known))
            if same < len(table):
                fill(self.tables[index, same : len(table)], torch.tensor(table[same:], dtype=torch.int32))
            self.known[index] = list(table)

    def capture(self, key: Key) -> Callable[[], Results]:
        """Raises CannotCapture where a part of the model needs to see the step on the host."""
        self.send(self.nobody())  # so that trying changes nothing
        self.draws_of(key).set([])
        if self.aside is None:
            self.run(key)
            return partial(self.run, key)
        self.run(key)  # compiles kernels and makes what they keep, which a capture cannot
        graph = torch.cuda.CUDAGraph()
        # Not by `torch.cuda.graph`: that gives back what was set apart for steps, and leaves this thread on its
        # stream where a capture fails.
        with torch.cuda.stream(self.aside):
            try:
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                try:
                    results = self.run(key)
                finally:
                    graph.capture_end()
            except Exception as error:
                cause = error.__context__ or error  # the end of a capture that failed fails as well
                if isinstance(cause, Exception) and out_of_memory(cause):
                    raise
                raise CannotCapture(str(cause).partition("\n")[0]) from error

        def replay() -> Results:
            graph.replay()
            return results

        return replay

    def run(self, key: Key) -> Results:
        """The step of the sequences in `inputs`, kernel by kernel."""
        columns = self.columns(key)
        ends.begin(columns)
        logits = self.model(self.batch(key, columns), self.caches).float()
        kept = logits.clone() if key.keeps_logits else None  # the draw changes its logits
        choices = torch.empty(len(logits), dtype=torch.int64, device=self.device)
        self.draws_of(key).launch(key.kind, logits, choices)
        ends.end(columns, choices)
        return Results(choices, kept)

    def draws_of(self, key: Key) -> Draws:
        return self.drawer.of(key.bucket * key.count)

    def columns(self, key: Key) -> Columns:
        tokens = key.bucket * key.count
        return Columns(
            self.inputs,
            self.newest,
            self.tables,
            self.token_ids[:tokens],
            self.positions[:tokens],
            self.slot[:tokens],
            self.context_len[: key.bucket],
            self.rows[: key.bucket],
            key.count,
            self.block_size,
            self.spare_block,
            self.spare_row,
        )

    def batch(self, key: Key, columns: Columns) -> Batch:
        """Without the host's view of sequences: it would be that of the step in which the graph was captured."""
        starts = torch.arange(0, key.bucket * key.count + 1, key.count, dtype=torch.int32, device=self.device)
        return Batch(
            token_ids=columns.token_ids,
            positions=columns.positions,
            query_start=starts,
            context_len=columns.context_len,
            block_table=self.tables[: key.bucket],
            slot=columns.slot,
            logit_index=None,
            block_size=self.block_size,
            longest=key.count,
            uniform=key.count,
            rows=columns.rows,
        )
