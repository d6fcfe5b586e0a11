"""What a model folder says of itself, without reading a weight and without torch.

Trusts nothing: every name, count and length in a file is checked before it is used.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import DamagedModel, ModelNotFound, UnsupportedModel

HEADER_LIMIT = 100 * 2**20  # bytes; the format's own limit
JSON_LIMIT = 64 * 2**20  # bytes; the largest real index is a few megabytes
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}


@dataclass(frozen=True)
class TensorHeader:
    file: Path
    dtype: str  # as safetensors spells it: F32, BF16, I8, ...
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """A model folder's configuration and the list of its tensors."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, TensorHeader]

    @property
    def stored_bytes(self) -> int:
        return sum(t.elements * DTYPE_BYTES[t.dtype] for t in self.tensors.values())


def read_header(path: Path) -> Header:
    """The header of the Hugging Face folder `path`.

    Raises ModelNotFound where it holds no config.json or no weights, UnsupportedModel for pickled weights or
    dtypes that do not run, DamagedModel for a file that is truncated or contradicts itself.
    """
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} holds no config.json", "name the folder that a model was downloaded into")
    generation = path / "generation_config.json"
    return Header(
        path=path,
        config=read_json(path / "config.json"),
        generation_config=read_json(generation) if generation.is_file() else {},
        tensors={name: t for file in weight_files(path) for name, t in read_tensors(file).items()},
    )


def weight_files(path: Path) -> list[Path]:
    """The folder's safetensors files: those its index names, or the only one."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return indexed_files(index)
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise UnsupportedModel(
            f"{path} holds only pickled weights ({pickles[0]}), which can run code when they are opened",
            "use a repository that has model.safetensors",
        )
    raise ModelNotFound(f"{path} holds no model.safetensors", "download the model's weights into it")


def indexed_files(index: Path) -> list[Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise DamagedModel(f"{index} has no weight_map", "fetch the model again")
    for name in names.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise DamagedModel(f"{index} names {name!r}, which is no file beside it", "do not trust it")
    files = [index.parent / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.is_file():
            raise DamagedModel(f"{file} is missing though {index.name} names it", "fetch the model again")
    return files


def read_tensors(file: Path) -> dict[str, TensorHeader]:
    """Names, dtypes and shapes in one safetensors file, whose data must lie one after another to its end."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise damaged(file, f"its header should be {length} bytes long and the file has {size}")
        fields = parse_json(stream.read(length), file)
    tensors, spans = {}, []
    for name, entry in fields.items():
        if name == "__metadata__":
            continue
        tensors[name], span = read_entry(file, name, entry)
        spans.append(span)
    end = 0
    for begin, until in sorted(spans):
        if begin != end:
            raise damaged(file, "its tensors overlap or leave gaps")
        end = until
    if end != size - 8 - length:
        raise damaged(file, f"its tensors need {end} bytes and {size - 8 - length} follow the header")
    return tensors


def read_entry(file: Path, name: str, entry: Any) -> tuple[TensorHeader, tuple[int, int]]:
    """One tensor of the header and where its data lies."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        raise damaged(file, f"the header entry of {name} is malformed") from None
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"{name} is stored as {dtype}", f"these run: {', '.join(DTYPE_BYTES)}")
    header = TensorHeader(file, dtype, shape)
    if not whole or end - begin != header.elements * DTYPE_BYTES[dtype]:
        raise damaged(file, f"{name} has shape {list(shape)} of {dtype} in {end - begin} bytes")
    return header, (begin, end)


def read_json(file: Path) -> dict[str, Any]:
    if file.stat().st_size > JSON_LIMIT:
        raise damaged(file, "it is larger than any configuration")
    return parse_json(file.read_bytes(), file)


def parse_json(content: bytes, file: Path) -> dict[str, Any]:
    """An object in which no key stands twice: what two readers understand differently is refused."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise damaged(file, "a key stands in it twice")
        return fields

    try:
        value = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"it is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise damaged(file, "it does not hold a JSON object")
    return value


def damaged(file: Path, why: str) -> DamagedModel:
    return DamagedModel(f"{file} is damaged: {why}", "fetch the model again")
