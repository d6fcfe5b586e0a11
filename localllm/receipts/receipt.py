"""The receipt of an answer: what was asked, of which model, on what and with what, and what came back, so that
anybody can have it computed again (`localllm replay`).

Plain data and its JSON, which is checked strictly: what is damaged or of a later version is refused by name. It
holds the whole prompt and the whole answer.
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
Kernels = dict[str, tuple[str, ...]]  # the kernels that ran, by operation


@dataclass(frozen=True)
class Model:
    """The model that answered."""

    name: str
    source: str  # what loads this very model: ORG/REPO@COMMIT, with :FILE for one of GGUF; a path; the boxed one's
    quant: str | None  # as `--quant`: what was made of the source and answered
    stored: dict[str, int]  # bytes by format: {"BF16": ..., "Q4_K": ...}
    hash: str
    hash_kind: str  # `sha256`: of every byte; `samples`: see `FileDigest`
    files: tuple[FileDigest, ...]


@dataclass(frozen=True)
class Setup:
    """What it ran on, with and in."""

    device: str  # cpu, cuda:0
    device_name: str
    instructions: tuple[str, ...]  # that torch makes use of in the processor, and LOCALLLM_CPU
    threads: int
    dtype: str
    kv_dtype: str
    activation_bits: int  # that activations keep where they meet packed weights on a CPU
    context: int  # tokens
    token_budget: int  # most tokens of a step: longer prompts are computed in so large chunks
    block_size: int  # tokens of a block of the cache
    draft: str  # who guessed tokens, which steps verified several at a time: `lookup` or `off`
    draft_model: str | None  # that guessed, too: what loads it, as `Model.source`
    deterministic: bool  # as `--deterministic`
    versions: dict[str, str | None]


@dataclass(frozen=True)
class Question:
    """What was asked."""

    prompt: str | tuple[dict[str, Any], ...] | None  # text, messages, or None: the token ids alone
    tools: tuple[dict[str, Any], ...] | None
    template_arguments: dict[str, Any]
    token_ids: tuple[int, ...]  # of the prompt, as the model read it
    params: dict[str, Any]  # SamplingParams, with the seed that was drawn where none was given

    @property
    def sampling_params(self) -> SamplingParams:
        return params_from_json(self.params)


@dataclass(frozen=True)
class Answer:
    """What came back."""

    token_ids: tuple[int, ...]  # with that of the end
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
    """JSON, a part a line."""
    fields = to_json(receipt).items()
    parts = (f'"{name}": {json.dumps(part, ensure_ascii=False, allow_nan=False)}' for name, part in fields)
    return "{\n" + ",\n".join(parts) + "\n}\n"


def provenance_from_json(model: object, setup: object) -> tuple[Model, Setup]:
    """Parts of a receipt that another process has found out. Raises ValueError where they are none."""
    from pydantic import TypeAdapter

    return (
        TypeAdapter(Model).validate_json(json.dumps(model), strict=True, extra="forbid"),
        TypeAdapter(Setup).validate_json(json.dumps(setup), strict=True, extra="forbid"),
    )


def read(content: str | bytes, name: str) -> Receipt:
    """The receipt in a file of that name, or in the output of `localllm run --json`, which holds one.

    Raises UsageError, with what is wrong and where, for anything else.
    """
    from pydantic import TypeAdapter, ValidationError  # 80 ms that writing one need not wait for

    try:
        found = parse_strict_json(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name} is not JSON ({error})", "give a receipt of `localllm run`") from None
    fields = found.get("receipt", found) if isinstance(found, dict) else None
    if not isinstance(fields, dict) or type(fields.get("version")) is not int or "question" not in fields:
        raise UsageError(f"{name} is no receipt", "`localllm run MODEL PROMPT --receipt FILE` writes one")
    if (version := fields.pop("version")) != RECEIPT_VERSION:
        raise UsageError(
            f"{name} is a receipt of version {version}, and this localllm reads {RECEIPT_VERSION}", "update it"
        )
    try:
        receipt = TypeAdapter(Receipt).validate_json(json.dumps(fields), strict=True, extra="forbid")
        params_from_json(receipt.question.params)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise damaged_receipt(name, f"{where}: {first['msg']}") from None
    except UsageError as error:
        raise damaged_receipt(name, f"question.params: {error.message}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged_receipt(name, f"question.params: {error!r}") from None
    strange = [t for t in (*receipt.question.token_ids, *receipt.answer.token_ids) if not 0 <= t < MAX_TOKEN_ID]
    if strange:
        raise damaged_receipt(name, f"{strange[0]} is no token")
    return receipt


def damaged_receipt(name: str, reason: str) -> UsageError:
    return UsageError(f"{name} is a damaged receipt: {reason}", "have it written again")
