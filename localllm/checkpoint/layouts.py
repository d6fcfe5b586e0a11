"""Which layouts of quantized weights run. Reads config.json alone and needs no torch."""

from collections.abc import Mapping
from typing import Any

from localllm.arch.fields import Fields
from localllm.errors import UnsupportedModel

INT8_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel where config.json describes a quantization that does not run, DamagedModel for
    nonsense. Which matrices are quantized, their tensors tell."""
    if not Fields(config).has("quantization_config"):
        return
    layout = Fields(config).part("quantization_config")
    method, kind = layout.text("quant_method", ""), layout.text("format", "")
    groups = layout.part("config_groups")
    if method == "mxfp4":
        return
    runs = (method, kind) == ("compressed-tensors", "int-quantized") and bool(groups.values)
    for name in groups.values:
        group = groups.part(name)
        weights = group.part("weights").values
        runs &= not group.has("input_activations") and not group.has("output_activations")
        runs &= all(weights.get(field) == value for field, value in INT8_WEIGHTS.items())
    if not runs:
        raise UnsupportedModel(
            f"the quantization {f'{method} {kind}'.strip()!r} is not supported",
            "take the edition that is not quantized, a GGUF file, MXFP4, or INT8 by compressed-tensors",
        )
