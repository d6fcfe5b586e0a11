"""What a model folder or a GGUF file says of itself, without reading a weight and without torch.

Trusts nothing: every name, count and length in a file is checked before it is used.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from localllm.arch.describe import is_embedder, tensor_layout
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
from localllm.hub.folder import weight_files
from localllm.hub.gguf import is_gguf
from localllm.hub.modules import CONFIG_FILE, SETTINGS_FILES, WEIGHTS_FILE, ModuleEntry, read_modules
from localllm.quant.formats.gguf_types import BLOCK_TYPE_BY_NAME

# What the files beside config.json say of an embedder, in the form of sentence-transformers.
# By the name of the field that is true for the one in use, and by what `pooling_mode` calls it.
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
    """Raises DamagedModel for fields that make no sense, UnsupportedModel for a pooling that does not run."""
    sizes, texts = (ConfigFields(read_json(folder / name)) for name in SETTINGS_FILES)
    return {
        "kind": pooling_type(ConfigFields(read_json(folder / modules[1].folder / CONFIG_FILE))),
        "dense": [dense_config(folder / module.folder) for module in modules if module.module_type == "Dense"],
        "prompts": texts.section("prompts").values,
        "default_prompt": texts.text("default_prompt_name", ""),
        "most_tokens": sizes.size("max_seq_length", None),
    }


def pooling_type(hf: ConfigFields) -> str:
    if not hf.flag("include_prompt", True):
        raise UnsupportedModel(
            "an embedder that leaves its prompt out of the mean is not supported", "use another"
        )
    used = [name for field, name in POOLING_MODES.items() if hf.flag(field)]
    mode = hf.values.get("pooling_mode", used)
    used = [mode] if isinstance(mode, str) else list(mode) if isinstance(mode, list | tuple) else [repr(mode)]
    if len(used) != 1:
        raise UnsupportedModel(f"a pooling of {len(used)} kinds at once is not supported", "use another model")
    return POOLING_ALIASES.get(used[0], used[0])


def dense_config(folder: Path) -> Mapping[str, Any]:
    hf = ConfigFields(read_json(folder / CONFIG_FILE))
    named = hf.text("activation_function", "torch.nn.modules.activation.Tanh")
    return {
        "columns": hf.size("in_features"),
        "rows": hf.size("out_features"),
        "bias": hf.flag("bias", True),
        "activation": DENSE_ACTIVATIONS.get(named, named),
    }


HEADER_LIMIT = 100 * 2**20  # bytes; the format's own limit
MAX_TENSORS = 2**18  # experts one by one; the largest real model, 384 experts in 61 layers, has 140,000
STACKED_EXPERTS = re.compile(r"(?P<prefix>.*\.experts)\.(?P<matrix>\w+_proj)\.(?P<kind>\w+)")
DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}


@dataclass(frozen=True)
class TensorHeader:
    file: Path
    name: str  # as the file has it
    dtype: str  # as safetensors spells it: F32, BF16, I8, ...; or a block format of GGUF: Q4_K, ...
    shape: tuple[int, ...]  # as the runtime has it
    expert: int | None = None  # which part of a stacked tensor it is
    transposed: bool = False  # in the file
    interleaved: bool = False  # in the file: rows of gate and up take turns
    offset: int | None = None  # bytes from the begin of a GGUF file
    heads: tuple[int, int] | None = None  # (how many, their size): rotary pairs lie side by side in their rows
    data: int = 0  # where the bytes of the file's tensor of this name begin, in a safetensors file

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def begin(self) -> int:
        """Where its bytes begin in its file."""
        return self.offset if self.offset is not None else self.data + (self.expert or 0) * self.nbytes

    @property
    def nbytes(self) -> int:
        if self.offset is not None:
            return math.prod(self.shape[:-1]) * BLOCK_TYPE_BY_NAME[self.dtype.lower()].row_bytes(self.shape[-1])
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Header:
    """A model's configuration and the list of its tensors, by their names in `arch.layout`."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader]
    layout: TensorLayout
    gguf: Mapping[str, Any] | None = None  # the metadata of a GGUF file: it holds the tokenizer

    @property
    def stored_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @cached_property
    def quantization_config(self) -> Quantization | None:
        """How config.json says that weights are quantized. Raises as `read_quantization`."""
        return None if self.gguf is not None else read_quantization(self.config)

    @property
    def quantization(self) -> str | None:
        """The name of the layout in which weights are packed."""
        if self.gguf is not None:
            return "gguf" if any(tensor.dtype not in DTYPE_BYTES for tensor in self.tensors.values()) else None
        layout = ConfigFields(self.config).section("quantization_config")
        return layout.text("format", layout.text("quant_method", "")) or None


def read_header(path: Path) -> Header:
    """The header of a Hugging Face folder, or of a GGUF file (any part of it).

    Raises ModelNotFound where it holds no config.json or not all its weights, UnsupportedModel for pickled
    weights, a family that does not run or a dtype that nobody knows, DamagedModel for a file that is truncated or
    contradicts itself.
    """
    if is_gguf(path):
        return read_gguf_header(path)
    files = ["config.json", *weight_files(path)]
    for name in files:
        if not (path / name).is_file():
            raise ModelNotFound(
                f"{path} holds no {name}", "name the folder that a whole model was downloaded into"
            )
    config = read_json(path / "config.json")
    config.pop(POOLING, None)
    if modules := read_modules(path):
        config[POOLING] = read_pooling(path, modules)
    spelling = tensor_layout(config)
    return Header(
        path=path,
        config=config,
        generation_config=read_json(path / "generation_config.json"),
        tensors=gather_tensors((path / file for file in files[1:]), spelling) | dense_tensors(path, modules),
        layout=spelling,
    )


def read_gguf_header(path: Path) -> Header:
    """Raises as `read_gguf` and `to_config`."""
    gguf = read_gguf(path)
    config = to_config(gguf)
    architecture = gguf.metadata["general.architecture"]
    found: dict[str, TensorHeader] = {}
    for stored, tensor in gguf.tensors.items():
        name = runtime_name(stored, architecture, config)
        if name is None or (name.startswith("lm_head.") and is_embedder(config)):
            continue
        heads = rotary_heads(name, architecture, config)
        shape = runtime_shape(name, tensor.shape)
        header = TensorHeader(tensor.file, stored, tensor.format.upper(), shape, offset=tensor.offset, heads=heads)
        add_tensors(found, unstack_experts(name, header, TensorLayout()), header)
    return Header(path, config, sampling_defaults(gguf), found, TensorLayout(), gguf.metadata)


def dense_tensors(path: Path, modules: Iterable[ModuleEntry]) -> dict[str, TensorHeader]:
    """Of the layers behind an embedder's pooling: dense.0, dense.1, ..."""
    files = [path / module.folder / WEIGHTS_FILE for module in modules if module.module_type == "Dense"]
    if missing := next((file for file in files if not file.is_file()), None):
        raise ModelNotFound(f"there is no {missing}", "name the folder that a whole model was downloaded into")
    return {
        f"dense.{place}.{stored.removeprefix('linear.')}": tensor
        for place, file in enumerate(files)
        for stored, tensor in read_safetensors_header(file).items()
    }


def gather_tensors(files: Iterable[Path], spelling: TensorLayout) -> dict[str, TensorHeader]:
    """The tensors of several files, by the runtime's names; two of one name are one too many."""
    found: dict[str, TensorHeader] = {}
    for file in files:
        for stored, tensor in read_safetensors_header(file).items():
            name = spelling.runtime_name(stored)
            if name:
                add_tensors(found, unstack_experts(name, tensor, spelling), tensor)
    return found


def add_tensors(found: dict[str, TensorHeader], parts: Mapping[str, TensorHeader], tensor: TensorHeader) -> None:
    """Raises DamagedModel where one of the parts of `tensor` is there already, or more than any model has."""
    if not found.keys().isdisjoint(parts):
        raise damaged_file(tensor.file, f"{tensor.name!r} is stored twice")
    if len(found) + len(parts) > MAX_TENSORS:
        raise damaged_file(tensor.file, f"with {tensor.name!r} it has more than {MAX_TENSORS} tensors")
    found.update(parts)


def unstack_experts(name: str, tensor: TensorHeader, spelling: TensorLayout) -> dict[str, TensorHeader]:
    """The experts of a stacked tensor [experts, ...] one by one; any other tensor as it is."""
    stacked = STACKED_EXPERTS.fullmatch(name)
    if not stacked:
        return {name: tensor}
    if not tensor.shape or 0 in tensor.shape or tensor.shape[0] > MAX_EXPERTS:
        raise damaged_file(tensor.file, f"{tensor.name!r} of shape {list(tensor.shape)} is no stack of experts")
    experts, *shape = tensor.shape
    matrix, kind = stacked["matrix"], stacked["kind"]
    transposed = spelling.experts_transposed and kind == "weight"
    one = replace(
        tensor,
        shape=tuple(reversed(shape) if transposed else shape),
        transposed=transposed,
        interleaved=spelling.gate_up_interleaved and matrix == "gate_up_proj",
    )
    prefix = stacked["prefix"]
    if one.offset is not None:
        begins = (one.offset + e * one.nbytes for e in range(experts))
        return {f"{prefix}.{e}.{matrix}.{kind}": replace(one, offset=begin) for e, begin in enumerate(begins)}
    return {f"{prefix}.{e}.{matrix}.{kind}": replace(one, expert=e) for e in range(experts)}


def read_safetensors_header(file: Path) -> dict[str, TensorHeader]:
    """Names, dtypes and shapes in one safetensors file, whose data must lie one after another to its end."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        begin = stream.read(8)
        refuse_lfs_pointer(file, begin)
        length = int.from_bytes(begin, "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise damaged_file(file, f"its header should be {length} bytes long and the file has {size}")
        fields = parse_json(stream.read(length), file)
    tensors, spans = {}, []
    for name, entry in fields.items():
        if name == "__metadata__":
            continue
        tensor, span = read_entry(file, name, entry)
        tensors[name] = replace(tensor, data=8 + length + span[0])
        spans.append(span)
    end = 0
    for begin, until in sorted(spans):
        if begin != end:
            raise damaged_file(file, "its tensors overlap or leave gaps")
        end = until
    if end != size - 8 - length:
        raise damaged_file(file, f"its tensors need {end} bytes and {size - 8 - length} follow the header")
    return tensors


def read_entry(file: Path, name: str, entry: Any) -> tuple[TensorHeader, tuple[int, int]]:
    """One tensor of the header and where its data lies."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        raise damaged_file(file, f"the header entry of {name!r} is malformed") from None
    if not whole:
        raise damaged_file(file, f"the header entry of {name!r} holds something else than numbers")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"{name!r} in {file} is stored as {dtype!r}", f"known are {', '.join(DTYPE_BYTES)}")
    header = TensorHeader(file, name, dtype, shape)
    if end - begin != header.nbytes:
        raise damaged_file(file, f"{name!r} has shape {list(shape)} of {dtype} in {end - begin} bytes")
    return header, (begin, end)
