"""Descriptions of installed models in `/api/tags`, `/api/ps` and `/api/show`, from headers alone."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localllm.api.ollama.responses import JsonObject, format_rfc3339
from localllm.checkpoint.digest import combine_digests, digest_model
from localllm.checkpoint.facts import ModelSummary, summarize_model
from localllm.checkpoint.header import Header, read_header
from localllm.hub.gguf import is_gguf, quant_tag
from localllm.modelfile.edition import Edition, to_json
from localllm.modelfile.parse import format_modelfile
from localllm.request import SamplingParams
from localllm.text.folder import read_chat_templates
from localllm.text.output.formats import OutputFormat

MAX_LIST_LEN = 32  # entries; longer GGUF values are null unless `verbose` is set
CONFIG_NAMES = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}
OPTION_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}


@dataclass(frozen=True)
class ModelDetails:
    """One model as `/api/tags` lists it."""

    name: str  # with a tag
    path: Path
    modified_at: float  # seconds since 1970
    size_bytes: int  # of its files
    digest: str  # 64 hexadecimal digits
    family: str
    file_format: str  # gguf, safetensors
    parameters: int
    quantization_level: str
    context: int  # tokens
    hidden_size: int
    capabilities: tuple[str, ...]
    parent: str = ""

    @classmethod
    def read(cls, name: str, path: Path) -> "ModelDetails":
        """Read up to 32 MiB of each file, for the digest. Raises LocalLLMError for unreadable files."""
        facts, header, files = summarize_model(path), read_header(path), digest_model(path)
        folder = path.parent if path.is_file() else path
        return cls(
            name=with_tag(name),
            path=path,
            modified_at=max((folder / file.path).stat().st_mtime for file in files),
            size_bytes=sum(file.size for file in files),
            digest=combine_digests(files)[0],
            family=architecture_name(header),
            file_format="gguf" if is_gguf(path) else "safetensors",
            parameters=facts.parameters,
            quantization_level=(quant_tag(path) if path.is_file() else None) or facts.formats[0].name,
            context=facts.context,
            hidden_size=facts.hidden_size,
            capabilities=("embedding",) if facts.dimensions else capabilities_of(chat_templates(header)),
        )

    def with_name(self, name: str) -> "ModelDetails":
        return replace(self, name=with_tag(name))

    def with_edition(self, name: str, edition: Edition, created_at: float) -> "ModelDetails":
        """The model as an edition. created_at: its creation in seconds since 1970."""
        identity = f"{self.digest}\n{json.dumps(to_json(edition), sort_keys=True)}"
        return replace(
            self,
            name=with_tag(name),
            digest=hashlib.sha256(identity.encode()).hexdigest(),
            modified_at=created_at,
            parent=edition.parent,
            capabilities=capabilities_of({"default": edition.template}) if edition.template else self.capabilities,
        )

    def details_object(self) -> JsonObject:
        return {
            "parent_model": self.parent,
            "format": self.file_format,
            "family": self.family,
            "families": [self.family],
            "parameter_size": format_count(self.parameters),
            "quantization_level": self.quantization_level,
            "context_length": self.context,
            "embedding_length": self.hidden_size,
        }

    def running_object(self) -> JsonObject:
        return {"name": self.name, "model": self.name, "digest": self.digest, "details": self.details_object()}

    def listed_object(self) -> JsonObject:
        return {
            "name": self.name,
            "model": self.name,
            "modified_at": format_rfc3339(self.modified_at),
            "size": self.size_bytes,
            "digest": self.digest,
            "details": self.details_object(),
            "capabilities": list(self.capabilities),
        }


def show_object(details: ModelDetails, edition: Edition | None, *, can_insert: bool, verbose: bool) -> JsonObject:
    """Answer of `/api/show`. edition: if the name is that of one; can_insert: the model supports infill."""
    header, facts = read_header(details.path), summarize_model(details.path)
    own = edition or Edition(details.name)
    template = own.template or chat_templates(header).get("default", "")
    parameters = {**recommended_options(facts.sampling), **own.parameters}
    source = own.parent or own.source
    modelfile = f'# Modelfile generated by "localllm show"\n\n{format_modelfile(own, source)}'
    shown: JsonObject = {
        "license": "\n".join(own.license) or facts.license,
        "modelfile": modelfile,
        "parameters": "\n".join(_columns(parameters)),
        "template": template,
        "system": own.system,
        "messages": list(own.messages),
        "details": details.details_object(),
        "model_info": model_info(header, facts, verbose=verbose),
        "capabilities": [*details.capabilities, *(["insert"] if can_insert else [])],
        "modified_at": format_rfc3339(details.modified_at),
    }
    if verbose:
        shown["tensors"] = [
            {"name": name, "type": tensor.dtype, "shape": list(tensor.shape)}
            for name, tensor in header.tensors.items()
        ]
    return {key: value for key, value in shown.items() if value not in (None, "", [])}


def recommended_options(params: SamplingParams) -> JsonObject:
    """Sampling parameters that the model recommends, under Ollama's names."""
    neutral = SamplingParams()
    return {
        option: getattr(params, name)
        for option, name in OPTION_NAMES.items()
        if getattr(params, name) != getattr(neutral, name)
    }


def model_info(header: Header, facts: ModelSummary, *, verbose: bool) -> JsonObject:
    """Metadata under GGUF's keys, from a GGUF file or translated from config.json."""
    family = architecture_name(header)
    general: JsonObject = {"general.architecture": family, "general.parameter_count": facts.parameters}
    if header.gguf is not None:
        return general | {key: _shorten(value, verbose=verbose) for key, value in header.gguf.items()}
    config = header.config.get("text_config") or header.config
    values: JsonObject = {
        "context_length": facts.context,
        "embedding_length": facts.hidden_size,
        "block_count": sum(count for _, count in facts.layers),
        "vocab_size": facts.vocab_size,
        **{key: config.get(name) for key, name in CONFIG_NAMES.items()},
    }
    numbers = {key: value for key, value in values.items() if type(value) in (int, float)}
    ids = {key: header.config.get(key) for key in ("bos_token_id", "eos_token_id")}
    tokens = {f"tokenizer.ggml.{key}": value for key, value in ids.items() if type(value) is int}
    return general | {f"{family}.{key}": value for key, value in numbers.items()} | tokens


def _shorten(value: Any, *, verbose: bool) -> Any:
    """The value, or null for a long list such as a vocabulary, as in Ollama."""
    return None if isinstance(value, list) and len(value) > MAX_LIST_LEN and not verbose else value


def architecture_name(header: Header) -> str:
    stated = header.gguf["general.architecture"] if header.gguf is not None else header.config.get("model_type")
    return str(stated or header.config["architectures"][0])


def chat_templates(header: Header) -> dict[str, str]:
    """Chat templates by name."""
    if header.gguf is None:
        return read_chat_templates(header.path)
    key = "tokenizer.chat_template"
    templates = {
        name.removeprefix(key).removeprefix("."): text
        for name, text in header.gguf.items()
        if name.startswith(key)
    }
    return {name or "default": text for name, text in templates.items() if isinstance(text, str)}


def capabilities_of(templates: Mapping[str, str]) -> tuple[str, ...]:
    """Capabilities of a model with these chat templates."""
    tools = any(re.search(r"\btools\b", source) for source in templates.values())
    can_think = OutputFormat.detect(templates, ()).can_reason
    return ("completion", *(["tools"] if tools else []), *(["thinking"] if can_think else []))


def with_tag(name: str) -> str:
    """The name with a tag after a colon, as Ollama's clients expect."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def format_count(number: int) -> str:
    """A parameter count as in Ollama: `8.0B`, `494.03M`."""
    for unit, suffix, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if number >= unit:
            return f"{number / unit:.{digits}f}{suffix}"
    return str(number)


def _columns(parameters: Mapping[str, Any]) -> list[str]:
    """One line per value; a list has one per item."""
    rows = [
        (name, item)
        for name, value in parameters.items()
        for item in (value if isinstance(value, list) else [value])
    ]
    return [f"{name:<30} {json.dumps(value, ensure_ascii=False)}" for name, value in rows]
