"""Does a JSON schema have any finite value? One that requires itself again and again has none."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


def find_endless_reference(schema: Mapping[str, Any]) -> str | None:
    """The first reference whose schema has no finite value, as a JSON pointer; None where all have one.

    The least fixed point: a schema is finite once all that it requires is. What a pointer does not lead to counts
    as finite here: the compiler of the schema says that it is not there.
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
        # Chains of references are as often written forwards as backwards.
        waiting = [pointer for pointer in reversed(waiting) if pointer not in finite]
    return min(waiting, default=None)


def _references(part: Any) -> set[str]:
    """Every local reference. One too many, in a `const` say, names nothing and is finite."""
    if isinstance(part, dict):
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set[str]()
        return own.union(*map(_references, part.values()))
    return set[str]().union(*map(_references, part)) if isinstance(part, list) else set()


def resolve_pointer(schema: Any, pointer: str) -> Any:
    """What a local pointer leads to; True where that is nothing."""
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
    types = part.get("type", "null")  # without one, anything may come
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
