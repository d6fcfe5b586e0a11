"""Converts a `Grammar` to llguidance's format and checks it as far as possible without a model's tokens.

A grammar may be untrusted: `Grammar` limits its size, `PARSER_LIMITS` the compiler's work, and it is compiled on a
stack large enough for the longest chain of names.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from localllm.errors import UsageError
from localllm.request import GRAMMAR_NAMES, Grammar, GrammarKind
from localllm.text.grammar.schema import check_schema, close_objects, walk_schema

T = TypeVar("T")

PARSER_LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)  # 2 kB per state
# Between the parts of JSON: nothing, a space, or line breaks with indentation; never unlimited white space.
JSON_OPTIONS: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}",
    "coerce_one_of": False,
    "lenient": False,
}
DEEP_STACK_BYTES = 2**29  # bytes of address space: a chain of 10,000 names needs a tenth
OVERLAPPING_OPTIONS = (
    "options of oneOf may overlap; anyOf is supported, or a required string with a unique const in each"
)
NEEDS_TOKENS = "no tokenizer"  # prefix of messages about special tokens
BODY_RULE = "body"
_UNSEEN = re.compile(r"\b(temperature|max_tokens|stop)\s*=")
_EXCERPT = re.compile(r"\n +\d+ \|.*", re.DOTALL)  # of a grammar, with a caret below the place of an error
_PLACED_ERROR = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


@lru_cache(maxsize=64)
def compile_source(grammar: Grammar) -> str:
    """Return the grammar in llguidance's JSON, named BODY.

    Raises UsageError for what is not supported: a keyword with its place, a schema that nothing satisfies, a
    syntax error.
    """
    source = json.dumps({"name": BODY_RULE, **_written(grammar)})
    if reason := _refusal(source):
        raise UsageError(f"the {GRAMMAR_NAMES[grammar.kind]} cannot be used: {_reason(grammar, reason)}")
    return source


def run_on_deep_stack(function: Callable[[], T]) -> T:
    """Return the function's result, computed in a separate thread: the compiler follows chains of names
    recursively.
    """
    results: list[T] = []
    with _ONE_AT_A_TIME:
        default_size = threading.stack_size(DEEP_STACK_BYTES)
        try:
            thread = threading.Thread(target=lambda: results.append(function()))
            thread.start()
        finally:
            threading.stack_size(default_size)
    thread.join()
    return results[0]


_ONE_AT_A_TIME = threading.Lock()  # the stack size of new threads is global to the process


def _written(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            check_schema(grammar.schema)
            return _as_json(grammar.schema)
        case GrammarKind.JSON:
            return _as_json({"type": "object"})
        case GrammarKind.REGEX:
            return _grammar_of(llguidance.LLMatcher.grammar_from_regex(grammar.text))
        case GrammarKind.CHOICE:
            texts = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(grammar.choices))
            return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(texts)}"}
        case GrammarKind.LARK:
            if unsupported := _UNSEEN.search(grammar.text):
                raise UsageError(f"the Lark grammar sets {unsupported[1]}, which is not supported", "leave it out")
            return {"lark_grammar": grammar.text}
        case GrammarKind.GBNF:
            return {"lark_grammar": _from_gbnf(grammar.text)}


def _as_json(schema: dict[str, Any] | bool) -> dict[str, Any]:
    text = json.dumps(close_objects(schema) if isinstance(schema, dict) else {})
    try:
        return _grammar_of(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))
    except ValueError as error:  # a number outside its range
        raise UsageError(f"the JSON schema cannot be read: {error}") from None


def _grammar_of(source: str) -> dict[str, Any]:
    content = json.loads(source)["grammars"][0]
    return {name: value for name, value in content.items() if name != "name" and value is not None}


def _from_gbnf(text: str) -> str:
    """Raises UsageError for what the converter does not support: token references, unknown rules, no `root`."""
    try:
        return gbnf_to_lark(_ESCAPE.sub(_unescaped, text))
    except GbnfToLarkError as error:
        raise UsageError(f"the GBNF grammar cannot be read: {error}") from None
    except RecursionError:
        raise UsageError("the GBNF grammar is nested too deeply", "give the inner parts names") from None
    except Exception as error:  # the converter raises bare exceptions
        raise UsageError(f"the GBNF grammar cannot be converted: {error}") from None


def _unescaped(escape: re.Match[str]) -> str:
    r"""Return an escaped character in the form that the converter understands, which drops the zeros of
    \\u00e9.
    """
    digits = escape[1] or escape[2] or escape[3]
    code = int(digits, 16) if digits else 0x110000
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return escape[0]
    return chr(code) if code > 0x7F or chr(code).isalnum() else f"\\x{code:02X}"


def _refusal(source: str) -> str:
    """Return why llguidance rejects a grammar or ignores part of it; "" if neither."""
    grammar = f'{{"grammars": [{source}]}}'
    _, messages = run_on_deep_stack(
        lambda: llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=PARSER_LIMITS)
    )
    return next((message for message in messages if not message.startswith(NEEDS_TOKENS)), "")


def _reason(grammar: Grammar, reason: str) -> str:
    """Return the reason as one line, with the place in a schema."""
    text = _EXCERPT.sub("", reason)
    if grammar.kind is GrammarKind.REGEX:
        text = text.rpartition("\nerror: ")[2]
    if grammar.kind is GrammarKind.LARK and (error := _PLACED_ERROR.fullmatch(text)):
        text = f"line {error[1]}, column {error[2]}: {error[3]}"
    line = OVERLAPPING_OPTIONS if reason.startswith("oneOf") else " ".join(text.split())[:300]
    if grammar.kind is not GrammarKind.JSON_SCHEMA or not isinstance(grammar.schema, dict):
        return line
    return f"{line} (at {_place(grammar.schema, reason)})"


def _place(schema: dict[str, Any], reason: str) -> str:
    """Return the innermost part of a schema that is rejected for the same reason on its own."""
    shared = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}

    def blamed() -> Iterator[str]:
        for place, part in walk_schema(schema):
            if place == "#" or _refusal(json.dumps({"name": BODY_RULE, **_as_json({**shared, **part})})) == reason:
                yield place

    return max(blamed(), key=lambda place: place.count("/"))
