"""Bodies of Ollama's API. Null and missing fields mean Ollama's defaults. Options may also be top-level fields, as
clients of other APIs send them."""

import re
from collections.abc import Mapping
from typing import Any

from localllm.api.body import StrictModel, drop_nulls, validate
from localllm.errors import BadField
from localllm.hub.local_names import find_edition
from localllm.hub.names import is_path
from localllm.modelfile.edition import CreateRequest, Edition
from localllm.modelfile.options import SAMPLING_OPTIONS

DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
UNLIMITED_S = 1e12  # longer durations mean forever
DURATION = re.compile(r"[+-]?(?:\d{1,12}(?:\.\d{0,9})?(?:ns|us|µs|μs|ms|s|m|h))+|[+-]?0")
SECONDS = re.compile(r"[+-]?\d{1,12}(\.\d{0,9})?")
DURATION_PART = re.compile(r"([\d.]+)(ns|us|µs|μs|ms|s|m|h)")
UNSUPPORTED_CREATE_FIELDS = ("adapters", "draft_files", "draft_quantize", "renderer", "parser", "requires", "info")
UNSUPPORTED_CREATE_FIELDS += ("remote_host",)
LEGACY_CREATE_FIELDS = ("path", "modelfile", "quantization")  # of Ollama before 0.5


class CommonBody(StrictModel):
    """Fields of `/api/generate` and `/api/chat`."""

    model: str
    stream: bool | None = None
    format: Any = None
    keep_alive: Any = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    truncate: bool | None = None
    shift: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class GenerateBody(CommonBody):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[str] | None = None


class ChatBody(CommonBody):
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None


class NameBody(StrictModel):
    """`name` is the former name of `model`."""

    model: str | None = None
    name: str | None = None


class ShowBody(NameBody):
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


class PullBody(NameBody):
    stream: bool | None = None
    insecure: bool | None = None


class CopyBody(StrictModel):
    source: str
    destination: str


class CreateBody(NameBody):
    """A body of `/api/create`; `parse_create_request` renames `from`, a keyword of Python, to `source`."""

    source: str | None = None
    files: dict[str, str] | None = None
    template: str | None = None
    system: str | None = None
    license: str | list[str] | None = None
    parameters: dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None
    quantize: str | None = None
    stream: bool | None = None


def gather_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with top-level options moved into `options`, whose own values take precedence."""
    top_level = {name: value for name, value in body.items() if name in SAMPLING_OPTIONS}
    options = body.get("options")
    if not top_level or not isinstance(options, Mapping | None):
        return dict(body)
    fields = {name: value for name, value in body.items() if name not in top_level}
    return fields | {"options": {**drop_nulls(top_level), **(options or {})}}


def model_name(body: NameBody) -> str:
    """The model's name. Raises BadField if it is missing."""
    if not (name := body.model or body.name):
        raise BadField("model", "model is required")
    return name


def parse_keep_alive(keep_alive: Any) -> float | None:
    """Seconds that a model stays loaded: None for the default, inf for forever. Raises BadField.

    Accepts seconds, as a number or a string, and durations as in Go, such as `1h30m`; negative ones mean forever.
    """
    match keep_alive:
        case None:
            return None
        case bool():
            pass
        case int() | float():
            return float(keep_alive) if 0 <= keep_alive < UNLIMITED_S else float("inf")
        case str() if SECONDS.fullmatch(keep_alive):
            return parse_keep_alive(float(keep_alive))
        case str() if DURATION.fullmatch(keep_alive):
            if keep_alive.startswith("-"):
                return float("inf") if keep_alive != "-0" else 0.0
            return sum(float(count) * DURATION_UNITS[unit] for count, unit in DURATION_PART.findall(keep_alive))
    remedy = 'send seconds, or a duration such as "5m"'
    raise BadField("keep_alive", f"keep_alive is {str(keep_alive)[:40]!r}", remedy)


def parse_create_request(body: Mapping[str, Any], aliases: Mapping[str, str]) -> tuple[CreateRequest, bool]:
    """Parse a body of `/api/create`. Return the request, and whether progress is streamed. aliases: the server's
    own names with their targets. Raises UsageError."""
    unsupported = (*UNSUPPORTED_CREATE_FIELDS, *LEGACY_CREATE_FIELDS)
    for name in unsupported:
        if body.get(name) not in (None, "", {}, []):
            is_legacy = name in LEGACY_CREATE_FIELDS
            remedy = "send from, files and the fields of a Modelfile" if is_legacy else "leave it out"
            raise BadField(name, f"{name} is not supported", remedy)
    fields = {name: value for name, value in body.items() if name not in (*unsupported, "from")}
    request = validate(CreateBody, {**fields, "source": body.get("from")})
    source = request.source or ""
    if not source and not request.files:
        raise BadField("from", "neither 'from' or 'files' was specified")
    if source and is_path(source) and source not in aliases and find_edition(source) is None:
        remedy = "send the files of a model to /api/blobs first"
        raise BadField("from", f"{source!r} is not a model name", remedy)
    license = [request.license] if isinstance(request.license, str) else request.license or []
    edition = Edition(
        source=aliases.get(source, source),
        parent=source,
        system=request.system or "",
        template=request.template or "",
        parameters=request.parameters or {},
        messages=tuple(_message(message) for message in request.messages or ()),
        license=tuple(license),
    )
    plan = CreateRequest(model_name(request), edition, request.files or {}, request.quantize or "")
    return plan, request.stream is not False


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    fields = drop_nulls(message)
    if fields.keys() != {"role", "content"} or not all(isinstance(text, str) for text in fields.values()):
        raise BadField("messages", f"a message is {str(fields)[:80]}", "send role and content, both strings")
    return {"role": fields["role"].lower(), "content": fields["content"]}
