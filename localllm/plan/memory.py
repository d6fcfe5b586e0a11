"""How the free memory of a device is shared out: to weights, recurrent states, the cache and a step's workspace.

`loading.load` allocates what is told here, and `plan` says it before a download. All sizes are bytes.
"""

import bisect
from dataclasses import dataclass
from functools import cached_property

from localllm.arch.config import ModelConfig
from localllm.arch.cost import WeightBytes, kv_bytes_per_token, state_bytes
from localllm.errors import DoesNotFit, UsageError
from localllm.formatting import format_bytes
from localllm.plan.activations import activation_bytes
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes

BLOCK_SIZE = 16  # tokens
# Tokens a step. On two cores larger chunks prefill no faster and hold others up longer; on a GPU each chunk pays
# anew for the dequantization of all weights (arithmetic: bench/NOTES.md).
TOKEN_BUDGET = {"cpu": 512, "cuda": 2048}
MAX_RUNNING = 32  # sequences in one step
# Positions that a step with drafts draws from at most, beside sequences that are admitted to it: so many rows have
# the bits that each has alone on a CPU, and more would not pay there.
MAX_VERIFIED_TOKENS = {"cpu": 16, "cuda": 80}
MIN_STATE_SLOTS = 2  # recurrent states: one to work on, one to come back to
MAX_STATE_SLOTS = 2 * MAX_RUNNING  # each sequence's own, and as many to come back to
MAX_BLOCKS = 2**20  # the pool counts them one by one: 16 million tokens, 0.1 GB, set up in 0.3 s
FORCED_CONTEXT = 4096  # tokens, where not even the weights fit and nobody asks for more
CACHED_CONTEXTS = 8  # so many full contexts are kept for other sequences and later turns, memory allowing
# Percent of what weights, states and workspace leave that the cache may take: main memory is everybody's, and on a
# GPU the allocator needs some to find whole pieces.
CACHE_SHARE = {"cpu": 50, "cuda": 90}
# Of a GPU, beside activations: captured graphs and their pool, workspaces of cuBLAS (32 MB on Hopper) and of split
# products. Arithmetic, not measured.
GPU_WORKSPACE = 2**28
HOST_SHARE = 25  # percent of the free main memory that a GPU's cache may put blocks aside in


@dataclass(frozen=True)
class MemoryNeeds:
    """What a model takes of a device, whatever is free there."""

    name: str
    config: ModelConfig
    weights: WeightBytes
    device_type: str  # of the device: cpu or cuda
    dtype: str
    kv_dtype: str  # of keys and values
    dequantized_bytes: int = 0  # bytes of the largest matrix that is dequantized in a step
    draft: "MemoryNeeds | None" = None  # of a draft model, which gets as many blocks and states

    @property
    def title(self) -> str:
        return f"{self.name} and its draft model {self.draft.name}" if self.draft else self.name

    @property
    def weight_bytes(self) -> int:
        return self.weights.total + (self.draft.weight_bytes if self.draft else 0)

    @cached_property
    def own_state_slot_bytes(self) -> int:
        """Of a recurrent state; 0 for models that have none."""
        return state_bytes(self.config, ELEMENT_BYTES[self.dtype])

    @cached_property
    def state_slot_bytes(self) -> int:
        return self.own_state_slot_bytes + (self.draft.state_slot_bytes if self.draft else 0)

    @cached_property
    def block_bytes(self) -> int:
        """Of a block of the cache; 0 where no layer attends."""
        own = BLOCK_SIZE * kv_bytes_per_token(self.config, *kv_element_bytes(self.kv_dtype))
        return own + (self.draft.block_bytes if self.draft else 0)

    def workspace(self, context: int) -> int:
        """Of the largest step there is while sequences have so much context: activations, logits, what is
        dequantized on the way, and a GPU's own."""
        tokens, sequences = TOKEN_BUDGET[self.device_type], MAX_RUNNING + MAX_VERIFIED_TOKENS[self.device_type] - 1
        if self.config.encoder:  # which reads a text at once, and has no logits
            tokens, sequences = max(tokens, context), 0
        step = activation_bytes(
            self.config,
            self.dtype,
            tokens,
            context,
            sequences,
            self.dequantized_bytes,
            self.kv_dtype,
            grouped=self.device_type != "cpu",
        )
        beside = self.draft.workspace(min(context, self.draft.config.max_context)) if self.draft else 0
        return step + (GPU_WORKSPACE if self.device_type == "cuda" else 0) + beside

    @property
    def default_context(self) -> int:
        return self.config.default_context or self.config.max_context


@dataclass(frozen=True)
class MemoryPlan:
    """What a loaded model holds."""

    weights: WeightBytes
    context: int  # most tokens of a sequence
    blocks: int
    block_bytes: int
    state_slots: int  # of recurrent states
    state_slot_bytes: int
    workspace: int  # what a step takes while it runs, set apart
    max_blocks: int  # that the cache could have at this context
    max_context: int  # that one sequence could have
    host_blocks: int = 0  # of main memory, for blocks that a GPU's cache has no room for
    draft_bytes: int = 0  # weights of a draft model, whose cache and states count among the others

    @property
    def cache_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def state_bytes(self) -> int:
        return self.state_slots * self.state_slot_bytes

    @property
    def host_bytes(self) -> int:
        return self.host_blocks * self.block_bytes

    @property
    def total(self) -> int:
        """Of what stays between steps."""
        return self.weights.total + self.draft_bytes + self.cache_bytes + self.state_bytes


def allocate(needs: MemoryNeeds, free: int, context: int | None = None, users: int = 1) -> MemoryPlan:
    """What a model gets of `free` bytes. context: in tokens, None for as much of the usual as fits; users: who are
    to have so much each.

    Raises DoesNotFit, with what would, and UsageError for a context that the model does not have.
    """
    longest = needs.config.max_context
    check_context(longest, context)
    weights = needs.weight_bytes
    if weights > free:
        raise DoesNotFit(
            f"the weights of {needs.title} need {format_bytes(weights)} in {needs.dtype}, "
            f"{format_bytes(free)} are free",
            "name a smaller model, or free memory",
        )
    left = free - weights
    rows = plan_state_slots(needs.state_slot_bytes, left)
    left -= rows * needs.state_slot_bytes

    def affordable(context: int) -> int:
        share = max(0, left - needs.workspace(context)) * CACHE_SHARE[needs.device_type] // 100
        return min(share // max(1, needs.block_bytes), MAX_BLOCKS)  # 0 bytes: no layer attends

    def most_context(users: int) -> int:
        def too_long(blocks: int) -> bool:
            return affordable(min(longest, blocks * BLOCK_SIZE)) < users * blocks

        lengths = range(1, min(blocks_for(longest), MAX_BLOCKS) + 1)  # in blocks
        return min(longest, bisect.bisect_left(lengths, True, key=too_long) * BLOCK_SIZE)

    alone, most = most_context(1), most_context(users)
    least = context or BLOCK_SIZE
    if needs.state_slot_bytes and users > rows:
        needed = format_bytes(users * needs.state_slot_bytes)
        what = f"{users} states of the recurrent layers need {needed}, and there is room for {rows}"
        raise DoesNotFit(what, smaller_request(min(rows, affordable(least) // blocks_for(least)), alone))
    if most < least:
        fewer = smaller_request(affordable(least) // blocks_for(least), alone)
        remedy = f"--context {most} fits" if most else fewer if users > 1 else None
        raise DoesNotFit(shortage_message(needs, least, users, left), remedy or "free memory")
    context = context or min(needs.default_context, most)
    blocks = affordable(context)
    return MemoryPlan(
        weights=needs.weights,
        context=context,
        blocks=min(blocks, CACHED_CONTEXTS * blocks_for(context)),
        block_bytes=needs.block_bytes,
        state_slots=rows,
        state_slot_bytes=needs.state_slot_bytes,
        workspace=needs.workspace(context),
        max_blocks=blocks,
        max_context=alone,
        draft_bytes=weights - needs.weights.total,
    )


def allocate_minimum(needs: MemoryNeeds, context: int | None = None) -> MemoryPlan:
    """The least that one sequence can run in, whatever is free. Raises UsageError as `allocate`."""
    check_context(needs.config.max_context, context)
    context = context or min(FORCED_CONTEXT, needs.default_context)
    blocks, rows = blocks_for(context), MIN_STATE_SLOTS if needs.state_slot_bytes else 0
    workspace = needs.workspace(context)
    return MemoryPlan(
        weights=needs.weights,
        context=context,
        blocks=blocks,
        block_bytes=needs.block_bytes,
        state_slots=rows,
        state_slot_bytes=needs.state_slot_bytes,
        workspace=workspace,
        max_blocks=blocks,
        max_context=context,
        draft_bytes=needs.weight_bytes - needs.weights.total,
    )


def check_context(max_context: int, requested: int | None) -> None:
    if requested is not None and not (type(requested) is int and 0 < requested <= max_context):
        raise UsageError(
            f"a context of {requested!r} tokens is asked for", f"give a whole number up to {max_context}"
        )


def plan_state_slots(slot_bytes: int, free: int) -> int:
    """How many recurrent states are kept: an eighth of the free memory, none if the model has no such layers."""
    if not slot_bytes:
        return 0
    rows = min(MAX_STATE_SLOTS, free // 8 // slot_bytes)
    if rows < MIN_STATE_SLOTS:
        raise DoesNotFit(
            f"two states of the recurrent layers need {format_bytes(2 * slot_bytes)}, and an eighth of the "
            f"{format_bytes(free)} that are free beside the weights is for them",
            "free memory",
        )
    return rows


def shortage_message(needs: MemoryNeeds, context: int, users: int, left: int) -> str:
    """For so much context of each user. left: bytes beside weights and states."""
    what = f"{users} contexts of {context} tokens need" if users > 1 else f"a context of {context} tokens needs"
    cache, step = users * blocks_for(context) * needs.block_bytes, needs.workspace(context)
    return (
        f"{what} {format_bytes(cache)} and a step {format_bytes(step)}; {format_bytes(left)} are free "
        f"beside the weights, and {CACHE_SHARE[needs.device_type]}% of what a step leaves of it is for contexts"
    )


def smaller_request(max_users: int, context: int) -> str | None:
    """max_users: users that there is room for; context: of one alone, 0 where none fits."""
    if max_users:
        return f"--users {max_users} fits"
    return f"--users 1 --context {context} fits" if context else None


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def host_blocks(memory: MemoryPlan, free: int) -> int:
    """How many blocks of a GPU's cache may be put aside in main memory, of which `free` bytes are free: as many as
    the whole contexts that are kept for later, within a share of it."""
    if not memory.block_bytes:
        return 0
    most = CACHED_CONTEXTS * blocks_for(memory.context)
    return min(most, free * HOST_SHARE // 100 // memory.block_bytes)
