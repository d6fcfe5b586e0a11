"""A summary of a model's files for `list` and `show`, without reading weights or importing torch."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.arch.config import (
    DeltaNetConfig,
    LatentConfig,
    Mixer,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    ShortConvConfig,
)
from localllm.arch.cost import (
    active_parameter_count,
    kv_bytes_per_token,
    parameter_count,
    state_bytes,
    why_not_4_bit_cache,
)
from localllm.arch.describe import parse_config
from localllm.arch.pooling import embedding_size, parse_pooling
from localllm.checkpoint.header import Header, TensorHeader, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.checkpoint.matrices import CODE_SUFFIXES, find_packed_matrix
from localllm.errors import UnsupportedModel
from localllm.files import damaged_file
from localllm.hub.model_files import read_license
from localllm.quant.packing import kv_element_bytes
from localllm.request import SamplingParams
from localllm.text.folder import read_chat_templates


def summarize_layers(config: ModelConfig) -> tuple[tuple[str, int], ...]:
    """Return each distinct layer description with its count, in the order of first occurrence."""
    counts = Counter(f"{describe_mixer(layer.mixer)}, {describe_ffn(layer.ffn)}" for layer in config.layers)
    return tuple(counts.items())


def describe_mixer(c: Mixer) -> str:
    if isinstance(c, DeltaNetConfig):
        return f"delta net ({c.value_heads} heads of {c.key_dim} x {c.value_dim})"
    if isinstance(c, ShortConvConfig):
        return f"convolution over {c.kernel_size} tokens"
    if isinstance(c, LatentConfig):
        return f"latent attention ({c.heads} heads, latents of {c.kv_lora_rank} and keys of {c.rope_dim})"
    window = f" to the last {c.window} tokens" if c.window else ""
    shared = f", those of layer {c.kv_source}" if c.kv_source is not None else ""
    return f"attention{window} ({c.heads} heads, {c.kv_heads} KV heads of {c.head_dim}{shared})"


def describe_ffn(c: MLPConfig | MoEConfig) -> str:
    if isinstance(c, MLPConfig):
        return f"MLP of {c.intermediate_size}{'' if c.gated else ' without a gate'}"
    shared = " and a shared one" if c.shared else ""
    return f"{c.experts_per_token} of {c.experts} experts of {c.expert.intermediate_size}{shared}"


KV_ELEMENT_BYTES = 2  # of a 16-bit KV cache


@dataclass(frozen=True)
class Format:
    """The tensors that are stored in one format."""

    name: str  # as in the file: BF16, I8, Q4_K, ...; or the type of codes in int32 words: INT4, INT8
    tensors: int
    nbytes: int


@dataclass(frozen=True)
class ModelSummary:
    architecture: str
    layers: tuple[tuple[str, int], ...]  # descriptions of distinct layers, and their counts
    hidden_size: int
    vocab_size: int
    context: int  # tokens
    parameters: int
    active_parameters: int  # used for one token
    kv_bytes_per_token: int  # in 16 bits
    kv_bytes_per_token_in_4_bits: int | None  # None if they cannot be stored so
    dimensions: int | None  # of an embedder's vectors; None: it generates tokens
    state_bytes: int  # per sequence, of recurrent layers in 16 bits and float32
    formats: tuple[Format, ...]  # in descending order of bytes
    weight_bytes: int
    quantization: str | None
    refused: UnsupportedModel | None  # why the quantization is not supported
    chat_templates: tuple[str, ...]  # names
    license: str | None
    sampling: SamplingParams  # what generation_config.json recommends


def summarize_model(path: Path) -> ModelSummary:
    """Summarize a model. Raises the errors of `read_header`, and UnsupportedModel for an unsupported family."""
    header = read_header(path)
    config = parse_config(header.config)
    return ModelSummary(
        architecture=header.config["architectures"][0],
        layers=summarize_layers(config),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context=config.max_context,
        parameters=parameter_count(config),
        active_parameters=active_parameter_count(config),
        kv_bytes_per_token=kv_bytes_per_token(config, KV_ELEMENT_BYTES),
        kv_bytes_per_token_in_4_bits=None
        if why_not_4_bit_cache(config)
        else kv_bytes_per_token(config, *kv_element_bytes("int4")),
        dimensions=embedding_size(config, parse_pooling(header.config, config)) if config.encoder else None,
        state_bytes=state_bytes(config, KV_ELEMENT_BYTES),
        formats=tensor_formats(header),
        weight_bytes=header.stored_bytes,
        quantization=header.quantization,
        refused=quantization_refusal(header),
        chat_templates=tuple(read_chat_templates(path))
        if header.gguf is None
        else gguf_template_names(header.gguf, path),
        license=read_license(path) if header.gguf is None else gguf_license(header.gguf),
        sampling=SamplingParams.from_generation_config(header.generation_config),
    )


def quantization_refusal(header: Header) -> UnsupportedModel | None:
    try:
        check_quantization(header.config)
    except UnsupportedModel as refused:
        return refused
    return None


def gguf_template_names(metadata: Mapping[str, Any], file: Path) -> tuple[str, ...]:
    names = metadata.get("tokenizer.chat_templates", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise damaged_file(file, "tokenizer.chat_templates is not a list of str")
    default = ["default"] if "tokenizer.chat_template" in metadata else []
    return tuple(dict.fromkeys(default + names))


def gguf_license(metadata: Mapping[str, Any]) -> str | None:
    license_id = metadata.get("general.license")
    return license_id if isinstance(license_id, str) else None


def tensor_formats(header: Header) -> tuple[Format, ...]:
    """Return the formats of tensors; a stack of experts counts as one tensor."""
    names: dict[str, set[str]] = defaultdict(set)
    sizes: dict[str, int] = defaultdict(int)
    for name, tensor in header.tensors.items():
        format_name = stored_format(header, name, tensor)
        names[format_name].add(tensor.name)
        sizes[format_name] += tensor.nbytes
    formats = [Format(format_name, len(names[format_name]), sizes[format_name]) for format_name in names]
    return tuple(sorted(formats, key=lambda format_name: (-format_name.nbytes, format_name.name)))


def stored_format(header: Header, name: str, tensor: TensorHeader) -> str:
    if tensor.dtype != "I32" or quantization_refusal(header):
        return tensor.dtype
    matrix, _, suffix = name.rpartition(".")
    packed = find_packed_matrix(header, matrix) if suffix in CODE_SUFFIXES else None
    return packed.format.upper() if packed else tensor.dtype
