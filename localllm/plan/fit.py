"""Whether a model fits the memory of a device, as `load` would find: known from its header, before it is read.

`pull` and `run` ask `check` before they begin.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from localllm.arch.config import ModelConfig
from localllm.arch.cost import WeightBytes
from localllm.arch.describe import describe
from localllm.checkpoint.header import Header
from localllm.device import dtype_for, kv_dtype_for
from localllm.errors import DoesNotFit, UsageError
from localllm.plan.activations import unpacked_bytes
from localllm.plan.memory import (
    CACHED_CONTEXTS,
    MAX_RUNNING,
    Memory,
    Needs,
    allocate,
    blocks_for,
    check_context,
)
from localllm.plan.weights import GGUF_BITS, QUANTS, stored_dtype, weight_bytes
from localllm.units import size

ORDER = (None, "q8_0", "int8", "q4_k_m", "int4")  # quantizations, those of most bits first


class Room(Protocol):
    """A device's memory. `Hardware` is one, and `Space`."""

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`."""
        ...

    @property
    def memory_bytes(self) -> int:
        """What a model may use."""
        ...


@dataclass(frozen=True)
class Space:
    """So much memory, of which nothing more is known."""

    kind: str
    memory_bytes: int


@dataclass(frozen=True)
class Wish:
    """What is asked of a model."""

    context: int | None = None  # tokens of each user; None: as much of the usual as fits
    users: int = 1  # at once
    quant: str | None = None  # of QUANTS or GGUF_BITS; None: as it is stored
    dtype: str = "auto"
    kv_dtype: str = "auto"  # of keys and values: the model's, int8 or fp8

    def __post_init__(self) -> None:
        """Raises UsageError for users that are none."""
        if type(self.users) is not int or self.users < 1:
            raise UsageError(f"{self.users!r} users are asked for", "give a whole number from 1")


@dataclass(frozen=True)
class Fit:
    """A model in one quantization, in the memory of a device."""

    quant: str | None
    dtype: str  # of what is not quantized
    kv_dtype: str  # of keys and values
    needs: Needs
    memory: Memory | None  # what it is given; None where it does not fit
    refusal: DoesNotFit | None  # why it does not
    context: int  # tokens, of each user
    most_context: int  # that one sequence may have; 0: none
    most_users: int  # that memory holds at the context

    @property
    def fits(self) -> bool:
        return self.refusal is None

    @property
    def weights(self) -> WeightBytes:
        return self.needs.weights

    @property
    def workspace(self) -> int:
        return self.memory.workspace if self.memory else self.needs.workspace(self.context)

    @property
    def engine_users(self) -> int:
        """Of `most_users` those whose whole contexts the engine keeps and computes at once."""
        return min(self.most_users, CACHED_CONTEXTS, MAX_RUNNING)


def check(
    header: Header, room: Room, wish: Wish, *, name: str, force: bool = False, draft: Needs | None = None
) -> Fit:
    """The fit of a model in a room, or with `force` what is known of its misfit. draft: of a model beside it.

    Raises DoesNotFit with a remedy that was tried, UsageError for a wish that makes no sense, and as `describe`.
    """
    config = describe(header.config)
    found = fit(header, config, room, wish, name=name, draft=draft)
    if found.refusal and not force:
        if draft and fit(header, config, room, wish, name=name).fits:
            raise DoesNotFit(found.refusal.message, "it fits without --draft-model, or name a smaller one")
        quants = () if header.quantization or config.encoder else QUANTS
        others = [fit(header, config, room, replace(wish, quant=quant), name=name) for quant in quants]
        raise DoesNotFit(found.refusal.message, remedy(found, others))
    return found


def remedy(found: Fit, others: Iterable[Fit]) -> str:
    """What would fit instead of what does not, the finest first."""
    assert found.refusal
    if found.most_context and found.refusal.remedy:
        return found.refusal.remedy  # the weights fit: the context was too long, or the users too many
    less = next((other for other in others if other.quant in QUANTS and other.fits), None)
    if less:
        return f"--quant {less.quant} takes {size(less.weights.total)} and fits"
    return "name a smaller model, or a device with more free memory"


def needs_of(header: Header, config: ModelConfig, kind: str, wish: Wish, *, name: str) -> Needs:
    """What a model takes of a device of this kind."""
    stored = stored_dtype(header, kind, gguf=wish.quant in GGUF_BITS)
    dtype = dtype_for(wish.dtype, stored, kind)
    kv_dtype = kv_dtype_for(wish.kv_dtype, dtype)
    weights = weight_bytes(header, config, dtype, kind, wish.quant)
    unpacked = 0 if wish.quant else unpacked_bytes(header, dtype, kind)
    return Needs(name, config, weights, kind, dtype, kv_dtype, unpacked)


def fit(
    header: Header, config: ModelConfig, room: Room, wish: Wish, *, name: str, draft: Needs | None = None
) -> Fit:
    """By the very code that `load` allocates by. Raises UsageError as `check`."""
    check_context(config.max_context, wish.context)
    needs = replace(needs_of(header, config, room.kind, wish, name=name), draft=draft)
    dtype, kv_dtype = needs.dtype, needs.kv_dtype
    most = 0
    try:
        most = allocate(needs, room.memory_bytes).most_context
        memory = allocate(needs, room.memory_bytes, wish.context, wish.users)
    except DoesNotFit as refusal:
        context = wish.context or needs.usual_context
        return Fit(wish.quant, dtype, kv_dtype, needs, None, refusal, context, most, 0)
    users = most_users(memory, memory.context)
    return Fit(wish.quant, dtype, kv_dtype, needs, memory, None, memory.context, most, users)


def most_users(memory: Memory, context: int) -> int:
    found = memory.affordable_blocks // blocks_for(context)
    return min(found, memory.rows) if memory.row_bytes else found
