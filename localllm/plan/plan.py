"""What a model would take of a device, and how fast it would be there.

A model that does not fit is planned all the same: the plan says so. No torch is needed for a catalogued device.
"""

from dataclasses import dataclass, replace

from localllm.arch.cost import SequenceStep, kv_bytes_per_token, kv_bytes_read, state_bytes
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.errors import UsageError
from localllm.hardware.catalog import DeviceSpec
from localllm.plan.fit import QUANT_ORDER, Fit, LoadOptions, fit_model, remedy
from localllm.plan.memory import BLOCK_SIZE, TOKEN_BUDGET, blocks_for
from localllm.plan.speed import Speed, predict_speed
from localllm.plan.weights import GGUF_BITS
from localllm.quant.packing import ELEMENT_BYTES, KV_SCALE_BYTES, kv_element_bytes

DEFAULT_PROMPT_TOKENS = 512  # tokens, where nobody asks for another


@dataclass(frozen=True)
class Choice:
    """The model in one quantization."""

    fit: Fit
    ceiling: Speed


@dataclass(frozen=True)
class Expectation:
    """The rates that steps reach on this machine, and where that is known from."""

    bandwidth: float  # bytes/s
    flops: float
    step_s: float  # seconds of each step beside reading and computing
    source: str


@dataclass(frozen=True)
class Plan:
    """A model on a device. Sizes are bytes, lengths tokens."""

    name: str
    hardware: DeviceSpec
    stored_as: str | None  # the quantization of the files
    chosen: Choice  # what was asked for; what follows is about it
    choices: tuple[Choice, ...]  # every quantization, those of most bits first
    users: int
    prompt: int
    max_context: int  # of the model
    kv_bytes_per_token: int
    kv_bytes_per_token_in_8_bits: int  # as `--kv-dtype int8` or `fp8` keeps them
    kv_bytes_per_sequence: int  # with the whole context
    kv_bytes_read: int  # of it by a step of one sequence: of a window only that
    state_bytes_per_sequence: int
    activation_bytes: int  # what a step takes while it runs
    expected: Speed | None
    expectation: Expectation | None

    @property
    def fit(self) -> Fit:
        return self.chosen.fit

    @property
    def context(self) -> int:
        return self.fit.context

    @property
    def kv_bytes(self) -> int:
        return self.users * self.kv_bytes_per_sequence

    @property
    def state_bytes(self) -> int:
        return self.users * self.state_bytes_per_sequence

    @property
    def total_bytes(self) -> int:
        """What all users need at once."""
        return self.fit.weights.total + self.kv_bytes + self.state_bytes + self.activation_bytes

    @property
    def remedy(self) -> str | None:
        """What would fit; None where it does."""
        return remedy(self.fit, (choice.fit for choice in self.choices)) if self.fit.refusal else None

    @property
    def best(self) -> Choice | None:
        """The finest that fits of the model as it is stored and what `--quant` makes of it."""
        return next((c for c in self.choices if c.fit.fits and c.fit.quant not in GGUF_BITS), None)


def plan_model(
    header: Header,
    hardware: DeviceSpec,
    options: LoadOptions,
    *,
    name: str,
    prompt: int | None = None,
    expectation: Expectation | None = None,
) -> Plan:
    """What the model of `header` takes of `hardware`, by the code that `load` allocates by.

    prompt: tokens whose TTFT is predicted, None for a usual one. Raises UsageError for a wish that makes no
    sense or a prompt beyond the context, and as `describe`.
    """
    config = parse_config(header.config)

    def speed_of(found: Fit, rates: DeviceSpec | Expectation) -> Speed:
        # Nothing is expected of more users than the engine answers at once.
        most = found.concurrent_users if isinstance(rates, Expectation) else options.users
        return predict_speed(
            config,
            found.weights,
            ELEMENT_BYTES[found.dtype],
            rates,
            context=found.context,
            prompt=prompt or min(DEFAULT_PROMPT_TOKENS, found.context),
            users=min(options.users, most),
            step_s=rates.step_s if isinstance(rates, Expectation) else 0.0,
            kv=kv_element_bytes(found.kv_dtype),
            chunk=TOKEN_BUDGET[hardware.device_type],
        )

    found = {options.quant: fit_model(header, config, hardware, options, name=name)}
    for quant in (None,) if header.quantization or config.encoder else QUANT_ORDER:
        found[quant] = found.get(quant) or fit_model(
            header, config, hardware, replace(options, quant=quant), name=name
        )
    chosen = found[options.quant]
    if prompt is not None and not 1 <= prompt <= chosen.context:
        raise UsageError(
            f"a prompt of {prompt} tokens is asked for",
            f"give one of 1 to {chosen.context} tokens, or a longer --context",
        )
    choices = {
        quant: Choice(found[quant], speed_of(found[quant], hardware)) for quant in QUANT_ORDER if quant in found
    }
    element = ELEMENT_BYTES[chosen.dtype]
    kv = kv_bytes_per_token(config, *kv_element_bytes(chosen.kv_dtype))
    length = prompt or min(DEFAULT_PROMPT_TOKENS, chosen.context)
    return Plan(
        name=name,
        hardware=hardware,
        stored_as=header.quantization,
        chosen=choices[options.quant],
        choices=tuple(choices.values()),
        users=options.users,
        prompt=length,
        max_context=config.max_context,
        kv_bytes_per_token=kv,
        kv_bytes_per_token_in_8_bits=kv_bytes_per_token(config, 1, KV_SCALE_BYTES),
        kv_bytes_per_sequence=blocks_for(chosen.context) * BLOCK_SIZE * kv,
        kv_bytes_read=kv_bytes_read(
            config, (SequenceStep(1, chosen.context),), *kv_element_bytes(chosen.kv_dtype)
        ),
        state_bytes_per_sequence=state_bytes(config, element),
        activation_bytes=chosen.workspace,
        expected=speed_of(chosen, expectation) if expectation and chosen.fits else None,
        expectation=expectation,
    )
