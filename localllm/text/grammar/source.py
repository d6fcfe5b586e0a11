"""A `Grammar` in the words of llguidance, checked as far as it can be without a model's tokens.

A grammar may come from a stranger: its size is bounded by `Grammar`, what the compiler spends by `LIMITS`, and it
is compiled on a stack that the longest chain of names fits on.
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

PARSER_LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)  # 2 kB a state
# Between the parts of JSON: nothing, a space, or a new line and its indentation; never space without an end.
JSON_OPTIONS: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n{1,2}[ \t]{0,20}",
    "coerce_one_of": False,
    "lenient": False,
}
DEEP_STACK_BYTES = 2**29  # bytes of address space: a chain of 10,000 names takes a tenth
OVERLAPPING_OPTIONS = (
    "options of oneOf may overlap; anyOf is supported, or a required string of its own const in each"
)
NEEDS_TOKENS = "no tokenizer"  # begins what it says of special tokens
BODY_RULE = "body"
_UNSEEN = re.compile(r"\b(temperature|max_tokens|stop)\s*=")
_REGEX_ERROR = re.compile(r" error: (.*?)(?: 1 \||$)")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


@lru_cache(maxsize=64)
def compile_source(grammar: Grammar) -> str:
    """The grammar in llguidance's JSON, under the name BODY.

    Raises UsageError for what cannot be kept to: an unsupported keyword and its place, a schema that nothing
    satisfies, a syntax error.
    """
    written = json.dumps({"name": BODY_RULE, **_written(grammar)})
    if reason := _refusal(written):
        raise UsageError(f"the {GRAMMAR_NAMES[grammar.kind]} cannot be kept to: {_reason(grammar, reason)}")
    return written


def run_on_deep_stack(function: Callable[[], T]) -> T:
    """What the function gives, run by a thread of its own: the compiler follows chains of names by recursion."""
    results: list[T] = []
    with _ONE_AT_A_TIME:
        usual = threading.stack_size(DEEP_STACK_BYTES)
        try:
            thread = threading.Thread(target=lambda: results.append(function()))
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    return results[0]


_ONE_AT_A_TIME = threading.Lock()  # the size of new threads' stacks is the process's


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
            if found := _UNSEEN.search(grammar.text):
                raise UsageError(f"the Lark grammar sets {found[1]}, which is not supported", "leave it out")
            return {"lark_grammar": grammar.text}
        case GrammarKind.GBNF:
            return {"lark_grammar": _from_gbnf(grammar.text)}


def _as_json(schema: dict[str, Any] | bool) -> dict[str, Any]:
    text = json.dumps(close_objects(schema) if isinstance(schema, dict) else {})
    try:
        return _grammar_of(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS))
    except ValueError as error:  # a number beyond all that it reads
        raise UsageError(f"the JSON schema cannot be read: {error}") from None


def _grammar_of(written: str) -> dict[str, Any]:
    content = json.loads(written)["grammars"][0]
    return {name: value for name, value in content.items() if name != "name" and value is not None}


def _from_gbnf(text: str) -> str:
    """Raises UsageError for what the converter does not know: token references, an unknown rule, no `root`."""
    try:
        return gbnf_to_lark(_ESCAPE.sub(_unescaped, text))
    except GbnfToLarkError as error:
        raise UsageError(f"the GBNF grammar cannot be read: {error}") from None
    except RecursionError:
        raise UsageError("the GBNF grammar is nested too deeply", "give the inner parts names") from None
    except Exception as error:  # the converter raises bare ones
        raise UsageError(f"the GBNF grammar cannot be converted: {error}") from None


def _unescaped(escape: re.Match[str]) -> str:
    """A character by its number, as the converter understands it, which takes the zeros from \\u00e9."""
    digits = escape[1] or escape[2] or escape[3]
    code = int(digits, 16) if digits else 0x110000
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return escape[0]
    return chr(code) if code > 0x7F or chr(code).isalnum() else f"\\x{code:02X}"


def _refusal(written: str) -> str:
    """Why llguidance refuses a grammar, or passes over a part of it; "" where it does neither."""
    grammar = f'{{"grammars": [{written}]}}'
    _, said = run_on_deep_stack(
        lambda: llguidance.LLMatcher.validate_grammar_with_warnings(grammar, None, limits=PARSER_LIMITS)
    )
    return next((words for words in said if not words.startswith(NEEDS_TOKENS)), "")


def _reason(grammar: Grammar, reason: str) -> str:
    """In one line, with the place in a schema."""
    line = OVERLAPPING_OPTIONS if reason.startswith("oneOf") else " ".join(reason.split())[:300]
    if grammar.kind is GrammarKind.REGEX and (wrong := _REGEX_ERROR.search(line)):
        return wrong[1]
    if grammar.kind is not GrammarKind.JSON_SCHEMA or not isinstance(grammar.schema, dict):
        return line
    return f"{line} (at {_place(grammar.schema, reason)})"


def _place(schema: dict[str, Any], reason: str) -> str:
    """The innermost part of a schema that is refused for the same reason when it stands alone."""
    shared = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}

    def blamed() -> Iterator[str]:
        for place, part in walk_schema(schema):
            if place == "#" or _refusal(json.dumps({"name": BODY_RULE, **_as_json({**shared, **part})})) == reason:
                yield place

    return max(blamed(), key=lambda place: place.count("/"))
