"""The receipt of an answer: the question, model, setup and answer, so that anyone can recompute it
(`localllm replay`).

Plain data and its JSON, which is validated strictly: damaged or newer receipts are rejected with the reason. It
contains the whole prompt and the whole answer.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from localllm.checkpoint.digest import FileDigest
from localllm.errors import UsageError
from localllm.files import parse_strict_json
from localllm.request import SamplingParams
from localllm.sampling import params_from_json

RECEIPT_VERSION = 1
MAX_TOKEN_ID = 2**31
Kernels = dict[str, tuple[str, ...]]  # kernels used, by operation


@dataclass(frozen=True)
class Model:
    """The model that answered."""

    name: str
    source: str  # what loads it: ORG/REPO@COMMIT, with :FILE for a GGUF file; a path; or the bundled model
    quant: str | None  # as for `--quant`: how the model was made from the source
    stored: dict[str, int]  # bytes by format: {"BF16": ..., "Q4_K": ...}
    hash: str
    hash_kind: str  # `sha256`: of every byte; `samples`: see `FileDigest`
    files: tuple[FileDigest, ...]


@dataclass(frozen=True)
class Setup:
    """The hardware, settings and libraries used."""

    device: str  # cpu, cuda:0
    device_name: str
    instructions: tuple[str, ...]  # processor features that torch uses, and LOCALLLM_CPU
    threads: int
    dtype: str
    kv_dtype: str
    activation_bits: int  # that activations keep where they meet packed weights on a CPU
    context: int  # tokens
    token_budget: int  # maximum tokens per step: longer prompts are split into chunks of this size
    block_size: int  # tokens per block of the cache
    draft: str  # source of draft tokens, of which steps verify several at a time: `lookup` or `off`
    draft_model: str | None  # additional source of drafts: what loads it, as `Model.source`
    deterministic: bool  # as for `--deterministic`
    versions: dict[str, str | None]
    # Processes, as for the flags of these names; `threads` are those of each, and kernels those of the first.
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False


@dataclass(frozen=True)
class Question:
    """The input of the model."""

    prompt: str | tuple[dict[str, Any], ...] | None  # text, messages, or None for token ids alone
    tools: tuple[dict[str, Any], ...] | None
    template_arguments: dict[str, Any]
    token_ids: tuple[int, ...]  # of the prompt, as given to the model
    params: dict[str, Any]  # SamplingParams, with the seed that was drawn if none was given

    @property
    def sampling_params(self) -> SamplingParams:
        return params_from_json(self.params)


@dataclass(frozen=True)
class Answer:
    """The output of the model."""

    token_ids: tuple[int, ...]  # including the end token
    text: str
    reasoning: str
    finish_reason: str


@dataclass(frozen=True)
class Receipt:
    model: Model
    setup: Setup
    kernels: Kernels
    question: Question
    answer: Answer


def to_json(receipt: Receipt) -> dict[str, Any]:
    return {"version": RECEIPT_VERSION, **asdict(receipt)}


def to_text(receipt: Receipt) -> str:
    """Return JSON with one part per line."""
    fields = to_json(receipt).items()
    parts = (f'"{name}": {json.dumps(part, ensure_ascii=False, allow_nan=False)}' for name, part in fields)
    return "{\n" + ",\n".join(parts) + "\n}\n"


def provenance_from_json(model: object, setup: object) -> tuple[Model, Setup]:
    """Parse parts of a receipt from another process. Raises ValueError if they are invalid."""
    from pydantic import TypeAdapter

    return (
        TypeAdapter(Model).validate_json(json.dumps(model), strict=True, extra="forbid"),
        TypeAdapter(Setup).validate_json(json.dumps(setup), strict=True, extra="forbid"),
    )


def read(content: str | bytes, name: str) -> Receipt:
    """Parse the receipt in a file of this name, or in the output of `localllm run --json`, which contains one.

    Raises UsageError, with the problem and its place, for anything else.
    """
    # Imported late: takes 80 ms that writing a receipt does not need.
    from pydantic import TypeAdapter, ValidationError

    try:
        content_json = parse_strict_json(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not JSON ({error})", "use a receipt of `localllm run`") from None
    fields = content_json.get("receipt", content_json) if isinstance(content_json, dict) else None
    if not isinstance(fields, dict) or type(fields.get("version")) is not int or "question" not in fields:
        raise UsageError(f"{name} is not a receipt", "`localllm run MODEL PROMPT --receipt FILE` writes one")
    if (version := fields.pop("version")) != RECEIPT_VERSION:
        raise UsageError(
            f"{name} is a receipt of version {version}, but this localllm reads {RECEIPT_VERSION}", "update it"
        )
    try:
        receipt = TypeAdapter(Receipt).validate_json(json.dumps(fields), strict=True, extra="forbid")
        params_from_json(receipt.question.params)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise damaged_receipt(name, f"{place}: {first['msg']}") from None
    except UsageError as error:
        raise damaged_receipt(name, f"question.params: {error.message}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged_receipt(name, f"question.params: {error!r}") from None
    invalid = [
        token
        for token in (*receipt.question.token_ids, *receipt.answer.token_ids)
        if not 0 <= token < MAX_TOKEN_ID
    ]
    if invalid:
        raise damaged_receipt(name, f"{invalid[0]} is not a token id")
    return receipt


def damaged_receipt(name: str, reason: str) -> UsageError:
    return UsageError(f"{name} is a damaged receipt: {reason}", "create it again")
