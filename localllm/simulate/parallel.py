"""One model on several devices: tensor parallel shares every product, pipeline parallel the layers.

Ranks of a tensor-parallel group read and compute their share of each layer, whose results they sum up twice. A
ring sends 2 (n - 1) / n of the summed bytes over the link of each rank. Stages of a pipeline run one after the
other, with one step in flight: they add memory, not speed.
"""

import re
from dataclasses import dataclass, replace

from localllm.arch.config import AttentionConfig, ModelConfig
from localllm.errors import UnsupportedModel, UsageError
from localllm.hardware.catalog import DeviceSpec
from localllm.runtime.step import StepShape
from localllm.simulate.cost import RooflineCost
from localllm.simulate.fleet import Link

ASSUMED_LINK_LATENCY_S = 10e-6  # of a collective operation or a transfer: its launch and the waits of its parts
ACTIVATION_BYTES = 2
LINK = re.compile(r"(\d+(?:\.\d+)?)(MB|GB)/s(?:,(\d+(?:\.\d+)?)(us|ms|s))?", re.IGNORECASE)
UNITS = {"mb": 1e6, "gb": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}  # bytes, and parts of a second


@dataclass(frozen=True)
class Parallel:
    tensor: int = 1
    pipeline: int = 1
    link: Link | None = None  # between the devices

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
        for layer in config.layers:
            mixer = layer.mixer
            if not isinstance(mixer, AttentionConfig):
                raise UnsupportedModel("tensor parallelism is simulated for attention with heads alone")
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


class ParallelCost(RooflineCost):
    """A roofline with the time that devices take to exchange activations."""

    parallel = Parallel()

    def seconds(self, shape: StepShape, number: int) -> float:
        return super().seconds(shape, number) + self.communication_s(shape)

    def communication_s(self, shape: StepShape) -> float:
        parallel, link = self.parallel, self.parallel.link
        assert link
        tokens, sequences = shape.tokens + shape.prompt_tokens, shape.sequences + shape.prompts
        activations, ranks = tokens * self.config.hidden_size * ACTIVATION_BYTES, parallel.tensor
        seconds = (parallel.pipeline - 1) * link.seconds(activations)
        if ranks > 1:
            share = (ranks - 1) / ranks
            seconds += 2 * len(self.config.layers) * link.seconds(2 * share * activations)
            seconds += link.seconds(share * sequences * self.config.vocab_size * ACTIVATION_BYTES)
        return seconds


def parse_link(text: str) -> Link:
    """Parse `50GB/s` or `50GB/s,5us`: bandwidth in one direction, and latency. Raises UsageError."""
    match = LINK.fullmatch(text.strip())
    if match and float(match[1]) > 0:
        latency_s = float(match[3]) / UNITS[match[4].lower()] if match[3] else ASSUMED_LINK_LATENCY_S
        return Link(float(match[1]) * UNITS[match[2].lower()], latency_s)
    raise UsageError(f"--link is {text!r}", "give a bandwidth, such as 50GB/s, or with a latency: 50GB/s,5us")


def default_link(device: DeviceSpec) -> Link:
    """Return the catalogued link of a device."""
    return Link(device.link, ASSUMED_LINK_LATENCY_S)
