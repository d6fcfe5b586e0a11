"""Whether a model fits the memory of a device, with the arithmetic of `load`: known from its header.

`pull` and `run` call `check_fit` before they begin.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from localllm.arch.config import ModelConfig
from localllm.arch.cost import WeightBytes, why_not_4_bit_cache
from localllm.arch.describe import parse_config
from localllm.arch.stages import Position, check_processes
from localllm.checkpoint.header import Header
from localllm.checkpoint.partition import divide_model, part_of_model
from localllm.errors import DoesNotFit, UnsupportedModel, UsageError
from localllm.formatting import format_bytes
from localllm.hardware.device import dtype_for, kv_dtype_for
from localllm.plan.activations import dequantized_matrix_bytes
from localllm.plan.memory import (
    BLOCK_SIZE,
    MIN_STATE_SLOTS,
    MemoryNeeds,
    MemoryPlan,
    allocate,
    blocks_for,
    check_context,
)
from localllm.plan.weights import GGUF_BITS, QUANTS, stored_dtype, weight_bytes
from localllm.quant.packing import KV_4BIT_DTYPES, QUANTIZED_KV_BYTES

COMFORTABLE_SHARE = 3 / 4  # of the memory: other programs need some, and conversations grow
GPUS_PER_MACHINE = 8  # that are proposed for a model that does not fit
MACHINES = 8  # without GPUs, likewise
QUANT_ORDER = (None, "q8_0", "int8", "q4_k_m", "int4")  # in descending order of bits


class DeviceMemory(Protocol):
    """The memory of a device, like DeviceSpec and FreeMemory."""

    @property
    def device_type(self) -> str:
        """`cpu` or `cuda`"""
        ...

    @property
    def memory_bytes(self) -> int:
        """Bytes available to a model."""
        ...

    @property
    def stage_bytes(self) -> tuple[int, ...]:
        """Bytes for a process of each pipeline stage, if stages are known to have memories of their own."""
        ...

    def machine_bytes(self) -> tuple[int, ...]:
        """Return the bytes available on each such device of the machine, in their order."""
        ...


@dataclass(frozen=True)
class FreeMemory:
    """An amount of memory without a specific device."""

    device_type: str
    memory_bytes: int
    bandwidth: float | None = None  # bytes per second that decoding reads, if it was measured
    stage_bytes: tuple[int, ...] = ()  # of the devices of each pipeline stage, if they have memories of their own
    find_machine_bytes: Callable[[], tuple[int, ...]] | None = field(default=None, compare=False)

    def machine_bytes(self) -> tuple[int, ...]:
        return self.find_machine_bytes() if self.find_machine_bytes else (self.memory_bytes,)


@dataclass(frozen=True)
class LoadOptions:
    """The options with which a model is to be loaded."""

    context: int | None = None  # tokens per user; None: as much of the default as fits
    users: int = 1  # concurrent
    quant: str | None = None  # of QUANTS or GGUF_BITS; None: as stored
    dtype: str = "auto"
    kv_dtype: str = "auto"  # of keys and values: the model's dtype, int8, fp8, k8v4 or int4
    tensor_parallel: int = 1  # processes among which each layer is divided
    pipeline_parallel: int = 1  # stages of layers
    stage_shares: tuple[float, ...] = ()  # of the weights; (): by the memory of their devices
    expert_parallel: bool = False  # divide a mixture by experts instead of their columns
    workers: tuple[str, ...] = ()  # HOST:PORT of those that have the stages behind the first
    token_file: str | None = None  # with their token

    @property
    def processes(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def in_one_process(self) -> "LoadOptions":
        """Return these options for a model that is not divided."""
        return replace(
            self, tensor_parallel=1, pipeline_parallel=1, stage_shares=(), expert_parallel=False, workers=()
        )

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid number of users or processes, or experts that are not divided."""
        check_processes(self.tensor_parallel, self.pipeline_parallel)
        if self.expert_parallel and self.tensor_parallel == 1:
            raise UsageError(
                "--expert-parallel divides experts among the processes of --tensor-parallel",
                "give a number of them",
            )
        if type(self.users) is not int or self.users < 1:
            raise UsageError(f"{self.users!r} is not a number of users", "give a whole number from 1")


@dataclass(frozen=True)
class Fit:
    """The memory of a model in one quantization on a device."""

    quant: str | None
    dtype: str  # of unquantized weights
    kv_dtype: str  # of keys and values
    needs: MemoryNeeds
    memory: MemoryPlan | None  # None if it does not fit
    refusal: DoesNotFit | None  # why it does not fit
    context: int  # tokens per user
    max_context: int  # of one sequence; 0: none fits
    max_users: int  # that fit with this context
    borders: tuple[int, ...] = ()  # between the layers of pipeline stages: see `Position`

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
    def required_bytes(self) -> int:
        """Memory for one conversation that fills its context."""
        states = self.memory.state_bytes if self.memory else MIN_STATE_SLOTS * self.needs.state_slot_bytes
        cache = blocks_for(self.context) * self.needs.block_bytes
        return self.weights.total + cache + states + self.workspace

    @property
    def concurrent_users(self) -> int:
        """Users, up to `max_users`, whose whole contexts the engine caches and computes at once."""
        if self.memory is None:
            return 0
        return min(self.max_users, self.memory.blocks // blocks_for(self.context), self.memory.max_running)


def check_fit(
    header: Header,
    device: DeviceMemory,
    options: LoadOptions,
    *,
    name: str,
    force: bool = False,
    draft: MemoryNeeds | None = None,
) -> Fit:
    """Return the fit of a model, or with `force` also what is known if it does not fit. draft: of a draft model

    Raises DoesNotFit with a verified remedy, UsageError for invalid options, and like `parse_config`.
    """
    config = parse_config(header.config)
    fit = fit_model(header, config, device, options, name=name, draft=draft)
    if fit.refusal and not force:
        if draft and fit_model(header, config, device, options, name=name).fits:
            raise DoesNotFit(fit.refusal.message, "it fits without --draft-model, or name a smaller one")
        quants = () if header.quantization or config.encoder else QUANTS
        smaller = fit_quants(header, config, device, options, quants, name=name)
        raise DoesNotFit(
            fit.refusal.message, find_remedy(header, config, device, options, fit, smaller.values(), name=name)
        )
    return fit


def fit_quants(
    header: Header,
    config: ModelConfig,
    device: DeviceMemory,
    options: LoadOptions,
    quants: Iterable[str | None],
    *,
    name: str,
) -> dict[str | None, Fit]:
    """Return the fit in each quantization that the model can be loaded in, None for as stored."""
    fits: dict[str | None, Fit] = {}
    for quant in quants:
        with contextlib.suppress(UnsupportedModel, UsageError):
            fits[quant] = fit_model(header, config, device, replace(options, quant=quant), name=name)
    return fits


def find_remedy(
    header: Header,
    config: ModelConfig,
    device: DeviceMemory,
    options: LoadOptions,
    fit: Fit,
    alternatives: Iterable[Fit],
    *,
    name: str,
) -> str:
    """Return a verified remedy for a model that does not fit, preferring the least loss of quality.

    alternatives: the model in other quantizations
    """
    assert fit.refusal
    divided = fit_on_machine(header, config, device, options, name=name)
    on_machine = f"{flags_of(divided)} fits the GPUs of this machine" if divided else None
    if fit.max_context and fit.refusal.remedy:  # the weights fit, but contexts are too long, or users too many
        return f"{fit.refusal.remedy}, or {on_machine}" if on_machine else fit.refusal.remedy
    if on_machine:
        return on_machine
    smaller = next(
        (alternative for alternative in alternatives if alternative.quant in QUANTS and alternative.fits), None
    )
    if smaller:
        return f"--quant {smaller.quant} takes {format_bytes(smaller.weights.total)} and fits"
    if larger := fit_on_larger_machine(header, config, device, options, name=name):
        return (
            f"name a smaller model, or use {larger.processes} GPUs with as much free memory and {flags_of(larger)}"
        )
    if options.workers or (device.device_type == "cpu" and device.stage_bytes):
        return "name a smaller model, or add a machine to --workers"
    if machines := fit_on_machines(header, config, device, options, name=name):
        return f"name a smaller model, or use {machines} machines with as much free memory and --workers"
    return "name a smaller model, or a device with more free memory"


def fit_on_machine(
    header: Header, config: ModelConfig, device: DeviceMemory, options: LoadOptions, *, name: str
) -> LoadOptions | None:
    """Return the options with the fewest GPUs of the machine that the model fits; None if it fits none."""
    if device.device_type == "cpu" or options.workers:
        return None
    free = device.machine_bytes()
    for divided in further_divisions(options, len(free), config):
        smallest = FreeMemory(device.device_type, min(free[: divided.processes]))
        if fits_divided(header, config, smallest, divided, name=name):
            return divided
    return None


def fit_on_larger_machine(
    header: Header, config: ModelConfig, device: DeviceMemory, options: LoadOptions, *, name: str
) -> LoadOptions | None:
    """Return the options with the fewest GPUs like this one that the model fits, of those that machines have.

    None for a CPU, whose memory all processes share.
    """
    if device.device_type == "cpu" or options.workers:
        return None
    like = FreeMemory(device.device_type, device.memory_bytes)
    divisions = further_divisions(options, GPUS_PER_MACHINE, config)
    return next((each for each in divisions if fits_divided(header, config, like, each, name=name)), None)


def fit_on_machines(
    header: Header, config: ModelConfig, device: DeviceMemory, options: LoadOptions, *, name: str
) -> int | None:
    """Return the fewest machines without GPUs like this one that the model fits, with a stage on each."""
    if device.device_type != "cpu" or options.processes > 1:
        return None
    for count in range(2, MACHINES + 1):
        like = FreeMemory("cpu", device.memory_bytes, stage_bytes=(device.memory_bytes,) * count)
        if fits_divided(header, config, like, replace(options, pipeline_parallel=count), name=name):
            return count
    return None


def fits_divided(
    header: Header, config: ModelConfig, device: DeviceMemory, divided: LoadOptions, *, name: str
) -> bool:
    """Return whether the model can be divided so, and fits on devices like this one."""
    try:
        return fit_model(header, config, device, divided, name=name).fits
    except (UnsupportedModel, UsageError):
        return False


def powers_of_2(limit: int) -> list[int]:
    """Return 2, 4, 8, ... up to a limit."""
    return [1 << n for n in range(1, limit.bit_length()) if 1 << n <= limit]


def divisions_of(options: LoadOptions, devices: int, config: ModelConfig) -> list[LoadOptions]:
    """Return the options with each way to divide a model among several devices of a machine, in the order of
    preference: GPUs compute whole experts one by one, and stages one after the other.
    """
    whole, sizes = options.in_one_process(), powers_of_2(devices)
    return [
        *(replace(whole, tensor_parallel=size) for size in sizes),
        *(replace(whole, tensor_parallel=size, expert_parallel=True) for size in sizes if config.mixtures),
        *(replace(whole, pipeline_parallel=stages) for stages in range(2, devices + 1)),
    ]


def further_divisions(options: LoadOptions, devices: int, config: ModelConfig) -> list[LoadOptions]:
    """Return the divisions among more devices than the options already use."""
    return [each for each in divisions_of(options, devices, config) if each.processes > options.processes]


def flags_of(options: LoadOptions) -> str:
    """Return the flags that divide a model; empty for one process."""
    flags, addresses = [], list(options.workers)
    if addresses:
        listed = addresses if len(addresses) < 4 else [addresses[0], "...", addresses[-1]]
        flags.append(f"--workers {','.join(listed)}")
    counts = {"--tensor-parallel": options.tensor_parallel}
    counts |= {} if addresses else {"--pipeline-parallel": options.pipeline_parallel}
    flags += (f"{flag} {count}" for flag, count in counts.items() if count > 1)
    return " ".join([*flags, *(["--expert-parallel"] if options.expert_parallel else [])])


def model_needs(
    header: Header, config: ModelConfig, device_type: str, options: LoadOptions, *, name: str
) -> MemoryNeeds:
    """Return the memory needs of a model on this type of device.

    Raises UsageError for dtypes that the device or the model does not support.
    """
    stored = stored_dtype(header, device_type, gguf=options.quant in GGUF_BITS)
    dtype = dtype_for(options.dtype, stored, device_type)
    kv_dtype = kv_dtype_for(options.kv_dtype, dtype)
    check_kv_dtype(config, kv_dtype, name)
    weights = weight_bytes(header, config, dtype, device_type, options.quant)
    unpacked = 0 if options.quant else dequantized_matrix_bytes(header, dtype, device_type)
    return MemoryNeeds(name, config, weights, device_type, dtype, kv_dtype, unpacked)


def check_kv_dtype(config: ModelConfig, kv_dtype: str, name: str) -> None:
    """Raise UsageError if the model's keys and values cannot be stored in 4 bits."""
    if kv_dtype in KV_4BIT_DTYPES and (reason := why_not_4_bit_cache(config)):
        raise UsageError(f"keys and values of {name!r} cannot be in {kv_dtype}: {reason}", "use --kv-dtype int8")


def fit_model(
    header: Header,
    config: ModelConfig,
    device: DeviceMemory,
    options: LoadOptions,
    *,
    name: str,
    draft: MemoryNeeds | None = None,
) -> Fit:
    """Compute the fit with the code by which `load` allocates: with tensor parallelism that of one process, with
    pipeline parallelism on GPUs or machines that of the stage with the least room.

    Raises UsageError like `check_fit`, and UnsupportedModel for a model that cannot be divided.
    """
    check_context(config.max_context, options.context)
    borders: tuple[int, ...] = ()
    if options.pipeline_parallel > 1:
        stage_bytes = tuple(max(each, 1) for each in device.stage_bytes)  # a machine may have nothing left
        shares = options.stage_shares or stage_bytes or (1.0,) * options.pipeline_parallel
        borders = divide_model(header, config, shares)
    position = Position(0, options.tensor_parallel, borders, options.expert_parallel)
    memory_bytes = device.memory_bytes
    apart = device.device_type != "cpu" or device.stage_bytes  # stages on a CPU share its memory
    if not borders or not apart:
        whole = replace(position, borders=())
        part = part_of_model(header, config, whole)
        memory_bytes //= whole.size if device.device_type == "cpu" else 1  # GPUs have a memory each
        needs = replace(model_needs(*part, device.device_type, options, name=name), draft=draft)
        return replace(fit_needs(needs, memory_bytes, options), borders=borders)
    fits = []
    for index, free in enumerate(stage_memory(device, options)):
        part = part_of_model(header, config, replace(position, rank=index * options.tensor_parallel))
        stage_name = f"stage {index + 1} of {options.pipeline_parallel} of {name}"
        needs = model_needs(*part, device.device_type, options, name=stage_name)
        fits.append(fit_needs(replace(needs, draft=draft if index == 0 else None), free, options))
    return replace(tightest_fit(fits), borders=borders)


def stage_memory(device: DeviceMemory, options: LoadOptions) -> tuple[int, ...]:
    """Return the memory of a process of each pipeline stage."""
    return device.stage_bytes or (device.memory_bytes,) * options.pipeline_parallel


def tightest_fit(stages: Sequence[Fit]) -> Fit:
    """Return the fit of the stage with the least room, as small as all stages have it."""
    if refused := [fit for fit in stages if fit.refusal]:
        return refused[0]
    plans = [(fit, fit.memory) for fit in stages if fit.memory]
    # A stage without recurrent layers would say that no stage has any.
    fit, memory = min(plans, key=lambda each: (not each[0].needs.own_state_slot_bytes, each[1].blocks))
    context = min(plan.context for _, plan in plans)
    slots = [plan.state_slots for _, plan in plans if plan.state_slots]
    smallest = replace(
        memory,
        context=context,
        blocks=min(plan.blocks for _, plan in plans),
        max_blocks=min(plan.max_blocks for _, plan in plans),
        max_context=min(plan.max_context for _, plan in plans),
        state_slots=min(slots, default=0),
        max_running=min(plan.max_running for _, plan in plans),
    )
    users = min(each.max_users for each in stages)
    return replace(fit, memory=smallest, context=context, max_context=smallest.max_context, max_users=users)


def fit_needs(needs: MemoryNeeds, memory_bytes: int, options: LoadOptions) -> Fit:
    """Compute the fit of what one process needs."""
    dtype, kv_dtype = needs.dtype, needs.kv_dtype
    max_context = 0
    try:
        max_context = allocate(needs, memory_bytes).max_context
        memory = allocate(needs, memory_bytes, options.context, options.users)
    except DoesNotFit as refusal:
        context = options.context or needs.default_context
        return Fit(options.quant, dtype, kv_dtype, needs, None, refusal, context, max_context, 0)
    users = max_users(memory, memory.context)
    return Fit(options.quant, dtype, kv_dtype, needs, memory, None, memory.context, max_context, users)


def max_users(memory: MemoryPlan, context: int) -> int:
    users = memory.max_blocks // blocks_for(context)
    return min(users, memory.state_slots) if memory.state_slot_bytes else users


def shortage_error(memory: MemoryPlan, device: str, kv_dtype: str, quantized: bool) -> DoesNotFit:
    """Return the error for a device with less memory than planned, with the plan's sizes and flags that reduce
    them.

    kv_dtype: data type of the KV cache; quantized: whether the weights are.
    """
    parts = {
        "weights": memory.weights.total,
        "a draft model's": memory.draft_bytes,
        f"a cache of {memory.blocks * BLOCK_SIZE} tokens": memory.cache_bytes,
        "recurrent states": memory.state_bytes,
        "a step": memory.workspace,
    }
    listed = ", ".join(f"{format_bytes(nbytes)} for {use}" for use, nbytes in parts.items() if nbytes)
    return DoesNotFit(
        f"{device} is out of memory; {format_bytes(memory.total + memory.workspace)} were planned: {listed}",
        "free memory that other programs use, or use less with "
        + " or ".join(memory_saving_flags(memory, kv_dtype, quantized)),
    )


def memory_saving_flags(memory: MemoryPlan, kv_dtype: str, quantized: bool) -> list[str]:
    """Return flags that reduce memory, in descending order of savings."""
    saved = {f"--context {max(1, memory.context // 2)}": memory.cache_bytes / 2 + 1}
    if memory.cache_bytes and kv_dtype not in QUANTIZED_KV_BYTES:
        saved["--kv-dtype int8"] = memory.cache_bytes / 2
    if not quantized:
        saved["--quant int4"] = memory.weights.total * 3 / 4
    return sorted(saved, key=lambda flag: -saved[flag])
