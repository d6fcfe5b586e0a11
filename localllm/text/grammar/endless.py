"""Determines whether a JSON schema has a finite value; one that endlessly requires itself has none."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote


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
