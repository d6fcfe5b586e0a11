"""Schemas of what each command prints with `--json`, made of the types in tools/json_output.py.

The comment behind a field is its description. `tools/cli_docs.py` writes the schemas into docs/schemas."""

import ast
import inspect
import io
import json
import sys
import textwrap
import tokenize
from pathlib import Path
from typing import Any, cast, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonRef, JsonSchemaValue
from pydantic_core import core_schema
from typing_extensions import is_typeddict

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.json_output import FLATTEN, JSON_OUTPUTS, JsonOutput  # noqa: E402 (this tree, installed or not)

FOLDER = ROOT / "docs" / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[Path, str]:
    """Files and what belongs into them."""
    return {FOLDER / f"{command}.json": text_of(command, form) for command, form in JSON_OUTPUTS.items()}


def text_of(command: str, form: JsonOutput) -> str:
    shape = {"object": "", "array": ", an array", "lines": ", each line of it"}[form.stdout]
    kind = list[form.type] if form.stdout == "array" else form.type
    schema = TypeAdapter(kind).json_schema(mode="serialization", schema_generator=Described)
    head = {"$schema": DRAFT, "title": f"stdout of `localllm {command} --json`{shape}"}
    return json.dumps(head | schema | head, indent=1, ensure_ascii=False) + "\n"


class Described(GenerateJsonSchema):
    """Closed objects that always have all of their fields, and comments as descriptions."""

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        found = self.described(super().typed_dict_schema(schema), cast(type, schema.get("cls")))
        return self.flattened(found, cast(type, schema.get("cls")))

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        found = self.described(super().dataclass_schema(schema), schema["cls"])
        for field in found["properties"].values():
            field.pop("default", None)
        return found | {"required": [*found["properties"]]}

    def described(self, found: JsonSchemaValue, kind: type) -> JsonSchemaValue:
        for name, text in comments(kind).items():
            if name in found["properties"]:
                found["properties"][name]["description"] = text
        for field in found["properties"].values():
            field.pop("title", None)
        return found | {"additionalProperties": False}

    def flattened(self, found: JsonSchemaValue, kind: type) -> JsonSchemaValue:
        """With the fields of those that are marked so in their place."""
        properties, required = dict[str, Any](), list[str]()
        for name, hint in get_type_hints(kind, include_extras=True).items():
            field = found["properties"][name]
            if FLATTEN in getattr(hint, "__metadata__", ()):
                whole = cast(dict[str, Any], self.get_schema_from_definitions(JsonRef(field["$ref"])))
                properties |= whole["properties"]
                required += whole["required"]
            else:
                properties[name] = field
                required += [name] if name in found.get("required", ()) else []
        return found | {"properties": properties, "required": [*dict.fromkeys(required)]}


def comments(kind: type) -> dict[str, str]:
    """By field, what stands behind it as a comment or below it as a text, also of what it is made from."""
    source = textwrap.dedent(inspect.getsource(kind))
    behind = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = dict[str, str]()
    for base in getattr(kind, "__orig_bases__", ()):
        if is_typeddict(base):
            found |= comments(base)
    body = cast(ast.ClassDef, ast.parse(source).body[0]).body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign):
            continue
        name = cast(ast.Name, statement.target).id
        if statement.lineno in behind:
            found[name] = behind[statement.lineno]
        elif isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            found[name] = " ".join(str(following.value.value).split())
    return found
