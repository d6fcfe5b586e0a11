"""Writes a model as a GGUF file in Q4_0 or Q8_0 for llama.cpp, rounded like ggml.

Matrices are packed one by one, so that memory holds only one of them. The head, or an embedding that is also the
head, is Q8_0; norms and biases are F32, and so are matrices whose rows are not whole blocks. The file is written
atomically. Sources: ggml's `quantize_row_q4_0_ref` and `quantize_row_q8_0_ref`, as implemented in the `gguf`
package; for metadata, tokenizer and names of tensors, llama.cpp's `conversion/*.py`, `src/models/*.cpp` and
`src/llama-vocab.cpp`. Models and tokenizers that these cannot represent raise UnsupportedModel.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from localllm.arch.config import (
    AttentionConfig,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    ModelConfig,
    RopeConfig,
)
from localllm.arch.describe import parse_config
from localllm.checkpoint.gguf.names import BLOCK, GLOBAL_NAMES, INTERLEAVED_ROPE, LAYER_NAMES
from localllm.checkpoint.header import Header, TensorHeader
from localllm.checkpoint.tensors import Weights, check_finite
from localllm.errors import UnsupportedModel, UsageError
from localllm.files import explain_disk_errors
from localllm.hub.model_files import read_license
from localllm.quantize.source import check_source
from localllm.quantize.store import DRAFT_SUFFIX, check_disk_space, publish_draft
from localllm.text.backends import SPACE
from localllm.text.pretokenizers import GPT2, PRE_TOKENIZERS
from localllm.text.tokenizer import Tokenizer
from localllm.text.vocabulary import TokenType

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_FREQUENCIES = "rope_freqs.weight"
OUTER_NAMES = {name: stored for stored, name in reversed(GLOBAL_NAMES.items())}
INNER_NAMES = {name: stored for stored, name in reversed(LAYER_NAMES.items())}
GGMLType = gguf.GGMLQuantizationType
TYPES = {
    "q4_0": (GGMLType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
    "q8_0": (GGMLType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
PACK_ELEMENTS = 2**22  # packed at a time
BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
# Preferred names among equivalent pre-tokenizers.
PREFERRED_PRE_TOKENIZERS = ("llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "gpt-4o")
SPECIAL_TOKEN_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
UNMERGED_SCORE = -1e6  # of tokens that no merge produces
GGUF_SUFFIX = ".gguf"
LOCK_SUFFIX = ".lock"  # suffix of the lock file
Progress = Callable[[str, int, int], None]  # tensor, number of written tensors, number of tensors


def write_gguf(
    header: Header,
    type: str,
    file: Path,
    on_progress: Progress = lambda name, done, count: None,
    *,
    force: bool = False,
) -> Path:
    """Write a GGUF file. type: a key of TYPES.

    Raises UsageError if the file exists, and UnsupportedModel for a source, family or tokenizer that cannot be
    converted, both before any work; DiskFull; DamagedModel like `Weights`.
    """
    check_output_file(header, type, file, force=force)
    architecture, config = gguf_architecture(header), parse_config(header.config)
    name = header.path.resolve().name
    tokenizer = Tokenizer.from_folder(header.path)
    keys = {f"tokenizer.{key}": value for key, value in tokenizer_keys(tokenizer, config.vocab_size, name).items()}
    keys |= {f"{architecture}.{key}": value for key, value in model_keys(config).items()}
    keys |= {"general.name": name, "general.file_type": int(TYPES[type][1]), "general.quantization_version": 2}
    if license := read_license(header.path):
        keys["general.license"] = license
    types = tensor_types(header, config, type)
    sizes = {entry: packed_bytes(header.tensors[entry], tensor_type) for entry, tensor_type in types.items()}
    check_disk_space(file, sum(sizes.values()))
    with locked_draft(file) as draft:
        writer = gguf.GGUFWriter(draft, architecture)
        try:
            add_keys(writer, keys)
            factors = rope_frequency_divisors(config)
            if factors:
                writer.add_tensor_info(ROPE_FREQUENCIES, [len(factors)], np.dtype(np.float32), 4 * len(factors))
            for entry, tensor_type in types.items():
                shape = header.tensors[entry].shape
                writer.add_tensor_info(gguf_name(entry), shape, np.dtype(np.float32), sizes[entry], tensor_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if factors:
                writer.write_tensor_data(np.array(factors, dtype=np.float32))
            weights = Weights(header)
            for done, (entry, tensor_type) in enumerate(types.items()):
                tensor = weights.take(entry, header.tensors[entry].shape)
                check_finite(header.tensors[entry].name, tensor)
                heads = rotary_heads(entry, architecture, config)
                writer.write_tensor_data(
                    pack_tensor(interleave_rotary_pairs(tensor, heads) if heads else tensor, tensor_type)
                )
                on_progress(entry, done + 1, len(types))
        finally:
            writer.close()
    return file


@contextmanager
def locked_draft(file: Path) -> Iterator[Path]:
    """Yield a draft path, exclusive to this process, that is renamed to `file` at the end, or deleted on errors.

    Raises UsageError if another process is writing it.
    """
    draft, lock = (file.with_name(file.name + end) for end in (DRAFT_SUFFIX, LOCK_SUFFIX))
    with explain_disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file_lock = FileLock(lock, timeout=0)
        try:
            file_lock.acquire()
        except Timeout:
            raise UsageError(
                f"another process is writing {file}", "wait until it has finished, or stop it"
            ) from None
        try:
            yield draft
            publish_draft(draft, file)
        finally:
            draft.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
            file_lock.release()


def check_output_file(header: Header, type: str, file: Path, *, force: bool) -> None:
    if type not in TYPES:
        raise UsageError(f"{type!r} is not a supported GGUF type", f"name one of {', '.join(TYPES)}")
    check_source(header)
    if file.suffix != GGUF_SUFFIX:
        raise UsageError(
            f"{file} does not end in {GGUF_SUFFIX}", f"for example, write -o {file.with_suffix(GGUF_SUFFIX)}"
        )
    if file.exists() and not file.is_file():
        raise UsageError(f"{file} exists and is not a file", "name another file")
    if file.exists() and not force:
        raise UsageError(f"{file} already exists", "name another file, or add --force to replace it")


def tensor_types(header: Header, config: ModelConfig, type: str) -> dict[str, GGMLType]:
    """Return the type of each tensor; a head that is the embedding is stored once."""
    head = "embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    types: dict[str, GGMLType] = {}
    for name, tensor in header.tensors.items():
        tensor_type = GGMLType.Q8_0 if name == head else TYPES[type][0]
        blocks = len(tensor.shape) > 1 and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[tensor_type][0] == 0
        if not (config.tie_embeddings and name.startswith("lm_head.")):
            types[name] = tensor_type if blocks else GGMLType.F32
    return types


def packed_bytes(tensor: TensorHeader, kind: GGMLType) -> int:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    return tensor.elements // elements * size


def gguf_architecture(header: Header) -> str:
    """Return GGUF's name of the architecture. Raises UnsupportedModel for a model that it cannot represent."""
    [family, *_] = header.config["architectures"]
    if family not in ARCHITECTURES:
        names = ", ".join(name.removesuffix("ForCausalLM") for name in ARCHITECTURES)
        raise unsupported_model(f"{family} models", f"these families can be converted: {names}")
    config = parse_config(header.config)
    if config != expressible_config(config, ARCHITECTURES[family]):
        raise unsupported_model(
            f"a {family} model with windows, scales or an unusual rope",
            "leave out --to gguf: a folder keeps them",
        )
    return ARCHITECTURES[family]


def expressible_config(config: ModelConfig, architecture: str) -> ModelConfig:
    """Return the model that llama.cpp would construct from the keys; if it differs, the keys cannot represent
    `config`.
    """
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    rope = mixer.rope if isinstance(mixer, AttentionConfig) else None
    if not isinstance(mixer, AttentionConfig) or not isinstance(ffn, MLPConfig) or rope is None:
        raise unsupported_model(f"{architecture} models of this type", "leave out --to gguf")
    scaling = rope.scaling if isinstance(rope.scaling, LinearScaling | Llama3Scaling) else None
    layer = LayerConfig(
        AttentionConfig(
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.head_dim,
            rope=RopeConfig(rope.theta, mixer.head_dim, scaling),
            scale=mixer.head_dim**-0.5,
            qk_norm="per_head" if architecture == "qwen3" else None,
            qkv_bias=mixer.qkv_bias and architecture != "qwen3",
            out_bias=mixer.out_bias and architecture == "llama",
        ),
        MLPConfig(ffn.intermediate_size, bias=ffn.bias and architecture == "llama"),
    )
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=(layer,) * len(config.layers),
        norm_eps=config.norm_eps,
        tie_embeddings=config.tie_embeddings,
        max_context=config.max_context,
        default_context=config.default_context,
        eos_ids=config.eos_ids,
    )


def model_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys after the architecture, for a model that `gguf_architecture` accepts."""
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    assert isinstance(mixer, AttentionConfig) and isinstance(ffn, MLPConfig) and mixer.rope
    keys: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "block_count": len(config.layers),
        "feed_forward_length": ffn.intermediate_size,
        "attention.head_count": mixer.heads,
        "attention.head_count_kv": mixer.kv_heads,
        "attention.key_length": mixer.head_dim,
        "attention.value_length": mixer.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.dimension_count": mixer.rope.dim,
        "rope.freq_base": float(mixer.rope.theta),
    }
    if isinstance(mixer.rope.scaling, LinearScaling):
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(mixer.rope.scaling.factor)}
    return keys


def rope_frequency_divisors(config: ModelConfig) -> list[float] | None:
    """Return the divisors of frequencies for Llama 3.1's scaling, which GGUF stores as a tensor; otherwise
    None.
    """
    mixer = config.layers[0].mixer
    rope = mixer.rope if isinstance(mixer, AttentionConfig) else None
    if rope is None or not isinstance(scaling := rope.scaling, Llama3Scaling):
        return None
    divisors: list[float] = []
    for pair in range(0, rope.dim, 2):
        rotations = scaling.original_context / (2 * math.pi * rope.theta ** (pair / rope.dim))
        ramp = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = min(1.0, max(0.0, ramp))
        divisors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return divisors


def gguf_name(name: str) -> str:
    """Return the GGUF name for a runtime name."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, layer, inner = name.split(".", 2)
    stem, _, suffix = inner.rpartition(".")
    block_name = f"blk.{layer}.{INNER_NAMES[stem]}.{suffix}"
    assert BLOCK.fullmatch(block_name)
    return block_name


def unsupported_model(what: str, remedy: str) -> UnsupportedModel:
    return UnsupportedModel(f"{what} cannot be written as GGUF", remedy)


def rotary_heads(name: str, architecture: str, config: ModelConfig) -> int | None:
    """Return the number of heads in a tensor whose rotary pairs must be adjacent in GGUF; otherwise None."""
    mixer = config.layers[0].mixer
    if architecture not in INTERLEAVED_ROPE or not isinstance(mixer, AttentionConfig):
        return None
    return {"q_proj": mixer.heads, "k_proj": mixer.kv_heads}.get(name.split(".")[-2])


def interleave_rotary_pairs(rows: Tensor, heads: int) -> Tensor:
    """Make the two elements of a rotary pair adjacent. Source: `LlamaModel.permute` of llama.cpp"""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def pack_tensor(tensor: Tensor, kind: GGMLType) -> np.ndarray[Any, Any]:
    """Pack a tensor in pieces of whole rows, which have their own scales."""
    rows = tensor if tensor.dim() > 1 else tensor[None]
    pieces = rows.split(max(1, PACK_ELEMENTS // rows.shape[-1]))
    return np.concatenate([gguf.quantize(piece.to(torch.float32).numpy(), kind) for piece in pieces])


def add_keys(writer: gguf.GGUFWriter, keys: Mapping[str, Any]) -> None:
    for key, value in keys.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)


def tokenizer_keys(tokenizer: Tokenizer, rows: int, name: str) -> dict[str, Any]:
    """Return the keys after `tokenizer.`. rows: of the embedding, without which a token is left out; name: of the
    model, for errors.

    Byte-level BPE becomes the model `gpt2` with the name of its pre-tokenizer, and BPE over characters the model
    `llama` with scores. Raises UnsupportedModel for a tokenizer that GGUF cannot represent.
    """
    tokenizer_json = tokenizer.as_json()
    model, added = tokenizer_json["model"], {token["id"]: token for token in tokenizer_json["added_tokens"]}
    if model["type"] != "BPE":
        raise unsupported_tokenizer(name, f"a {model['type']} model")
    ids = {token: i for token, i in model["vocab"].items()} | {t["content"]: i for i, t in added.items()}
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types = [int(TokenType.UNUSED)] * rows
    unknown = tokenizer.special_tokens.get("unk_token")
    for token, i in ids.items():
        if i >= rows:
            continue
        tokens[i], types[i] = (
            token,
            int(token_type(token, added.get(i), unknown, has_byte_tokens=model["byte_fallback"])),
        )
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if is_byte_level(tokenizer_json):
        keys: dict[str, Any] = {
            "ggml.model": "gpt2",
            "ggml.pre": pre_tokenizer_name(tokenizer_json, name),
            "ggml.merges": [" ".join(merge) for merge in merges],
        }
    else:
        keys = {"ggml.model": "llama", "ggml.pre": "default", "ggml.scores": merge_scores(tokens, merges)}
        keys["ggml.add_space_prefix"] = adds_prefix_space(tokenizer_json, name)
    keys |= {"ggml.tokens": tokens, "ggml.token_type": types}
    for key, short in SPECIAL_TOKEN_KEYS.items():
        i = ids.get(tokenizer.special_tokens.get(key, ""))
        if i is not None and i < rows:
            keys[f"ggml.{short}_token_id"] = i
    encoded = tokenizer.encode("a")
    keys["ggml.add_bos_token"] = encoded[0] == keys.get("ggml.bos_token_id")
    keys["ggml.add_eos_token"] = encoded[-1] == keys.get("ggml.eos_token_id")
    return keys | template_keys(tokenizer)


def token_type(
    token: str, added: dict[str, Any] | None, unknown: str | None, *, has_byte_tokens: bool
) -> TokenType:
    if added is not None:
        if token == unknown:
            return TokenType.UNKNOWN
        return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return TokenType.BYTE if has_byte_tokens and BYTE_TOKEN.fullmatch(token) else TokenType.NORMAL


def flatten_steps(part: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, however they are nested."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[inner]:
            yield from flatten_steps(step, inner)
    else:
        yield part


def is_byte_level(tokenizer_json: dict[str, Any]) -> bool:
    return any(
        step["type"] == "ByteLevel" for step in flatten_steps(tokenizer_json["pre_tokenizer"], "pretokenizers")
    )


def pre_tokenizer_name(tokenizer_json: dict[str, Any], name: str) -> str:
    """Return llama.cpp's name for the tokenizer's patterns."""
    patterns: list[str] = []
    for step in flatten_steps(tokenizer_json["pre_tokenizer"], "pretokenizers"):
        match step["type"]:
            case "Split" if step["behavior"].lower() == "isolated" and not step["invert"]:
                patterns.append(step["pattern"].get("Regex", ""))
            case "Digits" if step["individual_digits"]:
                patterns.append(r"\p{N}")
            case "ByteLevel" if not step["add_prefix_space"]:
                patterns += [GPT2] if step["use_regex"] else []
            case kind:
                raise unsupported_tokenizer(name, f"the pre-tokenizer {kind}")
    other_steps = [
        step["type"]
        for step in flatten_steps(tokenizer_json["normalizer"], "normalizers")
        if step["type"] != "NFC"
    ]
    if other_steps:
        raise unsupported_tokenizer(name, f"the normalizer {other_steps[0]}")
    ignore_merges = tokenizer_json["model"].get("ignore_merges", False)
    for candidate in (*PREFERRED_PRE_TOKENIZERS, *PRE_TOKENIZERS):
        pre_tokenizer = PRE_TOKENIZERS[candidate]
        if pre_tokenizer.patterns == tuple(patterns) and pre_tokenizer.ignore_merges == ignore_merges:
            return candidate
    raise unsupported_tokenizer(name, "patterns that llama.cpp has no name for")


def adds_prefix_space(tokenizer_json: dict[str, Any], name: str) -> bool:
    """Return whether a space is prepended to a text. Raises UnsupportedModel for other treatments of spaces."""
    adds_prefix = replaces_spaces = False
    for step in (
        *flatten_steps(tokenizer_json["normalizer"], "normalizers"),
        *flatten_steps(tokenizer_json["pre_tokenizer"], "pretokenizers"),
    ):
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                adds_prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                replaces_spaces = True
            case {"type": "Metaspace", "replacement": "▁", "split": False}:
                # It adds none to a text that begins with a space, which GGUF cannot express.
                adds_prefix, replaces_spaces = step["prepend_scheme"] != "never", True
            case _:
                raise unsupported_tokenizer(name, f"the step {step['type']}")
    if not replaces_spaces:
        raise unsupported_tokenizer(name, f"spaces that are not represented as {SPACE}")
    return adds_prefix


def merge_scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Return scores that decrease in the order of merges: SentencePiece merges the pair with the highest score."""
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks) + 1)
    return [
        -float(ranks[token]) if token in ranks else UNMERGED_SCORE if len(token) > 1 else 0.0 for token in tokens
    ]


def template_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    templates = dict(tokenizer.chat_templates)
    default = templates.pop("default", None)
    keys: dict[str, Any] = {"chat_template": default} if default else {}
    if templates:
        keys["chat_templates"] = sorted(templates)
    return keys | {f"chat_template.{name}": source for name, source in templates.items()}


def unsupported_tokenizer(name: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the tokenizer of {name} has {what}, which GGUF cannot represent",
        "leave out --to gguf: a folder keeps it",
    )
