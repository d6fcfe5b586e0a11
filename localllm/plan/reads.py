"""The bytes that a decode step of a loaded model reads, to be displayed next to the measured bandwidth."""

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
    """Return the bytes of a step of one request with one token, reading the experts that one token selects.

    A draft model is not included.
    """
    element, scale = kv_element_bytes(kv_dtype)
    sizes: Counter[int | None] = Counter()  # by a layer's window
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
