"""Determines which parts of a JSON schema can be enforced, by keyword and place; others are rejected, never
ignored.

`llguidance` rejects most unknown keywords and ignores the rest; this check covers the difference. Independent of
tokens.
"""

from collections.abc import Iterator, Mapping, Set
from typing import Any
from urllib.parse import unquote

from localllm.errors import UsageError

DRAFTS = ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
MAX_EXACT_INTEGER = 2**53  # of a bound: up to here neighbouring integers are distinct floats
SCHEMA_KEYWORDS = ("items", "additionalItems", "additionalProperties")  # keywords whose value is a schema,
SCHEMA_LIST_KEYWORDS = ("items", "prefixItems", "anyOf", "oneOf", "allOf")  # or a list of them,
SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")  # or an object of them
VALUE_KEYWORDS = (
    *("$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties", "maxProperties"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
# Keywords that restrict nothing; `discriminator` is OpenAPI's hint for a `oneOf`.
ANNOTATION_KEYWORDS = (
    *("$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "examples", "example"),
    *("deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "discriminator"),
)
SUPPORTED_KEYWORDS = frozenset(
    (*SCHEMA_KEYWORDS, *SCHEMA_LIST_KEYWORDS, *SCHEMA_MAP_KEYWORDS, *VALUE_KEYWORDS, *ANNOTATION_KEYWORDS)
)
REMEDIES = {
    "nullable": 'write "type": [..., "null"]',
    "x-guidance": "localllm sets its options itself",
}
MERGING_KEYWORDS = ("allOf", "anyOf", "oneOf")


def check_schema(schema: dict[str, Any] | bool) -> None:
    """Raises UsageError, with keyword and place, for an invalid JSON schema, unsupported keywords, and circular
    references.
    """
    if schema is False:
        raise UsageError("the JSON schema is false, which nothing satisfies", "give an object")
    if schema is True:
        return
    draft = schema.get("$schema")
    if draft is not None and not (isinstance(draft, str) and any(known in draft for known in DRAFTS)):
        raise UsageError(f"$schema is {draft!r}", f"these are supported: {', '.join(DRAFTS)}")
    _check_form(schema)
    try:
        _check_parts(schema)
        place = find_endless_reference(schema)
    except (TypeError, AttributeError) as error:  # drafts 4 to 7 do not check keywords they lack, such as $defs
        raise UsageError(f"the JSON schema has a value of the wrong type ({error})") from None
    if place:
        remedy = "make one of them optional, or allow null"
        raise UsageError(f"the schema at {place} requires itself, so that no value satisfies it", remedy)


def _check_parts(schema: dict[str, Any]) -> None:
    for place, part in walk_schema(schema):
        for keyword, value in part.items():
            if reason := _why_not(keyword, value, part, at_root=place == "#"):
                remedy = REMEDIES.get(keyword, "leave it out, and check it afterwards")
                raise UsageError(f"the schema's {keyword} at {place} {reason}", remedy)


def walk_schema(schema: Any, pointer: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object in a schema that is itself a schema, with its JSON pointer."""
    if not isinstance(schema, dict):
        return
    yield pointer, schema
    for keyword, value in schema.items():
        if keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            for name, part in value.items():
                yield from walk_schema(part, f"{pointer}/{keyword}/{_escaped(name)}")
        elif keyword in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            for index, part in enumerate(value):
                yield from walk_schema(part, f"{pointer}/{keyword}/{index}")
        elif keyword in SCHEMA_KEYWORDS:
            yield from walk_schema(value, f"{pointer}/{keyword}")


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with additionalProperties false for objects that list properties and do not mention
    others.

    A model that may invent names has no reason to end. Parts that are merged with others are unchanged.
    """
    merged: set[str] = set()
    while (more := merged | _merged_references(schema, merged)) != merged:
        merged = more
    return _closed(schema, "#", merged, is_merged="#" in merged)


def _subschemas(part: dict[str, Any], pointer: str, *, is_merged: bool) -> Iterator[tuple[str, Any, str, bool]]:
    """Yield the direct subschemas: keyword and key or index, the part, its JSON pointer, and whether it describes
    the same object as its siblings.
    """
    for keyword, value in part.items():
        at = f"{pointer}/{keyword}"
        within = keyword == "allOf" or (keyword in MERGING_KEYWORDS and (is_merged or _describes_object(part)))
        if keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            yield from ((f"{keyword}/{name}", sub, f"{at}/{_escaped(name)}", False) for name, sub in value.items())
        elif keyword in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            yield from ((f"{keyword}/{index}", sub, f"{at}/{index}", within) for index, sub in enumerate(value))
        elif keyword in SCHEMA_KEYWORDS:
            yield keyword, value, at, False


def _describes_object(part: dict[str, Any]) -> bool:
    return not part.keys().isdisjoint(("properties", "required", "patternProperties", "allOf"))


def _merged_references(schema: dict[str, Any], merged: Set[str]) -> set[str]:
    """Return pointers to parts that describe an object together with others."""
    references: set[str] = set()
    waiting = [(schema, "#", "#" in merged)]
    while waiting:
        part, pointer, is_merged = waiting.pop()
        if isinstance(part.get("$ref"), str) and (is_merged or _describes_object(part)):
            references.add(unquote(part["$ref"]))
        for _, sub, at, within in _subschemas(part, pointer, is_merged=is_merged):
            if isinstance(sub, dict):
                waiting.append((sub, at, within or at in merged))
    return references


def _closed(part: Any, pointer: str, merged: Set[str], *, is_merged: bool) -> Any:
    if not isinstance(part, dict):
        return part
    closed: dict[str, Any] = {
        keyword: dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
        for keyword, value in part.items()
    }
    for name, sub, at, within in _subschemas(part, pointer, is_merged=is_merged):
        keyword, _, key = name.partition("/")
        closed_sub = _closed(sub, at, merged, is_merged=within or at in merged)
        if not key and keyword in SCHEMA_KEYWORDS:
            closed[keyword] = closed_sub
        else:
            closed[keyword][int(key) if isinstance(closed[keyword], list) else key] = closed_sub
    properties = part.get("properties")
    if (
        isinstance(properties, dict)
        and properties
        and not is_merged
        and part.keys().isdisjoint((*MERGING_KEYWORDS, "$ref", "additionalProperties", "patternProperties"))
        and set(part.get("required", ())) <= properties.keys()
        and part.get("minProperties", 0) <= len(properties)
    ):
        closed["additionalProperties"] = False
    return closed


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _check_form(schema: dict[str, Any]) -> None:
    """Raises UsageError if a schema violates its draft."""
    # Imported late: takes 0.1 s that other answers do not need.
    from jsonschema import Draft202012Validator, SchemaError, validators

    try:
        validators.validator_for(schema, default=Draft202012Validator).check_schema(schema)
    except SchemaError as error:
        *path, last = error.absolute_path or ["schema"]
        place = "/".join(["#", *(_escaped(str(part)) for part in path)])
        raise UsageError(f"the schema's {last} at {place} is wrong: {error.message[:200]}") from None


def _why_not(keyword: str, value: Any, part: dict[str, Any], *, at_root: bool) -> str | None:
    """Return why this keyword cannot be enforced, or None."""
    if keyword not in SUPPORTED_KEYWORDS and (keyword == "x-guidance" or not keyword.startswith("x-")):
        return "is not supported"
    if keyword == "$ref" and not value.startswith("#"):
        return f"names {value!r}: only references inside the schema are supported"
    if keyword in ("$id", "id") and not at_root:
        return "is not supported: it changes what references mean"
    if keyword == "minProperties" and value - len(part.get("required", ())) > 1:
        return "requires names whose uniqueness cannot be enforced"
    if (
        keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        and abs(value) > MAX_EXACT_INTEGER
    ):
        return f"is {value}: only numbers up to 2**53 are supported"
    return None


def find_endless_reference(schema: Mapping[str, Any]) -> str | None:
    """Return the first reference whose schema has no finite value, as a JSON pointer; None if all have one.

    Computes the least fixed point: a schema is finite once all its required parts are. Unresolvable pointers count
    as finite here; the schema's compiler reports them.
    """
    waiting = sorted(_references(schema))
    finite: set[str] = set()
    grown = True
    while grown:
        before = len(finite)
        for pointer in waiting:
            if _is_finite(resolve_pointer(schema, pointer), finite):
                finite.add(pointer)
        grown = len(finite) > before
        # Chains of references occur in either order.
        waiting = [pointer for pointer in reversed(waiting) if pointer not in finite]
    return min(waiting, default=None)


def _references(part: Any) -> set[str]:
    """Return every local reference. False positives, such as in a `const`, resolve to nothing and are finite."""
    if isinstance(part, dict):
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set[str]()
        return own.union(*map(_references, part.values()))
    return set[str]().union(*map(_references, part)) if isinstance(part, list) else set()


def resolve_pointer(schema: Any, pointer: str) -> Any:
    """Return what a local pointer refers to; True if that does not exist."""
    if pointer != "#" and not pointer.startswith("#/"):
        return True
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and name in schema:
            schema = schema[name]
        elif isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            return True
    return schema


def _is_finite(part: Any, finite: set[str]) -> bool:
    if not isinstance(part, dict):
        return True
    reference = part.get("$ref")
    if isinstance(reference, str) and reference not in finite:
        return False
    if not all(_is_finite(each, finite) for each in part.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        options = part.get(keyword)
        if options and not any(_is_finite(each, finite) for each in options):
            return False
    types = part.get("type", "null")  # without a type, any value is allowed
    kinds = {"object": _is_finite_object, "array": _is_finite_array}
    each = [types] if isinstance(types, str) else types
    return not each or any(kind not in kinds or kinds[kind](part, finite) for kind in each)


def _is_finite_object(part: Mapping[str, Any], finite: set[str]) -> bool:
    properties, others = part.get("properties", {}), part.get("additionalProperties", True)
    return all(_is_finite(properties.get(name, others), finite) for name in part.get("required", ()))


def _is_finite_array(part: Mapping[str, Any], finite: set[str]) -> bool:
    items, count = part.get("items", True), part.get("minItems", 0)
    first = part.get("prefixItems", items if isinstance(items, list) else [])
    rest = part.get("additionalItems", True) if isinstance(items, list) else items
    needed = [*first[:count], *([rest] if count > len(first) else [])]
    return all(_is_finite(each, finite) for each in needed)
