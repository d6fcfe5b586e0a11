"""The metadata of a model folder or a GGUF file, read without weights and without torch.

Files are untrusted: every name, count and length is checked before it is used.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from localllm.arch.describe import is_embedder, tensor_layout, ties_whole_model
from localllm.arch.fields import ConfigFields
from localllm.arch.layout import TensorLayout
from localllm.arch.parts import MAX_EXPERTS
from localllm.arch.pooling import POOLING
from localllm.checkpoint.gguf.config import sampling_defaults, to_config
from localllm.checkpoint.gguf.header import read_gguf
from localllm.checkpoint.gguf.names import rotary_heads, runtime_name, runtime_shape
from localllm.checkpoint.layouts import Quantization, read_quantization
from localllm.errors import ModelNotFound, UnsupportedModel
from localllm.files import damaged_file, parse_json, read_json, refuse_lfs_pointer
from localllm.hub.gguf import is_gguf
from localllm.hub.model_files import weight_files
from localllm.hub.sentence_transformers import CONFIG_FILE, SETTINGS_FILES, WEIGHTS_FILE, ModuleEntry, read_modules
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME

# Boolean fields of sentence-transformers' pooling config.json, and the mode that each selects.
POOLING_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
POOLING_ALIASES = {"lasttoken": "last"}
DENSE_ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Tanh": "tanh"}


def read_pooling(folder: Path, modules: Sequence[ModuleEntry]) -> dict[str, Any]:
    """Read the pooling settings.

    Raises DamagedModel for invalid fields, UnsupportedModel for unsupported pooling.
    """
    sizes, prompts = (ConfigFields(read_json(folder / name)) for name in SETTINGS_FILES)
    return {
        "kind": pooling_type(ConfigFields(read_json(folder / modules[1].folder / CONFIG_FILE))),
        "dense": [dense_config(folder / module.folder) for module in modules if module.module_type == "Dense"],
        "prompts": prompts.section("prompts").values,
        "default_prompt": prompts.text("default_prompt_name", ""),
        "most_tokens": sizes.size("max_seq_length", None),
    }


def pooling_type(hf: ConfigFields) -> str:
    if not hf.flag("include_prompt", True):
        raise UnsupportedModel(
            "an embedder that excludes its prompt from the mean is not supported", "use another"
        )
    modes = [name for field, name in POOLING_MODES.items() if hf.flag(field)]
    mode = hf.values.get("pooling_mode", modes)
    modes = [mode] if isinstance(mode, str) else list(mode) if isinstance(mode, list | tuple) else [repr(mode)]
    if len(modes) != 1:
        raise UnsupportedModel(f"a combination of {len(modes)} poolings is not supported", "use another model")
    return POOLING_ALIASES.get(modes[0], modes[0])


def dense_config(folder: Path) -> Mapping[str, Any]:
    hf = ConfigFields(read_json(folder / CONFIG_FILE))
    activation = hf.text("activation_function", "torch.nn.modules.activation.Tanh")
    return {
        "columns": hf.size("in_features"),
        "rows": hf.size("out_features"),
        "bias": hf.flag("bias", True),
        "activation": DENSE_ACTIVATIONS.get(activation, activation),
    }


HEADER_LIMIT = 100 * 2**20  # bytes; the safetensors format's own limit
MAX_TENSORS = 2**18  # counting experts separately; the largest real model, 384 experts in 61 layers, has 140,000
STACKED_EXPERTS = re.compile(r"(?P<prefix>.*\.experts)\.(?P<matrix>\w+_proj)\.(?P<kind>\w+)")
DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
OTHER_DTYPES = ("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64")  # of the format, and not read


@dataclass(frozen=True)
class TensorPart:
    """The part of a tensor that one of several processes reads."""

    dim: int  # of the runtime's shape
    segments: tuple[tuple[int, int], ...]  # (begin, end) along it, as the file orders it
    whole: tuple[int, ...]  # shape of the whole tensor in the runtime


@dataclass(frozen=True)
class TensorHeader:
    file: Path
    name: str  # in the file
    dtype: str  # by safetensors' names: F32, BF16, I8, ...; or a block format of GGUF: Q4_K, ...
    shape: tuple[int, ...]  # in the runtime
    expert: int | None = None  # index in a stacked tensor
    transposed: bool = False  # in the file: [in, out]
    interleaved: bool = False  # in the file: rows of gate and up alternate
    offset: int | None = None  # bytes from the beginning of a GGUF file
    heads: tuple[int, int] | None = None  # (number, size) of heads whose rotary pairs are adjacent rows
    data: int = 0  # offset of the stored tensor's bytes in a safetensors file
    part: TensorPart | None = None  # None: the tensor is read as a whole; otherwise `shape` is that of the part

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def begin(self) -> int:
        """Offset of the tensor's bytes in its file."""
        return self.offset if self.offset is not None else self.data + (self.expert or 0) * self.whole_nbytes

    @property
    def nbytes(self) -> int:
        return self.bytes_of(self.shape)

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the tensor in its file, of which a part may be read."""
        return self.bytes_of(self.part.whole) if self.part else self.nbytes

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        if self.offset is not None:
            return math.prod(shape[:-1]) * BLOCK_TYPE_BY_NAME[self.dtype.lower()].row_bytes(shape[-1])
        return math.prod(shape) * DTYPE_BYTES[self.dtype]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor in its file, without the dimension of experts."""
        shape = self.part.whole if self.part else self.shape
        return tuple(reversed(shape)) if self.transposed else shape

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, the first dimension, of the whole tensor in its file."""
        return self.whole_nbytes // max(1, self.file_shape[0])

    @property
    def file_ranges(self) -> Iterator[tuple[int, int]]:
        """Offset and bytes of each contiguous range of the file that holds the tensor or its part, in order."""
        if self.part is None:
            yield self.begin, self.nbytes
            return
        row_bytes, dim = self.row_bytes, self.file_dim
        if dim == 0:
            for begin, end in self.part.segments:
                yield self.begin + begin * row_bytes, (end - begin) * row_bytes
            return
        for row in range(self.file_shape[0]):
            for begin, end in self.part.segments:
                first, last = (self.row_offset(border) for border in (begin, end))
                yield self.begin + row * row_bytes + first, last - first

    @property
    def file_dim(self) -> int:
        """The dimension of the file's shape along which the tensor is divided."""
        assert self.part
        return 1 - self.part.dim if self.transposed else self.part.dim

    def row_offset(self, column: int) -> int:
        """Return the offset of a column within a row of the file, which begins a block."""
        return self.row_bytes * column // self.file_shape[1]


@dataclass(frozen=True)
class Header:
    """A model's configuration and its tensors, by their names in `arch.layout`."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader]
    layout: TensorLayout
    gguf: Mapping[str, Any] | None = None  # the metadata of a GGUF file, which includes the tokenizer
    by_rows: bool = False  # of a tensor-parallel rank: see `Shard`

    @property
    def stored_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @cached_property
    def quantization_config(self) -> Quantization | None:
        """The quantization according to config.json. Raises the errors of `read_quantization`."""
        return None if self.gguf is not None else read_quantization(self.config)

    @property
    def quantization(self) -> str | None:
        """Name of the layout of packed weights."""
        if self.gguf is not None:
            return "gguf" if any(tensor.dtype not in DTYPE_BYTES for tensor in self.tensors.values()) else None
        layout = ConfigFields(self.config).section("quantization_config")
        return layout.text("format", layout.text("quant_method", "")) or None


def read_header(path: Path) -> Header:
    """Read the header of a Hugging Face folder, or of a GGUF file (any part of it).

    Raises ModelNotFound if config.json or weights are missing, UnsupportedModel for pickled weights, an
    unsupported family or an unknown dtype, and DamagedModel for a truncated or inconsistent file.
    """
    if is_gguf(path):
        return read_gguf_header(path)
    files = ["config.json", *weight_files(path)]
    for name in files:
        if not (path / name).is_file():
            raise ModelNotFound(
                f"{path} contains no {name}", "use the folder that a whole model was downloaded into"
            )
    config = read_json(path / "config.json")
    config.pop(POOLING, None)
    if modules := read_modules(path):
        config[POOLING] = read_pooling(path, modules)
    layout = tensor_layout(config)
    tensors = gather_tensors((path / file for file in files[1:]), layout)
    return Header(
        path=path,
        config=settle_tied_head(config, tensors),
        generation_config=read_json(path / "generation_config.json"),
        tensors=tensors | dense_tensors(path, modules),
        layout=layout,
    )


def settle_tied_head(config: dict[str, Any], tensors: dict[str, TensorHeader]) -> dict[str, Any]:
    """The configuration with what the tensors say of head and embedding, as `transformers` reads both.

    Of one matrix that is both, the name is the embedding's in `tensors`, whichever it was stored under. Where the
    whole of a multimodal model says that they are one and its text part that they are not, they are two if two are
    stored.
    """
    head, embedding = "lm_head.weight", "embed_tokens.weight"
    if head in tensors and embedding not in tensors:
        tensors[embedding] = tensors.pop(head)
    of_text = ConfigFields(config).section("text_config").values.get("tie_word_embeddings")
    apart = of_text is False and head in tensors and ties_whole_model(config)
    return config | {"tie_word_embeddings": False} if apart else config


def read_gguf_header(path: Path) -> Header:
    """Read a GGUF header. Raises the errors of `read_gguf` and `to_config`."""
    gguf = read_gguf(path)
    config = to_config(gguf)
    architecture = gguf.metadata["general.architecture"]
    tensors: dict[str, TensorHeader] = {}
    for stored, tensor in gguf.tensors.items():
        name = runtime_name(stored, architecture, config)
        if name is None or (name.startswith("lm_head.") and is_embedder(config)):
            continue
        heads = rotary_heads(name, architecture, config)
        shape = runtime_shape(name, tensor.shape)
        header = TensorHeader(tensor.file, stored, tensor.format.upper(), shape, offset=tensor.offset, heads=heads)
        add_tensors(tensors, unstack_experts(name, header, TensorLayout()), header)
    return Header(path, config, sampling_defaults(gguf), tensors, TensorLayout(), gguf.metadata)


def dense_tensors(path: Path, modules: Iterable[ModuleEntry]) -> dict[str, TensorHeader]:
    """Return the tensors of an embedder's dense layers behind the pooling: dense.0, dense.1, ..."""
    files = [path / module.folder / WEIGHTS_FILE for module in modules if module.module_type == "Dense"]
    if missing := next((file for file in files if not file.is_file()), None):
        raise ModelNotFound(f"there is no {missing}", "use the folder that a whole model was downloaded into")
    return {
        f"dense.{index}.{stored.removeprefix('linear.')}": tensor
        for index, file in enumerate(files)
        for stored, tensor in read_safetensors_header(file).items()
    }


def gather_tensors(files: Iterable[Path], layout: TensorLayout) -> dict[str, TensorHeader]:
    """Return the tensors of several files by runtime names; duplicates raise DamagedModel."""
    tensors: dict[str, TensorHeader] = {}
    for file in files:
        for stored, tensor in read_safetensors_header(file).items():
            name = layout.runtime_name(stored)
            if name:
                add_tensors(tensors, unstack_experts(name, tensor, layout), tensor)
    return tensors


def add_tensors(tensors: dict[str, TensorHeader], parts: Mapping[str, TensorHeader], tensor: TensorHeader) -> None:
    """Add tensors. Raises DamagedModel if one exists already, or if there are more than in any real model."""
    if not tensors.keys().isdisjoint(parts):
        raise damaged_file(tensor.file, f"{tensor.name!r} is stored twice")
    if len(tensors) + len(parts) > MAX_TENSORS:
        raise damaged_file(tensor.file, f"with {tensor.name!r}, it has more than {MAX_TENSORS} tensors")
    tensors.update(parts)


def unstack_experts(name: str, tensor: TensorHeader, layout: TensorLayout) -> dict[str, TensorHeader]:
    """Split a stacked tensor [experts, ...] into experts; any other tensor is returned as it is."""
    stacked = STACKED_EXPERTS.fullmatch(name)
    if not stacked:
        return {name: tensor}
    if not tensor.shape or 0 in tensor.shape or tensor.shape[0] > MAX_EXPERTS:
        raise damaged_file(tensor.file, f"{tensor.name!r} of shape {list(tensor.shape)} is not a stack of experts")
    experts, *shape = tensor.shape
    matrix, suffix = stacked["matrix"], stacked["kind"]
    transposed = layout.experts_transposed and suffix == "weight"
    expert = replace(
        tensor,
        shape=tuple(reversed(shape) if transposed else shape),
        transposed=transposed,
        interleaved=layout.gate_up_interleaved and matrix == "gate_up_proj",
    )
    prefix = stacked["prefix"]
    if expert.offset is not None:
        begins = (expert.offset + e * expert.nbytes for e in range(experts))
        return {f"{prefix}.{e}.{matrix}.{suffix}": replace(expert, offset=begin) for e, begin in enumerate(begins)}
    return {f"{prefix}.{e}.{matrix}.{suffix}": replace(expert, expert=e) for e in range(experts)}


def read_safetensors_header(file: Path) -> dict[str, TensorHeader]:
    """Read names, dtypes and shapes of a safetensors file, whose tensors must be contiguous up to its end."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        refuse_lfs_pointer(file, start)
        length = int.from_bytes(start, "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise damaged_file(file, f"its header should have {length} bytes, but the file has {size}")
        fields = parse_json(stream.read(length), file)
    tensors, spans = {}, []
    for name, entry in fields.items():
        if name == "__metadata__":
            continue
        tensor, span = read_entry(file, name, entry)
        tensors[name] = replace(tensor, data=8 + length + span[0])
        spans.append(span)
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise damaged_file(file, "its tensors overlap or leave gaps")
        end = stop
    if end != size - 8 - length:
        raise damaged_file(file, f"its tensors need {end} bytes, but {size - 8 - length} follow the header")
    return tensors


def read_entry(file: Path, name: str, entry: Any) -> tuple[TensorHeader, tuple[int, int]]:
    """Parse one tensor's entry, and return its header and the range of its data."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        is_valid = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        raise damaged_file(file, f"the header entry of {name!r} is malformed") from None
    if not is_valid:
        raise damaged_file(file, f"the header entry of {name!r} contains values other than numbers")
    if dtype not in DTYPE_BYTES and dtype not in OTHER_DTYPES:
        raise damaged_file(file, f"{name!r} is stored as {dtype!r}, which the format does not have")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(
            f"{name!r} in {file} is stored as {dtype!r}", f"these are supported: {', '.join(DTYPE_BYTES)}"
        )
    header = TensorHeader(file, name, dtype, shape)
    if end - begin != header.nbytes:
        raise damaged_file(file, f"{name!r} has shape {list(shape)} of {dtype} in {end - begin} bytes")
    return header, (begin, end)
