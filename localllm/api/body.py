"""The JSON of strangers, strictly: one object, no key twice, no NaN, no half characters; and the errors that name
the field at fault. Knows nothing of what the fields mean."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, TypeAdapter, ValidationError

from localllm.errors import UsageError, did_you_mean
from localllm.request import nesting_depth

MAX_NESTING = 256  # objects and lists; deeper ones end the stack of whoever walks through them later

Model = TypeVar("Model", bound=BaseModel)


class BadField(UsageError):
    """A field of a body that makes no sense or asks for what is not there. `param` is its path, say
    `messages.0.role`."""

    def __init__(self, param: str, message: str, remedy: str | None = None):
        super().__init__(message, remedy)
        self.param = param


class StrictModel(BaseModel):
    """Fields as they are named and of the type they are said to be: no number in a string, no unknown name."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


@dataclass(frozen=True)
class SchemaType:
    """What a field that is read by hand is described as: `Annotated[Any, Shown(list[str])]`."""

    type_: Any  # a type

    def __get_pydantic_json_schema__(self, _: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(TypeAdapter(self.type_).core_schema)


def parse_json_object(text: bytes | str) -> dict[str, Any]:
    """One JSON object. Raises UsageError for anything else, and for what two readers understand differently."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise UsageError("a key stands twice in one object of the JSON", "send each once")
        return fields

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise UsageError(f"{number[:40]} is no number of JSON", "send one that is finite")
        return value

    if not text:
        raise UsageError("missing request body", "send one JSON object")
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=finite)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError("a text has a lone surrogate, which is no character", "send valid Unicode") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"it is no JSON that can be read ({error})", "send one JSON object") from None
    if nesting_depth(value) > MAX_NESTING:
        raise UsageError(f"the JSON is nested more than {MAX_NESTING} deep", "send a flatter one")
    if not isinstance(value, dict):
        raise UsageError("the JSON is not an object", 'send {"model": ...}')
    return value


def validate(model: type[Model], fields: Mapping[str, Any], path: str = "") -> Model:
    """The fields as `model` has them. Raises BadField for the first that is missing, unknown or of another
    type."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, ([path] if path else []) + list(first["loc"])))
        match first["type"]:
            case "extra_forbidden":
                known = [field.alias or name for name, field in model.model_fields.items()]
                remedy = did_you_mean(str(first["loc"][0]), known) if len(first["loc"]) == 1 else "leave it out"
                raise BadField(param, f"{param} is not a field of this request", remedy) from None
            case "missing":
                raise BadField(param, f"{param} is missing", "send it") from None
        wrong = first["msg"][:1].lower() + first["msg"][1:]
        raise BadField(param, f"{param} is of the wrong kind: {wrong}") from None
