"""What a decode step of a loaded model reads, for whoever shows it beside what this machine was measured to do."""

from collections import Counter

from localllm.arch.config import AttentionConfig, ModelConfig
from localllm.arch.cost import (
    SequenceStep,
    WeightBytes,
    bytes_read,
    elements_read_per_token,
    vectors_read_per_token,
)
from localllm.metrics import StepReads
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes


def step_reads(
    config: ModelConfig,
    weights: WeightBytes,
    dtype: str,
    kv_dtype: str,
    kept_per_token: float,
    bandwidth: float | None,
) -> StepReads:
    """Of one request's step that brings one token: of a mixture the experts that one token goes to. A draft model
    beside it is not counted."""
    element, scale = kv_element_bytes(kv_dtype)
    sizes: Counter[int | None] = Counter()  # by the window of a layer
    for mixer in (layer.mixer for layer in config.layers):
        window = mixer.window if isinstance(mixer, AttentionConfig) else None
        sizes[window] += elements_read_per_token(mixer) * element + vectors_read_per_token(mixer) * scale
    return StepReads(
        weights=bytes_read(config, weights, (SequenceStep(1, 0),), ELEMENT_BYTES[dtype]),
        per_token=sizes[None],
        kept_per_token=kept_per_token,
        bandwidth=bandwidth,
        windows=tuple((window, size) for window, size in sizes.items() if window),
    )
