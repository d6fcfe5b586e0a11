"""A body of `/api/create` to a plan of what is to be made."""

from collections.abc import Mapping
from typing import Any

from localllm.api.ollama.bodies import CreateBody, model_name, parse_body
from localllm.errors import BadField
from localllm.hub.made import find_edition
from localllm.hub.names import is_path
from localllm.modelfile.edition import Edition
from localllm.modelfile.plan import CreateRequest

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
