"""The bodies that Ollama's API takes, field by field; of null and of what is left out Ollama's own defaults are
meant. Options may also stand beside `options`, where clients of other APIs put them."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel

from localllm.api.body import StrictModel, validate
from localllm.errors import BadField
from localllm.hub.local_names import find_edition
from localllm.hub.names import is_path
from localllm.modelfile.edition import CreateRequest, Edition
from localllm.modelfile.options import SAMPLING_OPTIONS

Body = TypeVar("Body", bound=BaseModel)

DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
UNLIMITED_S = 1e12  # seconds, and what is longer; a float holds no number of any size
DURATION = re.compile(r"[+-]?(?:\d{1,12}(?:\.\d{0,9})?(?:ns|us|µs|μs|ms|s|m|h))+|[+-]?0")
SECONDS = re.compile(r"[+-]?\d{1,12}(\.\d{0,9})?")
DURATION_PART = re.compile(r"([\d.]+)(ns|us|µs|μs|ms|s|m|h)")


class CommonBody(StrictModel):
    """What generate and chat have in common."""

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
    """`name` is what `model` was called once."""

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
    """`from` is a word of Python's; `read_create` sends it as `source`."""

    source: str | None = None
    files: dict[str, str] | None = None
    template: str | None = None
    system: str | None = None
    license: str | list[str] | None = None
    parameters: dict[str, Any] | None = None
    messages: list[dict[str, Any]] | None = None
    quantize: str | None = None
    stream: bool | None = None


def parse_body(model: type[Body], body: Mapping[str, Any]) -> Body:
    """Raises BadField for the first field that is missing, unknown or of another type."""
    return validate(model, body)


def gather_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with options that stand beside `options` among them; those that stand in both are left as in
    `options`."""
    beside = {name: value for name, value in body.items() if name in SAMPLING_OPTIONS}
    options = body.get("options")
    if not beside or not isinstance(options, Mapping | None):
        return dict(body)
    fields = {name: value for name, value in body.items() if name not in beside}
    given = {name: value for name, value in beside.items() if value is not None}
    return fields | {"options": {**given, **(options or {})}}


def model_name(body: NameBody) -> str:
    """Raises BadField where there is none."""
    if not (name := body.model or body.name):
        raise BadField("model", "model is required")
    return name


def parse_keep_alive(keep_alive: Any) -> float | None:
    """How long a model is to stay loaded: None as ever, inf for ever. Raises BadField.

    A number is seconds, also as a text; another text is a duration as Go writes it, `1h30m`; a negative one is for
    ever.
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
    raise BadField(
        "keep_alive", f"keep_alive is {str(keep_alive)[:40]!r}", 'send seconds, or a duration such as "5m"'
    )


# A body of `/api/create` to a plan of what is to be made.

UNSUPPORTED_FIELDS = (
    "adapters",
    "draft_files",
    "draft_quantize",
    "renderer",
    "parser",
    "requires",
    "info",
    "remote_host",
)
LEGACY_FIELDS = ("path", "modelfile", "quantization")  # how it was asked before Ollama 0.5


def parse_create_request(body: Mapping[str, Any], given: Mapping[str, str]) -> tuple[CreateRequest, bool]:
    """The plan, and whether its steps are to be streamed. given: names of the server's own with what each stands
    for. Raises UsageError."""
    for name in (*UNSUPPORTED_FIELDS, *LEGACY_FIELDS):
        if body.get(name) not in (None, "", {}, []):
            remedy = "send from, files and the fields of a Modelfile" if name in LEGACY_FIELDS else "leave it out"
            raise BadField(name, f"{name} is not supported", remedy)
    fields = {
        name: value for name, value in body.items() if name not in (*UNSUPPORTED_FIELDS, *LEGACY_FIELDS, "from")
    }
    asked = parse_body(CreateBody, {**fields, "source": body.get("from")})
    source = asked.source or ""
    if not source and not asked.files:
        raise BadField("from", "neither 'from' or 'files' was specified")
    if source and is_path(source) and source not in given and find_edition(source) is None:
        raise BadField(
            "from", f"{source!r} is no name of a model", "send the files of a model to /api/blobs first"
        )
    license = [asked.license] if isinstance(asked.license, str) else asked.license or []
    edition = Edition(
        source=given.get(source, source),
        parent=source,
        system=asked.system or "",
        template=asked.template or "",
        parameters=asked.parameters or {},
        messages=tuple(_message(message) for message in asked.messages or ()),
        license=tuple(license),
    )
    plan = CreateRequest(model_name(asked), edition, asked.files or {}, asked.quantize or "")
    return plan, asked.stream is not False


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    said = {name: value for name, value in message.items() if value is not None}
    if said.keys() != {"role", "content"} or not all(isinstance(text, str) for text in said.values()):
        raise BadField("messages", f"a message is {str(said)[:80]}", "send a role and a content, two texts")
    return {"role": said["role"].lower(), "content": said["content"]}
