"""Whether a model fits a device, and how fast it would be there: known from its header, before its weights are.

Raises nothing of its own for a model that does not fit: the plan says it. `check` raises it.
"""

from dataclasses import dataclass

from localllm.arch.config import ModelConfig
from localllm.arch.cost import WeightBytes, kv_bytes_per_token, state_bytes
from localllm.arch.describe import describe
from localllm.checkpoint.header import Header
from localllm.device import dtype_for
from localllm.errors import DoesNotFit, UsageError
from localllm.hardware import Hardware
from localllm.plan.activations import activation_bytes, unpacked_bytes
from localllm.plan.memory import (
    BLOCK_SIZE,
    CACHED_CONTEXTS,
    MAX_RUNNING,
    TOKEN_BUDGET,
    Memory,
    allocate,
    blocks_for,
    check_context,
    gigabytes,
)
from localllm.plan.speed import Speed, speed
from localllm.plan.weights import GGUF_BITS, QUANTS, stored_dtype, weight_bytes
from localllm.quant.packing import ELEMENT_BYTES

SCALE_BYTES = 2  # of keys and values in 8 bits


@dataclass(frozen=True)
class Choice:
    """The model in one quantization."""

    quant: str | None  # None: as it is stored
    dtype: str  # of what is not quantized, and of the cache
    weights: WeightBytes
    memory: Memory | None  # what it would be given; None where it does not fit
    refusal: DoesNotFit | None  # why it does not
    context: int  # tokens, of one sequence
    most_context: int  # that one sequence may have; 0: none
    ceiling: Speed

    @property
    def fits(self) -> bool:
        return self.refusal is None

    @property
    def runs_today(self) -> bool:
        """localllm reads GGUF files and does not quantize yet."""
        return self.quant not in QUANTS


@dataclass(frozen=True)
class Expectation:
    """The rates that steps reach on this machine, and where that is known from."""

    bandwidth: float  # bytes/s
    flops: float
    source: str


@dataclass(frozen=True)
class Plan:
    """A model on a device. Sizes are bytes, lengths tokens."""

    name: str
    hardware: Hardware
    stored_as: str | None  # the quantization of the files
    chosen: Choice  # what was asked for; the rest of the fields is about it
    choices: tuple[Choice, ...]  # the same in every quantization, what is stored first
    context: int
    users: int
    prompt: int
    max_context: int  # of the model
    kv_bytes_per_token: int
    kv_bytes_per_token_in_8_bits: int  # with a scale a vector; localllm does not do that yet
    kv_bytes: int  # of all users with the whole context
    state_bytes_per_sequence: int
    state_bytes: int  # of all users
    activation_bytes: int
    most_users: int  # that memory holds at the context
    expected: Speed | None
    expectation: Expectation | None

    @property
    def fits(self) -> bool:
        return self.chosen.fits

    @property
    def kv_bytes_per_sequence(self) -> int:
        return self.kv_bytes // self.users

    @property
    def total_bytes(self) -> int:
        """What all users need at once."""
        return self.chosen.weights.total + self.kv_bytes + self.state_bytes + self.activation_bytes

    @property
    def best(self) -> Choice | None:
        """The finest quantization that fits, whether it can be had today or not."""
        return next((c for c in self.choices if c.fits and c.quant not in GGUF_BITS), None)

    @property
    def best_today(self) -> Choice | None:
        return next((c for c in self.choices if c.fits and c.runs_today), None)

    @property
    def engine_users(self) -> int:
        """How many whole contexts the engine keeps, whatever the memory."""
        return min(self.most_users, CACHED_CONTEXTS, MAX_RUNNING)


def plan(
    header: Header,
    hardware: Hardware,
    *,
    name: str,
    context: int | None = None,
    users: int = 1,
    prompt: int | None = None,
    quant: str | None = None,
    dtype: str = "auto",
    expectation: Expectation | None = None,
) -> Plan:
    """What `header`'s model takes of `hardware`, by the code that `load` allocates by.

    context: of each user, None for as much of the usual as fits; prompt: whose TTFT is predicted, None for the
    whole context. Raises UsageError for numbers or names that make no sense, and as `describe`.
    """
    config = describe(header.config)
    check_context(config.max_context, context)
    if type(users) is not int or users < 1:
        raise UsageError(f"{users!r} users are asked for", "give a whole number from 1")
    if prompt is not None and (type(prompt) is not int or not 1 <= prompt <= config.max_context):
        raise UsageError(f"a prompt of {prompt!r} tokens is asked for", f"give one up to {config.max_context}")

    def choice(quant: str | None) -> Choice:
        return make_choice(header, config, hardware, name, context, users, prompt, quant, dtype)

    chosen = choice(quant)
    others = [] if header.quantization else [q for q in ("int8", "q8_0", "int4", "q4_k_m") if q != quant]
    found = {quant: chosen} | {q: choice(q) for q in [*others, *([None] if quant else [])]}
    order = [q for q in (None, "int8", "q8_0", "int4", "q4_k_m") if q in found]
    element = ELEMENT_BYTES[chosen.dtype]
    kv = kv_bytes_per_token(config, element)
    length = chosen.context
    states = state_bytes(config, element)
    asked = min(prompt or length, config.max_context)
    tokens = min(TOKEN_BUDGET, max(asked, users))
    unpacked = 0 if quant else unpacked_bytes(header, chosen.dtype, hardware.kind)
    return Plan(
        name=name,
        hardware=hardware,
        stored_as=header.quantization,
        chosen=chosen,
        choices=tuple(found[q] for q in order),
        context=length,
        users=users,
        prompt=asked,
        max_context=config.max_context,
        kv_bytes_per_token=kv,
        kv_bytes_per_token_in_8_bits=kv_bytes_per_token(config, 1, SCALE_BYTES),
        kv_bytes=users * blocks_for(length) * BLOCK_SIZE * kv,
        state_bytes_per_sequence=states,
        state_bytes=users * states,
        activation_bytes=activation_bytes(config, chosen.dtype, tokens, length, min(users, MAX_RUNNING), unpacked),
        most_users=most_users(chosen.memory, length) if chosen.memory else 0,
        expected=speed(config, chosen.weights, element, expectation, context=length, prompt=asked, users=users)
        if expectation
        else None,
        expectation=expectation,
    )


def make_choice(
    header: Header,
    config: ModelConfig,
    hardware: Hardware,
    name: str,
    context: int | None,
    users: int,
    prompt: int | None,
    quant: str | None,
    dtype: str,
) -> Choice:
    stored = stored_dtype(header, hardware.kind)
    if quant in GGUF_BITS:
        stored = "F32" if hardware.kind == "cpu" else "BF16"
    kind = dtype_for(dtype, stored, hardware.kind)
    weights = weight_bytes(header, config, kind, hardware.kind, quant)
    usual = config.default_context or config.max_context
    memory = refusal = None
    length, most = context or usual, 0
    try:
        whole = allocate(name, config, weights, kind, hardware.memory_bytes)
        most = min(config.max_context, whole.affordable_blocks * BLOCK_SIZE)
        memory = allocate(name, config, weights, kind, hardware.memory_bytes, context)
        length = memory.context
        if users > 1:
            length = shared(memory, users, context)
            memory = allocate(name, config, weights, kind, hardware.memory_bytes, length)
    except DoesNotFit as error:
        memory, refusal = None, error
    ceiling = speed(
        config,
        weights,
        ELEMENT_BYTES[kind],
        hardware,
        context=length,
        prompt=min(prompt or length, config.max_context),
        users=users,
    )
    return Choice(quant, kind, weights, memory, refusal, length, most, ceiling)


def shared(memory: Memory, users: int, asked: int | None) -> int:
    """The context of each of several users, shorter than one alone has it where nobody asked for a length.

    Raises DoesNotFit where memory does not hold all of them.
    """
    if memory.row_bytes and memory.rows < users:
        raise DoesNotFit(
            f"{users} states of the recurrent layers need {gigabytes(users * memory.row_bytes)}, and there is "
            f"room for {memory.rows}",
            f"--users {memory.rows} fits",
        )
    each = memory.affordable_blocks // users * BLOCK_SIZE  # tokens
    context = asked or min(memory.context, each)
    if context and each >= context:
        return context
    least = asked or BLOCK_SIZE
    needed, most = users * blocks_for(least) * memory.block_bytes, most_users(memory, least)
    raise DoesNotFit(
        f"{users} contexts of {least} tokens need {gigabytes(needed)}, and there is room for {most}",
        f"--context {each} fits" if each else f"--users {most} fits",
    )


def most_users(memory: Memory, context: int) -> int:
    found = memory.affordable_blocks // blocks_for(context)
    return min(found, memory.rows) if memory.row_bytes else found
