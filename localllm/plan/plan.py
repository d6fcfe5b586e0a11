"""The memory that a model would take on a device, and how fast it would be there.

A model that does not fit is planned as well, and the plan says so. A catalogued device needs no torch.
"""

from dataclasses import dataclass, replace

from localllm.arch.cost import SequenceStep, kv_bytes_per_token, kv_bytes_read, state_bytes, why_not_4_bit_cache
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.errors import UsageError
from localllm.hardware.catalog import DeviceSpec
from localllm.plan.estimated import Estimate, estimate_decoding
from localllm.plan.fit import QUANT_ORDER, Fit, LoadOptions, find_remedy, fit_model, fit_quants, model_needs
from localllm.plan.memory import BLOCK_SIZE, blocks_for
from localllm.plan.parallel import Parallel, predict_divided_speed
from localllm.plan.speed import Speed
from localllm.plan.weights import GGUF_BITS
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes

DEFAULT_PROMPT_TOKENS = 512  # if none is requested


@dataclass(frozen=True)
class Choice:
    """The model in one quantization."""

    fit: Fit
    ceiling: Speed


@dataclass(frozen=True)
class Expectation:
    """The rates that steps are expected to reach on this machine, and their source."""

    bandwidth: float  # bytes/s
    flops: float
    step_s: float  # duration of a step besides reading and computing
    source: str


@dataclass(frozen=True)
class Plan:
    """A model on a device. Sizes are in bytes, lengths in tokens."""

    name: str
    hardware: DeviceSpec
    stored_as: str | None  # quantization of the files
    chosen: Choice  # the requested quantization, which the following fields describe
    choices: tuple[Choice, ...]  # all quantizations, in descending order of bits
    users: int
    prompt: int
    max_context: int  # of the model
    kv_bytes_per_token: int
    kv_bytes_per_token_in_8_bits: int  # with `--kv-dtype int8` or `fp8`
    kv_bytes_per_token_in_4_bits: int | None  # with `--kv-dtype int4`; None if the model does not support it
    kv_bytes_per_sequence: int  # at full context
    kv_bytes_read: int  # by a step of one sequence: limited by windows
    state_bytes_per_sequence: int
    activation_bytes: int  # of a running step
    expected: Speed | None
    expectation: Expectation | None
    estimate: Estimate | None  # without an expectation, for a GPU that was never measured
    parallel: Parallel  # the devices that compute the model together; sizes are of the process with the least room
    remedy: str | None  # what would fit; None if it does

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
        """Bytes that all users need at once."""
        return self.fit.weights.total + self.kv_bytes + self.state_bytes + self.activation_bytes

    @property
    def best(self) -> Choice | None:
        """The stored model or the result of `--quant` with the most bits that fits."""
        return next((c for c in self.choices if c.fit.fits and c.fit.quant not in GGUF_BITS), None)


def plan_model(
    header: Header,
    hardware: DeviceSpec,
    options: LoadOptions,
    *,
    name: str,
    prompt: int | None = None,
    expectation: Expectation | None = None,
    parallel: Parallel | None = None,
) -> Plan:
    """Plan a model on a device, with the code by which `load` allocates.

    prompt: tokens for which TTFT is predicted, None for a default; parallel: the devices among which the options
    divide the model, None for a single one. Raises UsageError for invalid options or a prompt longer than the
    context, and like `parse_config`.
    """
    config, parallel = parse_config(header.config), parallel or Parallel()

    def speed_of(fit: Fit, rates: DeviceSpec | Expectation) -> Speed:
        # No more users are expected than the engine serves at once.
        max_users = fit.concurrent_users if isinstance(rates, Expectation) else options.users
        return predict_divided_speed(
            config,
            whole[fit.quant],
            parallel,
            rates,
            context=fit.context,
            prompt=prompt or min(DEFAULT_PROMPT_TOKENS, fit.context),
            users=min(options.users, max_users),
            step_s=rates.step_s if isinstance(rates, Expectation) else 0.0,
        )

    chosen = fit_model(header, config, hardware, options, name=name)
    quants = (None,) if header.quantization or config.encoder else QUANT_ORDER
    others = [quant for quant in quants if quant != options.quant]
    fits = fit_quants(header, config, hardware, options, others, name=name) | {options.quant: chosen}
    whole = {quant: fit.needs for quant, fit in fits.items()}
    if parallel.devices > 1:
        whole = {
            quant: model_needs(header, config, hardware.device_type, replace(options, quant=quant), name=name)
            for quant in fits
        }
    if prompt is not None and not 1 <= prompt <= chosen.context:
        raise UsageError(
            f"a prompt of {prompt} tokens is not possible",
            f"give one of 1 to {chosen.context} tokens, or a longer --context",
        )
    choices = {
        quant: Choice(fits[quant], speed_of(fits[quant], hardware)) for quant in QUANT_ORDER if quant in fits
    }
    element = ELEMENT_BYTES[chosen.dtype]
    process = chosen.needs.config  # of one process, if the model is divided
    kv = kv_bytes_per_token(process, *kv_element_bytes(chosen.kv_dtype))
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
        kv_bytes_per_token_in_8_bits=kv_bytes_per_token(process, *kv_element_bytes("int8")),
        kv_bytes_per_token_in_4_bits=None
        if why_not_4_bit_cache(config)
        else kv_bytes_per_token(process, *kv_element_bytes("int4")),
        kv_bytes_per_sequence=blocks_for(chosen.context) * BLOCK_SIZE * kv,
        kv_bytes_read=kv_bytes_read(
            process, (SequenceStep(1, chosen.context),), *kv_element_bytes(chosen.kv_dtype)
        ),
        state_bytes_per_sequence=state_bytes(process, element),
        activation_bytes=chosen.workspace,
        expected=speed_of(chosen, expectation) if expectation and chosen.fits else None,
        expectation=expectation,
        estimate=estimate_decoding(header, config, chosen, hardware)
        if not expectation and chosen.fits and parallel.devices == 1
        else None,
        parallel=parallel,
        remedy=find_remedy(header, config, hardware, options, chosen, fits.values(), name=name)
        if chosen.refusal
        else None,
    )
