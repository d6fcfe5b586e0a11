"""Three hundred JSON schemas: some from practice, the others generated with a fixed seed."""

import random
from typing import Any

Schema = dict[str, Any]

WORDS = ("name", "id", "kind", "size", "note", "tags", "left", "right", "x/y", "a b", "größe", 'say "hi"')
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
PATTERNS = (
    r"^[a-z]{2,5}$",
    r"^\d{3}-\d{4}$",
    "^(red|green|blue)$",
    r"^[A-Z]\w{0,6}$",
    "[0-9]",
    r"^$|^x+$",
    r"^\S{1,4}$",
)


class SchemaGenerator:
    """Generates random schemas; `depth` is the maximum number of nested levels."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.defs: Schema = {}

    def root(self) -> Schema:
        make = self.random.choice((self.object, self.object, self.array, self.union, self.any))
        schema = make(3)
        return schema | ({"$defs": self.defs} if self.defs else {})

    def any(self, depth: int) -> Schema:
        flat = (self.string, self.string, self.integer, self.number, self.fixed, self.flat)
        nested = (self.object, self.object, self.array, self.union, self.all_of, self.reference, self.tuple)
        schema = self.random.choice((*flat, *nested) if depth else flat)(depth - 1)
        if "$ref" not in schema and self.random.random() < 0.2:
            schema = {"description": "what it is", "title": "It", **schema}
        return schema

    def flat(self, depth: int) -> Schema:
        return {"type": self.random.choice(("boolean", "null", ["integer", "null"], ["string", "boolean"]))}

    def string(self, depth: int) -> Schema:
        low = self.random.randrange(4)
        limits = {"minLength": low, "maxLength": low + self.random.randrange(1, 9)}
        kinds = (
            {},
            limits,
            limits,
            {"pattern": self.random.choice(PATTERNS)},
            {"format": self.random.choice(FORMATS)},
        )
        return {"type": "string", **self.random.choice(kinds)}

    def integer(self, depth: int) -> Schema:
        low = self.random.randrange(-1000, 1000)
        high = low + self.random.randrange(10, 10_000)
        bounds = (
            {},
            {"minimum": low},
            {"maximum": high},
            {"minimum": low, "maximum": high},
            {"exclusiveMinimum": low, "exclusiveMaximum": high},
            {"minimum": 0, "multipleOf": self.random.choice((2, 5, 7, 10))},
        )
        return {"type": "integer", **self.random.choice(bounds)}

    def number(self, depth: int) -> Schema:
        low = self.random.choice((-3.5, 0, 0.001, 12))
        bounds = (
            {},
            {"minimum": low},
            {"exclusiveMinimum": low, "maximum": low + 2.25},
            {"minimum": 0, "multipleOf": 0.01},
        )
        return {"type": "number", **self.random.choice(bounds)}

    def fixed(self, depth: int) -> Schema:
        values = ["red", "green", 'a "b"\n', "é💥", 1, -2.5, 0, None, True, {"a": [1, {}]}, [], [None, "x"]]
        if self.random.random() < 0.3:
            return {"const": self.random.choice(values)}
        return {"enum": self.random.sample(values, self.random.randrange(1, 6))}

    def array(self, depth: int) -> Schema:
        low = self.random.randrange(3)
        bounds = {"minItems": low, "maxItems": low + self.random.randrange(3)}
        return {"type": "array", "items": self.any(depth), **bounds}

    def tuple(self, depth: int) -> Schema:
        first = [self.any(0) for _ in range(self.random.randrange(1, 4))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}

    def object(self, depth: int) -> Schema:
        names = self.random.sample(WORDS, self.random.randrange(1, 5))
        schema: Schema = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        schema["required"] = [name for name in names if self.random.random() < 0.6]
        others = self.random.randrange(5)
        if others < 3:
            schema["additionalProperties"] = False
        elif others == 3:
            schema["additionalProperties"] = self.any(0)
        else:
            schema |= {"patternProperties": {"^z[0-9]$": self.any(0)}, "additionalProperties": False}
        return schema

    def union(self, depth: int) -> Schema:
        if self.random.random() < 0.5:
            return {"anyOf": [self.any(depth) for _ in range(self.random.randrange(1, 4))]}
        kinds = [self.string(0), self.integer(0), {"type": "boolean"}, {"type": "array", "items": self.any(0)}]
        tagged = [
            {
                "type": "object",
                "properties": {"kind": {"const": tag}, "value": self.any(0)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for tag in ("circle", "square")
        ]
        return {"oneOf": self.random.choice((tagged, self.random.sample(kinds, 2)))}

    def all_of(self, depth: int) -> Schema:
        if self.random.random() < 0.5:
            low = self.random.randrange(20)
            return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 50}, {"title": "both"}]}
        parts = [
            {"type": "object", "properties": {name: self.any(0)}, "required": [name]}
            for name in self.random.sample(WORDS, 2)
        ]
        return {"allOf": parts}

    def reference(self, depth: int) -> Schema:
        name = f"part{len(self.defs)}"
        self.defs[name] = {}
        if self.random.random() < 0.3:
            own: Schema = {"$ref": f"#/$defs/{name}"}
            properties = {"value": self.any(0), "next": {"anyOf": [{"type": "null"}, own]}}
            made: Schema = {"type": "object", "properties": properties, "required": ["value", "next"]}
            made["additionalProperties"] = False
        else:
            made = self.any(depth)
        self.defs[name] = made
        return {"$ref": f"#/$defs/{name}"}


TREE: Schema = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "label": {"type": "string", "maxLength": 6},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["label"],
            "additionalProperties": False,
        }
    },
}

FROM_LIFE: list[Schema] = [
    {},
    {"type": "object"},
    {"type": "array", "items": {}, "maxItems": 2},
    TREE,
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/person.schema.json",
        "title": "Person",
        "type": "object",
        "properties": {
            "firstName": {"type": "string", "description": "The first name."},
            "lastName": {"type": "string", "default": "", "examples": ["Lovelace"]},
            "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 150},
        },
        "required": ["firstName", "lastName"],
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["street", "zip"],
            }
        },
        "type": "object",
        "properties": {
            "billing": {"$ref": "#/definitions/address"},
            "shipping": {"$ref": "#/definitions/address"},
        },
        "required": ["billing"],
    },
    {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "object",
        "properties": {"price": {"type": "number", "minimum": 0, "exclusiveMinimum": True}},
        "required": ["price"],
        "additionalProperties": False,
    },
    {  # as pydantic writes it
        "$defs": {
            "Colour": {"enum": ["red", "green"], "title": "Colour", "type": "string"},
            "Item": {
                "properties": {
                    "name": {"title": "Name", "type": "string"},
                    "colour": {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}], "default": None},
                    "price": {"anyOf": [{"type": "number"}, {"type": "string"}], "title": "Price"},
                },
                "required": ["name", "price"],
                "title": "Item",
                "type": "object",
            },
        },
        "properties": {
            "items": {"items": {"$ref": "#/$defs/Item"}, "maxItems": 2, "title": "Items", "type": "array"},
            "when": {"format": "date-time", "title": "When", "type": "string"},
        },
        "required": ["items", "when"],
        "title": "Order",
        "type": "object",
    },
    {  # as OpenAI's strict mode wants it
        "type": "object",
        "properties": {
            "steps": {
                "type": "array",
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {"explanation": {"type": "string"}, "output": {"type": "string"}},
                    "required": ["explanation", "output"],
                    "additionalProperties": False,
                },
            },
            "final_answer": {"type": ["string", "null"]},
        },
        "required": ["steps", "final_answer"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {
            "operation": {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"op": {"const": "add"}, "value": {"type": "integer"}},
                        "required": ["op", "value"],
                    },
                    {
                        "type": "object",
                        "properties": {"op": {"const": "remove"}, "path": {"type": "string", "pattern": "^/"}},
                        "required": ["op", "path"],
                    },
                ],
                "discriminator": {"propertyName": "op"},
            }
        },
        "required": ["operation"],
        "additionalProperties": False,
    },
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2, "minProperties": 1},
    {"type": "object", "patternProperties": {"^[a-z]+$": {"type": "boolean"}}, "additionalProperties": False},
    {
        "type": "array",
        "items": {
            "type": "array",
            "items": {"type": "number", "minimum": -180, "maximum": 180},
            "minItems": 2,
            "maxItems": 2,
        },
        "minItems": 1,
        "maxItems": 2,
    },
    {"type": "string", "enum": ["positive", "negative", "neutral"]},
    {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 1},
    {"type": "string", "minLength": 1, "maxLength": 3, "x-ui": "short"},
]

COUNT = 300
SCHEMAS: list[Schema] = FROM_LIFE + [SchemaGenerator(seed).root() for seed in range(COUNT - len(FROM_LIFE))]
