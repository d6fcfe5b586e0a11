"""JSON schemas of the output of each command with `--json`, generated from the types in tools/json_output.py.

The comment after a field becomes its description. `tools/cli_docs.py` writes the schemas into docs/schemas."""

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
    """Content of each schema file."""
    return {FOLDER / f"{command}.json": schema_text(command, output) for command, output in JSON_OUTPUTS.items()}


def schema_text(command: str, output: JsonOutput) -> str:
    suffix = {"object": "", "array": ", an array", "lines": ", each line of it"}[output.stdout]
    python_type = list[output.type] if output.stdout == "array" else output.type
    schema = TypeAdapter(python_type).json_schema(mode="serialization", schema_generator=DescribedSchema)
    head = {"$schema": DRAFT, "title": f"stdout of `localllm {command} --json`{suffix}"}
    return json.dumps(head | schema | head, indent=1, ensure_ascii=False) + "\n"


class DescribedSchema(GenerateJsonSchema):
    """Schema generator: objects have all of their fields and no others, and comments become descriptions."""

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        python_type = cast(type, schema.get("cls"))
        return self.flattened(self.described(super().typed_dict_schema(schema), python_type), python_type)

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        object_schema = self.described(super().dataclass_schema(schema), schema["cls"])
        for field in object_schema["properties"].values():
            field.pop("default", None)
        return object_schema | {"required": [*object_schema["properties"]]}

    def described(self, schema: JsonSchemaValue, python_type: type) -> JsonSchemaValue:
        """Object schema with comments as descriptions, and without titles and additional properties."""
        for name, text in comments(python_type).items():
            if name in schema["properties"]:
                schema["properties"][name]["description"] = text
        for field in schema["properties"].values():
            field.pop("title", None)
        return schema | {"additionalProperties": False}

    def flattened(self, schema: JsonSchemaValue, python_type: type) -> JsonSchemaValue:
        """Object schema where fields marked with FLATTEN are replaced by the fields of their type."""
        properties, required = dict[str, Any](), list[str]()
        for name, hint in get_type_hints(python_type, include_extras=True).items():
            field = schema["properties"][name]
            if FLATTEN in getattr(hint, "__metadata__", ()):
                inner = cast(dict[str, Any], self.get_schema_from_definitions(JsonRef(field["$ref"])))
                properties |= inner["properties"]
                required += inner["required"]
            else:
                properties[name] = field
                required += [name] if name in schema.get("required", ()) else []
        return schema | {"properties": properties, "required": [*dict.fromkeys(required)]}


def comments(python_type: type) -> dict[str, str]:
    """Comment after each field, or the string below it, including those of base classes."""
    source = textwrap.dedent(inspect.getsource(python_type))
    trailing = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    descriptions = dict[str, str]()
    for base in getattr(python_type, "__orig_bases__", ()):
        if is_typeddict(base):
            descriptions |= comments(base)
    body = cast(ast.ClassDef, ast.parse(source).body[0]).body
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign):
            continue
        name = cast(ast.Name, statement.target).id
        if statement.lineno in trailing:
            descriptions[name] = trailing[statement.lineno]
        elif isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            descriptions[name] = " ".join(str(following.value.value).split())
    return descriptions
