"""Divides the free memory of a device among weights, recurrent states, the cache and a step's workspace.

`llm.loader.load` allocates accordingly, and `plan` reports it before a download. All sizes are in bytes.
"""

import bisect
from dataclasses import dataclass
from functools import cached_property

from localllm.arch.config import ModelConfig
from localllm.arch.cost import WeightBytes, kv_bytes_per_token, state_bytes
from localllm.errors import DoesNotFit, UsageError
from localllm.formatting import format_bytes
from localllm.plan.activations import activation_bytes, split_workspace_bytes
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes

BLOCK_SIZE = 16  # tokens
# Tokens per step. On two cores, larger chunks prefill no faster and delay other sequences longer; on a GPU, each
# chunk dequantizes all weights again (estimated: bench/NOTES.md).
TOKEN_BUDGET = {"cpu": 512, "cuda": 2048}
# Sequences per step: as many as have RUNNING_TOKENS each in the cache, within these limits. On a CPU, steps are
# bounded by arithmetic from about 64 rows on, so that more would slow down each and speed up none; on a GPU, as
# max_num_seqs of vLLM.
MIN_RUNNING = 32
MAX_RUNNING = {"cpu": 128, "cuda": 256}
RUNNING_TOKENS = 256  # of the cache per running sequence: also what is reserved for an answer without max_tokens
# Maximum number of positions that a step with drafts samples, besides sequences admitted to it: on a CPU, up to
# this many rows each have the bits that they have alone, and more would not be faster.
MAX_VERIFIED_TOKENS = {"cpu": 16, "cuda": 80}
MIN_STATE_SLOTS = 2  # recurrent states: one current, one saved
STATE_SLOTS = 2 * MIN_RUNNING  # each sequence's own, and as many saved; more if they are small
MAX_BLOCKS = 2**20  # which the pool manages individually: 16 million tokens, 0.1 GB, set up in 0.3 s
FORCED_CONTEXT = 4096  # tokens, if not even the weights fit and no context is requested
CACHED_CONTEXTS = 8  # full contexts cached for other sequences and later turns, if memory allows
SMALL_CACHE = 2**28  # bytes; caches and states up to this size have room for MAX_RUNNING sequences
# Percentage of the memory left by weights, states and workspace that the cache may take: main memory is shared
# with other programs, and a GPU's allocator needs some to find contiguous pieces.
CACHE_SHARE = {"cpu": 50, "cuda": 90}
# Memory of a GPU besides activations: captured graphs and their pool without attention's workspace, workspaces of
# cuBLAS (32 MB on Hopper) and of split products. Estimated, not measured.
GPU_WORKSPACE = 2**28
HISTORY_ELEMENT_BYTES = 4  # per token of the context and of the vocabulary, see gpu_sampler.TokenHistories
HOST_SHARE = 25  # percentage of free main memory that the host tier of a GPU's cache may take


@dataclass(frozen=True)
class MemoryNeeds:
    """Memory that a model needs on a device, regardless of how much is free."""

    name: str
    config: ModelConfig
    weights: WeightBytes
    device_type: str  # cpu or cuda
    dtype: str
    kv_dtype: str  # of keys and values
    dequantized_bytes: int = 0  # of the largest matrix that is dequantized in a step
    draft: "MemoryNeeds | None" = None  # of a draft model, which gets as many blocks and states

    @property
    def title(self) -> str:
        return f"{self.name} and its draft model {self.draft.name}" if self.draft else self.name

    @property
    def weight_bytes(self) -> int:
        return self.weights.total + (self.draft.weight_bytes if self.draft else 0)

    @cached_property
    def own_state_slot_bytes(self) -> int:
        """Bytes of one recurrent state; 0 for models without any."""
        return state_bytes(self.config, ELEMENT_BYTES[self.dtype])

    @cached_property
    def state_slot_bytes(self) -> int:
        return self.own_state_slot_bytes + (self.draft.state_slot_bytes if self.draft else 0)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block of the cache; 0 if no layer attends."""
        own_bytes = BLOCK_SIZE * kv_bytes_per_token(self.config, *kv_element_bytes(self.kv_dtype))
        return own_bytes + (self.draft.block_bytes if self.draft else 0)

    def workspace(self, context: int, running: int = MIN_RUNNING) -> int:
        """Return the bytes that the largest step needs with this context: activations, logits, dequantized
        matrices, and a GPU's own workspace. running: maximum sequences per step
        """
        tokens, sequences = TOKEN_BUDGET[self.device_type], running + MAX_VERIFIED_TOKENS[self.device_type] - 1
        if self.config.encoder:  # an encoder processes a text at once, and has no logits
            tokens, sequences = max(tokens, context), 0
        step = activation_bytes(
            self.config,
            self.dtype,
            tokens,
            context,
            sequences,
            self.dequantized_bytes,
            self.kv_dtype,
            on_gpu=self.device_type != "cpu",
        )
        draft_context = min(context, self.draft.config.max_context) if self.draft else 0
        draft_bytes = self.draft.workspace(draft_context, running) if self.draft else 0
        return step + self.gpu_workspace(context, running) + draft_bytes

    def gpu_workspace(self, context: int, running: int) -> int:
        """Return the bytes that a GPU needs besides activations; those of MIN_RUNNING histories of tokens for
        penalties are part of GPU_WORKSPACE."""
        if self.device_type == "cpu":
            return 0
        history_bytes = HISTORY_ELEMENT_BYTES * (context + self.config.vocab_size)
        # Captured steps attend in memory of their own pool.
        return GPU_WORKSPACE + split_workspace_bytes(self.config) + (running - MIN_RUNNING) * history_bytes

    @property
    def default_context(self) -> int:
        return self.config.default_context or self.config.max_context


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a loaded model."""

    weights: WeightBytes
    context: int  # maximum tokens per sequence
    blocks: int
    block_bytes: int
    state_slots: int  # of recurrent states
    state_slot_bytes: int
    workspace: int  # reserved for a running step
    max_blocks: int  # possible number of blocks at this context
    max_context: int  # possible context of one sequence
    max_running: int = MIN_RUNNING  # sequences per step
    host_blocks: int = 0  # in main memory, for blocks evicted from a GPU's cache
    draft_bytes: int = 0  # weights of a draft model, whose cache and states are included in the others

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
        """Bytes that stay allocated between steps."""
        return self.weights.total + self.draft_bytes + self.cache_bytes + self.state_bytes


def allocate(needs: MemoryNeeds, free: int, context: int | None = None, users: int = 1) -> MemoryPlan:
    """Plan a model's share of `free` bytes.

    context: in tokens, None for as much of the default as fits; users: number of sequences with this context.
    Raises DoesNotFit with a remedy, and UsageError for a context that the model does not support.
    """
    model_context = needs.config.max_context
    check_context(model_context, context)
    weights = needs.weight_bytes
    if weights > free:
        raise DoesNotFit(
            f"the weights of {needs.title} need {format_bytes(weights)} in {needs.dtype}, "
            f"{format_bytes(free)} are free",
            "use a smaller model, or free memory",
        )
    remaining = free - weights
    state_slots = plan_state_slots(needs.state_slot_bytes, remaining, needs.device_type)
    remaining -= state_slots * needs.state_slot_bytes

    def affordable(context: int) -> int:
        share = max(0, remaining - needs.workspace(context)) * CACHE_SHARE[needs.device_type] // 100
        return min(share // max(1, needs.block_bytes), MAX_BLOCKS)  # block_bytes is 0 if no layer attends

    def most_context(users: int) -> int:
        def too_long(blocks: int) -> bool:
            return affordable(min(model_context, blocks * BLOCK_SIZE)) < users * blocks

        lengths = range(1, min(blocks_for(model_context), MAX_BLOCKS) + 1)  # in blocks
        return min(model_context, bisect.bisect_left(lengths, True, key=too_long) * BLOCK_SIZE)

    single_max, max_possible = most_context(1), most_context(users)
    min_context = context or BLOCK_SIZE
    if needs.state_slot_bytes and users > state_slots:
        needed = format_bytes(users * needs.state_slot_bytes)
        reason = f"{users} states of the recurrent layers need {needed}, and there is room for {state_slots}"
        raise DoesNotFit(
            reason,
            smaller_request(min(state_slots, affordable(min_context) // blocks_for(min_context)), single_max),
        )
    if max_possible < min_context:
        fewer_users = smaller_request(affordable(min_context) // blocks_for(min_context), single_max)
        remedy = f"--context {max_possible} fits" if max_possible else fewer_users if users > 1 else None
        raise DoesNotFit(shortage_message(needs, min_context, users, remaining), remedy or "free memory")
    context = context or min(needs.default_context, max_possible)
    possible_blocks = affordable(context)
    blocks = min(possible_blocks, cached_contexts(needs, context) * blocks_for(context))
    unused = remaining - needs.workspace(context) - blocks * needs.block_bytes
    max_running = plan_running(needs, context, blocks, state_slots, unused // 2)
    return MemoryPlan(
        weights=needs.weights,
        context=context,
        blocks=blocks,
        block_bytes=needs.block_bytes,
        state_slots=state_slots,
        state_slot_bytes=needs.state_slot_bytes,
        workspace=needs.workspace(context, max_running),
        max_blocks=possible_blocks,
        max_context=single_max,
        max_running=max_running,
        draft_bytes=weights - needs.weights.total,
    )


def cached_contexts(needs: MemoryNeeds, context: int) -> int:
    """Return how many full contexts the cache holds if memory allows."""
    context_bytes = blocks_for(context) * needs.block_bytes
    small = SMALL_CACHE // context_bytes if context_bytes else 0
    return max(CACHED_CONTEXTS, min(MAX_RUNNING[needs.device_type], small))


def plan_running(needs: MemoryNeeds, context: int, blocks: int, state_slots: int, free: int) -> int:
    """Return the most sequences of a step, at least MIN_RUNNING. free: bytes for a larger workspace than theirs"""
    most = min(MAX_RUNNING[needs.device_type], blocks * BLOCK_SIZE // RUNNING_TOKENS)
    if needs.state_slot_bytes:
        most = min(most, state_slots // 2)
    workspace = needs.workspace(context)

    def too_many(running: int) -> bool:
        return needs.workspace(context, running) - workspace > free

    more = range(MIN_RUNNING + 1, most + 1)
    return MIN_RUNNING + bisect.bisect_left(more, True, key=too_many)


def allocate_minimum(needs: MemoryNeeds, context: int | None = None) -> MemoryPlan:
    """Return the minimum for one sequence, whatever is free. Raises UsageError like `allocate`."""
    check_context(needs.config.max_context, context)
    context = context or min(FORCED_CONTEXT, needs.default_context)
    blocks, state_slots = blocks_for(context), MIN_STATE_SLOTS if needs.state_slot_bytes else 0
    workspace = needs.workspace(context)
    return MemoryPlan(
        weights=needs.weights,
        context=context,
        blocks=blocks,
        block_bytes=needs.block_bytes,
        state_slots=state_slots,
        state_slot_bytes=needs.state_slot_bytes,
        workspace=workspace,
        max_blocks=blocks,
        max_context=context,
        draft_bytes=needs.weight_bytes - needs.weights.total,
    )


def check_context(max_context: int, requested: int | None) -> None:
    if requested is not None and not (type(requested) is int and 0 < requested <= max_context):
        raise UsageError(
            f"a context of {requested!r} tokens is not possible", f"give a whole number up to {max_context}"
        )


def plan_state_slots(slot_bytes: int, free: int, device_type: str) -> int:
    """Return how many recurrent states fit in an eighth of the free memory; 0 for a model without any."""
    if not slot_bytes:
        return 0
    wanted = max(STATE_SLOTS, min(2 * MAX_RUNNING[device_type], SMALL_CACHE // slot_bytes))
    slots = min(wanted, free // 8 // slot_bytes)
    if slots < MIN_STATE_SLOTS:
        raise DoesNotFit(
            f"two states of the recurrent layers need {format_bytes(2 * slot_bytes)}, but only an eighth of the "
            f"{format_bytes(free)} left by the weights is available to them",
            "free memory",
        )
    return slots


def shortage_message(needs: MemoryNeeds, context: int, users: int, left: int) -> str:
    """Return an error message for contexts that do not fit. left: bytes besides weights and states"""
    requested = (
        f"{users} contexts of {context} tokens need" if users > 1 else f"a context of {context} tokens needs"
    )
    cache, step = users * blocks_for(context) * needs.block_bytes, needs.workspace(context)
    return (
        f"{requested} {format_bytes(cache)} and a step {format_bytes(step)}; the weights leave "
        f"{format_bytes(left)}, of which contexts may use {CACHE_SHARE[needs.device_type]}% after the step"
    )


def smaller_request(max_users: int, context: int) -> str | None:
    """Return flags for a smaller request. max_users: users that fit; context: that fits for one, 0 for none"""
    if max_users:
        return f"--users {max_users} fits"
    return f"--users 1 --context {context} fits" if context else None


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def host_blocks(memory: MemoryPlan, free: int) -> int:
    """Return how many blocks the host tier may hold: those of CACHED_CONTEXTS contexts, within HOST_SHARE.

    free: bytes of free main memory
    """
    if not memory.block_bytes:
        return 0
    wanted = CACHED_CONTEXTS * blocks_for(memory.context)
    return min(wanted, free * HOST_SHARE // 100 // memory.block_bytes)
