"""How the free memory of a device is shared out between weights, recurrent states, the cache and the rest.

`llm.load` allocates what is told here, and `plan` says it before a download. All sizes are bytes.
"""

from dataclasses import dataclass

from localllm.arch.config import ModelConfig
from localllm.arch.cost import WeightBytes, kv_bytes_per_token, state_bytes
from localllm.errors import DoesNotFit, UsageError
from localllm.quant.packing import ELEMENT_BYTES, kv_bytes
from localllm.units import size

BLOCK_SIZE = 16  # tokens
TOKEN_BUDGET = 512  # tokens a step; on two cores larger chunks prefill no faster and hold others up longer
MAX_RUNNING = 32  # sequences in one step
LEAST_ROWS = 2  # recurrent states: one to work on, one to come back to
MOST_ROWS = 2 * MAX_RUNNING  # each sequence's own, and as many to come back to
MOST_BLOCKS = 2**20  # the pool counts them one by one: 16 million tokens, 0.1 GB, set up in 0.3 s
FORCED_CONTEXT = 4096  # tokens, where not even the weights fit and nobody asks for more
CACHED_CONTEXTS = 8  # so many full contexts are kept for other sequences and later turns, memory allowing


@dataclass(frozen=True)
class Memory:
    """What a loaded model holds."""

    weights: WeightBytes
    context: int  # most tokens of a sequence
    blocks: int
    block_bytes: int
    rows: int  # of recurrent states
    row_bytes: int
    affordable_blocks: int  # that half of what the weights and rows leave could hold

    @property
    def cache_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def state_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def total(self) -> int:
        return self.weights.total + self.cache_bytes + self.state_bytes


def allocate(
    name: str,
    config: ModelConfig,
    weights: WeightBytes,
    dtype: str,
    free: int,
    context: int | None = None,
    kv_dtype: str | None = None,
) -> Memory:
    """What a model gets of `free` bytes. context: in tokens, None for as much of the usual as fits; kv_dtype: of
    keys and values, None: as `dtype`.

    Raises DoesNotFit, with what would, and UsageError for a context that the model does not have.
    """
    check_context(config.max_context, context)
    if weights.total > free:
        raise DoesNotFit(
            f"the weights of {name} need {size(weights.total)} in {dtype}, {size(free)} are free",
            "name a smaller model, or free memory",
        )
    left = free - weights.total
    row_bytes = state_bytes(config, ELEMENT_BYTES[dtype])
    rows = plan_rows(row_bytes, left)
    left -= rows * row_bytes
    block_bytes = BLOCK_SIZE * kv_bytes_per_token(config, *kv_bytes(kv_dtype or dtype))
    affordable = affordable_blocks(block_bytes, left)
    usual = config.default_context or config.max_context
    context, blocks = plan_context(usual, context, block_bytes, left)
    return Memory(weights, context, blocks, block_bytes, rows, row_bytes, affordable)


def allocate_least(
    config: ModelConfig, weights: WeightBytes, dtype: str, context: int | None = None, kv_dtype: str | None = None
) -> Memory:
    """The least that one sequence can run in, whatever is free. Raises UsageError as `allocate`."""
    check_context(config.max_context, context)
    context = context or min(FORCED_CONTEXT, config.default_context or config.max_context)
    blocks, row_bytes = blocks_for(context), state_bytes(config, ELEMENT_BYTES[dtype])
    block_bytes = BLOCK_SIZE * kv_bytes_per_token(config, *kv_bytes(kv_dtype or dtype))
    return Memory(weights, context, blocks, block_bytes, LEAST_ROWS if row_bytes else 0, row_bytes, blocks)


def check_context(longest: int, asked: int | None) -> None:
    if asked is not None and not (type(asked) is int and 0 < asked <= longest):
        raise UsageError(f"a context of {asked!r} tokens is asked for", f"give a whole number up to {longest}")


def plan_rows(row_bytes: int, free: int) -> int:
    """How many recurrent states are kept: an eighth of the free memory, none if the model has no such layers."""
    if not row_bytes:
        return 0
    rows = min(MOST_ROWS, free // 8 // row_bytes)
    if rows < LEAST_ROWS:
        raise DoesNotFit(
            f"two states of the recurrent layers need {size(2 * row_bytes)}, and an eighth of the "
            f"{size(free)} that are free beside the weights is for them",
            "free memory",
        )
    return rows


def affordable_blocks(block_bytes: int, free: int) -> int:
    """How many blocks the cache may have: half of the free memory is left alone."""
    return min(free // 2 // max(1, block_bytes), MOST_BLOCKS)  # 0 bytes: no layer attends


def plan_context(usual: int, asked: int | None, block_bytes: int, free: int) -> tuple[int, int]:
    """How long one sequence may be, and how many blocks the cache has.

    usual: where nobody asks; asked: by the user, None for as much of the usual as fits (both in tokens).
    """
    affordable = affordable_blocks(block_bytes, free)
    least = blocks_for(asked or 1)
    if affordable < least:
        raise DoesNotFit(
            f"a context of {asked or BLOCK_SIZE} tokens needs {size(least * block_bytes)}, and of the "
            f"{size(free)} that are free beside the weights half is kept for the rest",
            f"--context {affordable * BLOCK_SIZE} fits" if affordable else "free memory",
        )
    context = min(asked or usual, affordable * BLOCK_SIZE)
    return context, min(affordable, CACHED_CONTEXTS * blocks_for(context))


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
