"""Request bodies as JSON and as pydantic models, limits on them, and fields that have no effect.

JSON is read strictly: one object, no duplicate keys, no NaN, no lone surrogates. Errors name the offending field.
"""

import json
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, TypeAdapter, ValidationError

from localllm.errors import BadField, UsageError, did_you_mean
from localllm.request import nesting_depth

# Limits of one body in every API. `request.py` limits values, schemas and grammars, the server the size of a body.
MAX_PROMPTS = 128
MAX_ANSWERS = 128  # for all prompts together
MAX_LOGPROBS = 20  # alternatives per token
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # per message
MAX_TOOLS = 128  # as in OpenAI's API
MAX_TEMPLATE_ARGUMENTS = 64
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024  # per stop string
MAX_STOP_IDS = 1024
MAX_LOGIT_BIASES = 4096
MAX_NESTING = 256  # of objects and arrays; deeper ones overflow the stack of recursive functions
MAX_IGNORED = 32  # names recorded per request

# Fields of other servers that would change the answer if they were supported.
CHANGES_ANSWER = re.compile(
    r"max_|min_|top_|num_|n_|best_of|dry_|xtc_|dynatemp_|mirostat|guided_|typical_p|tfs_z|penalty|penalties|"
    r"temperature|seed|stop|logprobs|logit|beam|early_stopping|bad_words|allowed_token|samplers|"
    r"(response_)?format|schema|grammar|structured|regex|choice|tool|function|plugin|web_search|mcp_|connector|"
    r"thinking|reasoning|effort|verbosity|system|prompt|instructions|template|suffix|prefix|continue_|"
    r"image|audio|video|document|file|modalities|prediction|transforms|context_management|echo"
)

Model = TypeVar("Model", bound=BaseModel)


def parse_json_object(text: bytes | str) -> dict[str, Any]:
    """Parse one JSON object. Raises UsageError for anything else, and for JSON that parsers read differently."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise UsageError("the JSON has a duplicate key in one object", "send each key once")
        return fields

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise UsageError(f"{number[:40]} is not a JSON number", "send a finite one")
        return value

    if not text:
        raise UsageError("missing request body", "send one JSON object")
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError("a string has a lone surrogate", "send valid Unicode") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not valid JSON ({error})", "send one JSON object") from None
    if nesting_depth(value) > MAX_NESTING:
        raise UsageError(f"the JSON is nested deeper than {MAX_NESTING} levels", "send a flatter object")
    if not isinstance(value, dict):
        raise UsageError("the JSON is not an object", 'send {"model": ...}')
    return value


class StrictModel(BaseModel):
    """A body or a part of one. Types are not coerced; `validate` handles unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


@dataclass(frozen=True)
class SchemaType:
    """JSON schema of a field that is validated by hand: `Annotated[Any, SchemaType(list[str])]`."""

    type_: Any  # a type

    def __get_pydantic_json_schema__(self, _: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(TypeAdapter(self.type_).core_schema)


@dataclass
class IgnoredFields:
    """Fields of one request that had no effect, and whether each would have changed the answer."""

    names: dict[str, bool] = field(default_factory=dict)

    def add(self, param: str, *, changes_answer: bool) -> None:
        """param: path as in `BadField`; its list indices are dropped, as every message may have the field."""
        name = re.sub(r"\.\d+", "[]", param)
        if name in self.names or len(self.names) < MAX_IGNORED:
            self.names[name] = self.names.get(name, False) or changes_answer


IGNORED_FIELDS: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)
"""Ignored fields of the current request; None if fields without effect are refused."""


def ignore_field(
    param: str, message: str, remedy: str = "leave it out", *, name: str = "", changes_answer: bool = True
) -> None:
    """Record that the field at path `param` has no effect, under `name` or, by default, its path. Raises BadField
    if such fields are refused."""
    ignored = IGNORED_FIELDS.get()
    if ignored is None:
        raise BadField(param, message, remedy)
    ignored.add(name or param, changes_answer=changes_answer)


def validate(model: type[Model], fields: Mapping[str, Any], path: str = "") -> Model:
    """Validate fields as a pydantic model. path: of the object within its body.

    Unknown fields are recorded in IGNORED_FIELDS. Raises BadField for the first field that is missing or of the
    wrong type, and, if IGNORED_FIELDS is None, for an unknown one.
    """
    errors: list[Any] = []
    for attempt in range(2):
        try:
            return model.model_validate(fields)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
        unknown = [error["loc"] for error in errors if error["type"] == "extra_forbidden"]
        if attempt or not unknown or (ignored := IGNORED_FIELDS.get()) is None:
            break
        for loc in unknown:
            ignored.add(_param(path, loc), changes_answer=bool(CHANGES_ANSWER.match(str(loc[-1]))))
        fields = _without(fields, unknown)
    first = errors[0]
    param = _param(path, first["loc"])
    match first["type"]:
        case "extra_forbidden":
            known = [field.alias or name for name, field in model.model_fields.items()]
            remedy = did_you_mean(str(first["loc"][0]), known) if len(first["loc"]) == 1 else "leave it out"
            raise BadField(param, f"{param} is not a field of this request", remedy) from None
        case "missing":
            raise BadField(param, f"{param} is missing", "send it") from None
    reason = first["msg"][:1].lower() + first["msg"][1:]
    raise BadField(param, f"{param} has the wrong type: {reason}") from None


def _param(path: str, location: Iterable[int | str]) -> str:
    return ".".join(map(str, ([path] if path else []) + list(location)))


def _without(fields: Any, locations: Iterable[Sequence[int | str]]) -> Any:
    """A copy of an object or array without the values at the given locations, made in one pass."""
    by_key: dict[int | str, list[Sequence[int | str]]] = {}
    for key, *rest in locations:
        by_key.setdefault(key, []).append(rest)
    items = fields.items() if isinstance(fields, Mapping) else enumerate(fields)
    remaining = {
        key: _without(value, by_key[key]) if key in by_key else value
        for key, value in items
        if [] not in by_key.get(key, ())
    }
    return remaining if isinstance(fields, Mapping) else list(remaining.values())


def drop_nulls(fields: Mapping[str, Any], without: Container[str] = ()) -> dict[str, Any]:
    """The fields that are neither null nor named in `without`."""
    return {name: value for name, value in fields.items() if value is not None and name not in without}


def check_count(limit: int, param: str, entries: Sized) -> None:
    """Raises BadField if there are more than `limit` entries."""
    if len(entries) > limit:
        raise BadField(param, f"{param} has {len(entries):,} entries", f"send at most {limit:,}")


def check_stop_strings(param: str, stops: list[str]) -> None:
    """Raises BadField if there are too many stop strings, or one is too long."""
    check_count(MAX_STOPS, param, stops)
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        message = f"{param} has a text of {max(map(len, stops)):,} characters"
        raise BadField(param, message, f"send at most {MAX_STOP_CHARACTERS:,}")
