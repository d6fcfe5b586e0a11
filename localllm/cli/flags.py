"""What becomes of flags: fields of SamplingParams and arguments of templates. Knows not how they are read."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from localllm.cli import io
from localllm.errors import UsageError
from localllm.files import parse_strict_json
from localllm.request import Grammar, GrammarKind, SamplingParams
from localllm.sampling import parse_logit_bias

# The flags that say what an answer must be, and their way into a `Grammar`.
GRAMMAR_FLAGS = {
    "schema": "--schema",
    "json_object": "--json-object",
    "regex": "--regex",
    "grammar": "--grammar",
    "choice": "--choice",
}
_LARK_START = re.compile(r"^\s*(%llguidance\b|\??start\b[^:\n]*:(?!:))", re.MULTILINE)
_GBNF_ROOT = re.compile(r"^\s*root\s*::=", re.MULTILINE)


def parse_grammar_flags(flags: Mapping[str, Any]) -> Grammar | None:
    """What the flags ask for; None without one. Raises UsageError for two of them, a file that cannot be read, and
    what `Grammar` refuses."""
    asked = [name for name in GRAMMAR_FLAGS if flags[name] not in (None, False)]
    if len(asked) > 1:
        both = " and ".join(GRAMMAR_FLAGS[name] for name in asked)
        raise UsageError(f"{both} are for two different answers", "give one of them")
    for name in asked:
        match name:
            case "schema":
                return Grammar(GrammarKind.JSON_SCHEMA, io.read_text(flags[name]))
            case "json_object":
                return Grammar(GrammarKind.JSON)
            case "regex":
                return Grammar(GrammarKind.REGEX, flags[name])
            case "grammar":
                return _grammar_from_text(io.read_text(flags[name]), io.display_name(flags[name]))
            case _:
                return Grammar(GrammarKind.CHOICE, _choices_json(flags[name]))
    return None


def _grammar_from_text(text: str, file_name: str) -> Grammar:
    """Lark begins with `start:`, GBNF with `root ::=`."""
    if _GBNF_ROOT.search(text):
        return Grammar(GrammarKind.GBNF, text)
    if _LARK_START.search(text):
        return Grammar(GrammarKind.LARK, text)
    raise UsageError(
        f"{file_name} is neither a Lark nor a GBNF grammar", "begin it with `start:` or with `root ::=`"
    )


def _choices_json(text: str) -> str:
    """`a,b,c`, or a JSON array for texts with commas."""
    return text if text.lstrip().startswith("[") else json.dumps([part.strip() for part in text.split(",")])


def parse_sampling_fields(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields of SamplingParams that were given as flags; `flags` may hold others.

    Raises UsageError where a value is wrong, so that no model is loaded for nothing.
    """
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    fields = {name: flags[name] for name in names if flags.get(name) not in (None, [], ())}
    if "logit_bias" in fields:
        fields["logit_bias"] = parse_logit_bias(fields["logit_bias"])
    try:
        SamplingParams(**fields)
    except UsageError as error:
        named = re.sub(rf"^({'|'.join(names)})\b", lambda name: f"--{name[0].replace('_', '-')}", error.message)
        raise UsageError(named, error.remedy) from error
    return fields


def parse_template_args(pairs: Iterable[str]) -> dict[str, Any]:
    """`["effort=high", "depth=3"]` as a mapping, values read as JSON where they are. Raises UsageError."""
    arguments = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise UsageError(
                f"template argument {pair!r} is not NAME=VALUE", "write for example enable_thinking=false"
            )
        try:
            arguments[name] = parse_strict_json(value)
        except (ValueError, RecursionError):
            arguments[name] = value
    return arguments
