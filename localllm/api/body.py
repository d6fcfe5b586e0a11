"""The JSON of strangers: one object, no key twice, no NaN, no half characters; the errors that name the field at
fault; and the fields that have no effect, which a server names in its answer or refuses. Knows nothing of HTTP."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, TypeAdapter, ValidationError

from localllm.errors import BadField, UsageError, did_you_mean
from localllm.request import nesting_depth

# How much one body may ask, whichever API it is in: more would cost others, and no answer needs it.
#
# What a request's own classes bound stands in `request.py`: ranges of numbers, and sizes and depths of schemas and
# grammars. How long a body may be is the server's.

MAX_PROMPTS = 128
MAX_ANSWERS = 128  # to all prompts together
MAX_LOGPROBS = 20  # alternatives to each token
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_TOOLS = 128  # as OpenAI has it
MAX_TEMPLATE_ARGUMENTS = 64
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024  # of each
MAX_STOP_IDS = 1024
MAX_LOGIT_BIASES = 4096


def check_count(limit: int, param: str, things: Sized) -> None:
    """Raises BadField where there are more of them."""
    if len(things) > limit:
        raise BadField(param, f"{param} has {len(things):,} entries", f"send at most {limit:,}")


def check_stop_strings(param: str, stops: list[str]) -> None:
    """Raises BadField where they are too many or too long."""
    check_count(MAX_STOPS, param, stops)
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        what = f"{param} has a text of {max(map(len, stops)):,} characters"
        raise BadField(param, what, f"send at most {MAX_STOP_CHARACTERS:,}")


MAX_NESTING = 256  # objects and lists; deeper ones end the stack of whoever walks through them later

Model = TypeVar("Model", bound=BaseModel)


# Fields that other servers have and this one has not, without which an answer is not what was asked for.
CHANGES_ANSWER = re.compile(
    r"max_|min_|top_|num_|n_|best_of|dry_|xtc_|dynatemp_|mirostat|guided_|typical_p|tfs_z|penalty|penalties|"
    r"temperature|seed|stop|logprobs|logit|beam|early_stopping|bad_words|allowed_token|samplers|"
    r"(response_)?format|schema|grammar|structured|regex|choice|tool|function|plugin|web_search|mcp_|connector|"
    r"thinking|reasoning|effort|verbosity|system|prompt|instructions|template|suffix|prefix|continue_|"
    r"image|audio|video|document|file|modalities|prediction|transforms|context_management|echo"
)
MAX_IGNORED = 32  # names of one request that are told


@dataclass
class IgnoredFields:
    """The fields of one request that had no effect, each with whether the answer would have been another."""

    names: dict[str, bool] = field(default_factory=dict)

    def add(self, param: str, *, changes_answer: bool) -> None:
        """param: a path as of `BadField`; places in lists are left out, as a field may stand in every message."""
        name = re.sub(r"\.\d+", "[]", param)
        if name in self.names or len(self.names) < MAX_IGNORED:
            self.names[name] = self.names.get(name, False) or changes_answer


IGNORED_FIELDS: ContextVar[IgnoredFields | None] = ContextVar("ignored_fields", default=None)
"""Of the request that is being read; None where a field without an effect is refused."""


def ignore_field(
    param: str, message: str, remedy: str = "leave it out", *, name: str = "", changes_answer: bool = True
) -> None:
    """Note that what a body has at `param` is not there; name: how it is told, if not by its path. Raises BadField
    where that is refused."""
    ignored = IGNORED_FIELDS.get()
    if ignored is None:
        raise BadField(param, message, remedy)
    ignored.add(name or param, changes_answer=changes_answer)


class StrictModel(BaseModel):
    """Fields of the type they are said to be: no number in a string. `validate` says what becomes of others."""

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
    """The fields as `model` has them. Unknown ones are noted in IGNORED_FIELDS. Raises BadField for the first that
    is missing or of another type, and without IGNORED_FIELDS for one that is unknown."""
    errors: list[Any] = []
    for attempt in range(2):
        try:
            return model.model_validate(fields)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
        unknown = [one["loc"] for one in errors if one["type"] == "extra_forbidden"]
        if attempt or not unknown or (ignored := IGNORED_FIELDS.get()) is None:
            break
        for loc in unknown:
            param = ".".join(map(str, ([path] if path else []) + list(loc)))
            ignored.add(param, changes_answer=bool(CHANGES_ANSWER.match(str(loc[-1]))))
        fields = _without(fields, unknown)
    first = errors[0]
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


def _without(fields: Any, locations: Iterable[Sequence[int | str]]) -> Any:
    """A copy of an object or a list, in one pass, without what stands at these paths."""
    by_key: dict[int | str, list[Sequence[int | str]]] = {}
    for key, *rest in locations:
        by_key.setdefault(key, []).append(rest)
    items = fields.items() if isinstance(fields, Mapping) else enumerate(fields)
    kept = {
        key: _without(value, by_key[key]) if key in by_key else value
        for key, value in items
        if [] not in by_key.get(key, ())
    }
    return kept if isinstance(fields, Mapping) else list(kept.values())
