"""One model on several devices: tensor parallel shares every product, pipeline parallel the layers.

Ranks of a tensor-parallel group read and compute their share of each layer, whose results they sum up twice. A
ring sends 2 (n - 1) / n of the summed bytes over the link of each rank. Stages of a pipeline run one after the
other, with one step in flight as on GPUs, and the last returns its result to the first, which has the head: they
add memory, not speed. Ranks with whole experts of an MoE layer wait for the one that reads most of those that a
step selects.
`simulate` and `plan` count exchanges with this code.
"""

import re
from dataclasses import dataclass, replace

from localllm.arch.config import AttentionConfig, ModelConfig
from localllm.arch.cost import expert_imbalance
from localllm.arch.shard import Shard, check_experts, shard_ffn
from localllm.errors import UnsupportedModel, UsageError
from localllm.hardware.catalog import DeviceSpec
from localllm.plan.memory import TOKEN_BUDGET, MemoryNeeds
from localllm.plan.speed import DeviceRates, Speed, predict_speed
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes

ASSUMED_LINK_LATENCY_S = 10e-6  # of a collective operation or a transfer: its launch and the waits of its parts
ACTIVATION_BYTES = 2
LINK = re.compile(r"(\d+(?:\.\d+)?)(MB|GB)/s(?:,(\d+(?:\.\d+)?)(us|ms|s))?", re.IGNORECASE)
UNITS = {"mb": 1e6, "gb": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}  # bytes, and parts of a second


@dataclass(frozen=True)
class Link:
    """A connection between devices."""

    bandwidth: float  # bytes per second in one direction
    latency_s: float = 0.0

    def seconds(self, size: float) -> float:
        return self.latency_s + size / self.bandwidth


@dataclass(frozen=True)
class JoinedRates:
    """The rates of devices that work at the same time."""

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class Parallel:
    """The devices that compute one model together."""

    tensor: int = 1  # that share each layer
    pipeline: int = 1  # groups of them, with some of the layers each
    link: Link | None = None  # between the devices
    stage_link: Link | None = None  # between stages on different machines; None: as between the devices
    whole_experts: bool = False  # of an MoE layer on each device; otherwise columns of all

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline

    def check(self, config: ModelConfig) -> None:
        """Raises an error for a model that cannot be divided like this."""
        if self.pipeline > len(config.layers):
            raise UsageError(
                f"--pipeline-parallel {self.pipeline} is more than the {len(config.layers)} layers",
                "use fewer stages",
            )
        if self.tensor == 1:
            return
        if self.whole_experts:
            shard = Shard(0, self.tensor, whole_experts=True)
            check_experts(config, shard)
            for mixture in config.mixtures:
                shard_ffn(mixture, shard)
        for layer in config.layers:
            mixer = layer.mixer
            if not isinstance(mixer, AttentionConfig):
                raise UnsupportedModel("tensor parallelism is simulated only for attention with heads")
            if mixer.heads % self.tensor or mixer.kv_heads % self.tensor:
                heads = f"{mixer.heads} heads of queries and {mixer.kv_heads} of keys and values"
                raise UsageError(
                    f"--tensor-parallel {self.tensor} does not divide {heads}", "use a divisor of both"
                )

    def joined(self, device: DeviceSpec) -> DeviceSpec:
        """Return the devices as one: with the memory of all, and the rates of those that work at a time."""
        return replace(
            device,
            memory_bytes=device.memory_bytes * self.devices,
            bandwidth=device.bandwidth * self.tensor,
            flops=device.flops * self.tensor,
        )

    def exchanged_bytes(self, config: ModelConfig, tokens: float, sequences: float) -> tuple[float, float]:
        """Return the bytes that each device sends in a step: to others of its stage, and to the next stage.

        sequences: positions whose logits are computed
        """
        activations = tokens * config.hidden_size * ACTIVATION_BYTES
        share = (self.tensor - 1) / self.tensor
        sums = 2 * len(config.layers) * 2 * share * activations
        logits = share * sequences * config.vocab_size * ACTIVATION_BYTES
        return sums + logits, activations if self.pipeline > 1 else 0.0

    def exchange_s(self, config: ModelConfig, tokens: float, sequences: float) -> float:
        """Return the duration of a step's exchanges, which do not overlap with computing."""
        if self.devices == 1:
            return 0.0
        assert self.link
        within, passed = self.exchanged_bytes(config, tokens, sequences)
        seconds = 0.0
        if self.pipeline > 1:
            apart = self.stage_link not in (None, self.link)  # the first machine passes on what others send
            hops = 2 * (self.pipeline - 1) if apart else self.pipeline
            seconds += hops * (self.stage_link or self.link).seconds(passed)
        if self.tensor > 1:
            calls = 2 * len(config.layers) + 1  # a sum after attention and one after the MLP, and the logits
            seconds += calls * self.link.latency_s + within / self.link.bandwidth
        return seconds


def parse_link(text: str, flag: str = "--link") -> Link:
    """Parse `50GB/s` or `50GB/s,5us`: bandwidth in one direction, and latency. Raises UsageError."""
    match = LINK.fullmatch(text.strip())
    if match and float(match[1]) > 0:
        latency_s = float(match[3]) / UNITS[match[4].lower()] if match[3] else ASSUMED_LINK_LATENCY_S
        return Link(float(match[1]) * UNITS[match[2].lower()], latency_s)
    raise UsageError(f"{flag} is {text!r}", "give a bandwidth, such as 50GB/s, or with a latency: 50GB/s,5us")


def default_link(device: DeviceSpec) -> Link:
    """Return the catalogued link of a device."""
    return Link(device.link, ASSUMED_LINK_LATENCY_S)


def predict_divided_speed(
    config: ModelConfig,
    whole: MemoryNeeds,
    parallel: Parallel,
    rates: DeviceRates,
    *,
    context: int,
    prompt: int,
    users: int = 1,
    step_s: float = 0.0,
) -> Speed:
    """Predict the speed of a model on devices that compute it together, like `predict_speed`.

    whole: needs of the undivided model; rates: of one device. Processes without GPUs share those of their machine.
    """
    working = 1 if whole.device_type == "cpu" else parallel.tensor
    expert_ranks = working if parallel.whole_experts else 1
    return predict_speed(
        config,
        whole.weights,
        ELEMENT_BYTES[whole.dtype],
        JoinedRates(rates.bandwidth * working, rates.flops * working),
        context=context,
        prompt=prompt,
        users=users,
        step_s=step_s,
        kv=kv_element_bytes(whole.kv_dtype),
        chunk=TOKEN_BUDGET[whole.device_type],
        exchange_s=lambda tokens, logits: parallel.exchange_s(config, tokens, logits),
        expert_imbalance=lambda tokens: (
            expert_imbalance(config, tokens, expert_ranks) if expert_ranks > 1 else 1.0
        ),
    )
