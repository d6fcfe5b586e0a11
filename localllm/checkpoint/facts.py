"""What a model folder tells a person: for `list` and `show`. Reads no weight and needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.checkpoint.header import read_header
from localllm.text.folder import read_chat_templates

COUNTED_LAYOUTS = (None, "int-quantized")  # others pack several parameters into one element


@dataclass(frozen=True)
class Facts:
    """None where the folder does not say."""

    architecture: str | None
    layers: int | None
    context: int | None
    parameters: int | None
    dtypes: tuple[str, ...]  # of the tensors as stored
    weight_bytes: int
    quantization: str | None
    chat_template: bool
    generation_config: Mapping[str, Any]


def read_facts(folder: Path) -> Facts:
    """Raises what `read_header` raises."""
    header = read_header(folder)
    tensors = {name: t for name, t in header.tensors.items() if not name.endswith(".weight_scale")}
    counted = header.quantization in COUNTED_LAYOUTS
    return Facts(
        architecture=next(iter(header.config.get("architectures") or []), None),
        layers=header.config.get("num_hidden_layers"),
        context=header.config.get("max_position_embeddings"),
        parameters=sum(t.elements for t in tensors.values()) if counted else None,
        dtypes=tuple(sorted({t.dtype for t in tensors.values()})),
        weight_bytes=header.stored_bytes,
        quantization=header.quantization,
        chat_template=bool(read_chat_templates(folder)),
        generation_config=header.generation_config,
    )
