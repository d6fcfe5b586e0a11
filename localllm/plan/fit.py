"""Whether a model fits the memory of a device, as `load` would find: known from its header, before it is read.

`pull` and `run` ask `check` before they begin.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from localllm.arch.config import ModelConfig
from localllm.arch.cost import WeightBytes
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.errors import DoesNotFit, UsageError
from localllm.formatting import format_bytes
from localllm.hardware.device import dtype_for, kv_dtype_for
from localllm.plan.activations import dequantized_matrix_bytes
from localllm.plan.memory import (
    CACHED_CONTEXTS,
    MAX_RUNNING,
    MemoryNeeds,
    MemoryPlan,
    allocate,
    blocks_for,
    check_context,
)
from localllm.plan.weights import GGUF_BITS, QUANTS, stored_dtype, weight_bytes

QUANT_ORDER = (None, "q8_0", "int8", "q4_k_m", "int4")  # quantizations, those of most bits first


class DeviceMemory(Protocol):
    """A device's memory. `Hardware` is one, and `Space`."""

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`."""
        ...

    @property
    def memory_bytes(self) -> int:
        """What a model may use."""
        ...


@dataclass(frozen=True)
class FreeMemory:
    """So much memory, of which nothing more is known."""

    device_type: str
    memory_bytes: int


@dataclass(frozen=True)
class LoadOptions:
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
    needs: MemoryNeeds
    memory: MemoryPlan | None  # what it is given; None where it does not fit
    refusal: DoesNotFit | None  # why it does not
    context: int  # tokens, of each user
    max_context: int  # that one sequence may have; 0: none
    max_users: int  # that memory holds at the context

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
    def concurrent_users(self) -> int:
        """Of `most_users` those whose whole contexts the engine keeps and computes at once."""
        return min(self.max_users, CACHED_CONTEXTS, MAX_RUNNING)


def check_fit(
    header: Header,
    device: DeviceMemory,
    options: LoadOptions,
    *,
    name: str,
    force: bool = False,
    draft: MemoryNeeds | None = None,
) -> Fit:
    """The fit of a model in a room, or with `force` what is known of its misfit. draft: of a model beside it.

    Raises DoesNotFit with a remedy that was tried, UsageError for a wish that makes no sense, and as `describe`.
    """
    config = parse_config(header.config)
    found = fit_model(header, config, device, options, name=name, draft=draft)
    if found.refusal and not force:
        if draft and fit_model(header, config, device, options, name=name).fits:
            raise DoesNotFit(found.refusal.message, "it fits without --draft-model, or name a smaller one")
        quants = () if header.quantization or config.encoder else QUANTS
        others = [fit_model(header, config, device, replace(options, quant=quant), name=name) for quant in quants]
        raise DoesNotFit(found.refusal.message, remedy(found, others))
    return found


def remedy(found: Fit, others: Iterable[Fit]) -> str:
    """What would fit instead of what does not, the finest first."""
    assert found.refusal
    if found.max_context and found.refusal.remedy:
        return found.refusal.remedy  # the weights fit: the context was too long, or the users too many
    less = next((other for other in others if other.quant in QUANTS and other.fits), None)
    if less:
        return f"--quant {less.quant} takes {format_bytes(less.weights.total)} and fits"
    return "name a smaller model, or a device with more free memory"


def model_needs(
    header: Header, config: ModelConfig, device_type: str, options: LoadOptions, *, name: str
) -> MemoryNeeds:
    """What a model takes of a device of this kind."""
    stored = stored_dtype(header, device_type, gguf=options.quant in GGUF_BITS)
    dtype = dtype_for(options.dtype, stored, device_type)
    kv_dtype = kv_dtype_for(options.kv_dtype, dtype)
    weights = weight_bytes(header, config, dtype, device_type, options.quant)
    unpacked = 0 if options.quant else dequantized_matrix_bytes(header, dtype, device_type)
    return MemoryNeeds(name, config, weights, device_type, dtype, kv_dtype, unpacked)


def fit_model(
    header: Header,
    config: ModelConfig,
    device: DeviceMemory,
    options: LoadOptions,
    *,
    name: str,
    draft: MemoryNeeds | None = None,
) -> Fit:
    """By the very code that `load` allocates by. Raises UsageError as `check`."""
    check_context(config.max_context, options.context)
    needs = replace(model_needs(header, config, device.device_type, options, name=name), draft=draft)
    dtype, kv_dtype = needs.dtype, needs.kv_dtype
    most = 0
    try:
        most = allocate(needs, device.memory_bytes).max_context
        memory = allocate(needs, device.memory_bytes, options.context, options.users)
    except DoesNotFit as refusal:
        context = options.context or needs.default_context
        return Fit(options.quant, dtype, kv_dtype, needs, None, refusal, context, most, 0)
    users = max_users(memory, memory.context)
    return Fit(options.quant, dtype, kv_dtype, needs, memory, None, memory.context, most, users)


def max_users(memory: MemoryPlan, context: int) -> int:
    found = memory.max_blocks // blocks_for(context)
    return min(found, memory.state_slots) if memory.state_slot_bytes else found
