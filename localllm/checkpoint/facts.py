"""What a model folder tells a person: for `list` and `show`. Reads no weight and needs no torch."""

from dataclasses import dataclass
from pathlib import Path

from localllm.arch.families import describe
from localllm.checkpoint.header import read_header
from localllm.request import SamplingParams
from localllm.text.folder import read_chat_templates

COUNTED_LAYOUTS = (None, "int-quantized")  # others pack several parameters into one element


@dataclass(frozen=True)
class Facts:
    architecture: str
    layers: int
    context: int  # tokens
    parameters: int | None  # None: packed, not counted
    dtypes: tuple[str, ...]  # of the tensors as stored
    weight_bytes: int
    quantization: str | None
    chat_template: bool
    sampling: SamplingParams  # what generation_config.json recommends


def read_facts(folder: Path) -> Facts:
    """Raises what `read_header` raises, and UnsupportedModel for a family that does not run."""
    header = read_header(folder)
    config = describe(header.config)
    tensors = {name: t for name, t in header.tensors.items() if not name.endswith(".weight_scale")}
    counted = header.quantization in COUNTED_LAYOUTS
    return Facts(
        architecture=header.config["architectures"][0],
        layers=len(config.layers),
        context=config.max_context,
        parameters=sum(t.elements for t in tensors.values()) if counted else None,
        dtypes=tuple(sorted({t.dtype for t in tensors.values()})),
        weight_bytes=header.stored_bytes,
        quantization=header.quantization,
        chat_template=bool(read_chat_templates(folder)),
        sampling=SamplingParams.from_generation_config(header.generation_config),
    )
