"""The grammar of an answer that calls functions, in the model's own markup (`text/output/spelling.py`).

Where a call is required, the answer is one call or several. Otherwise it is text, or what a grammar demands of
the content; once a call has begun, the rest of the answer is calls. Arguments of required calls and of strict
functions follow their schemas, those of other functions are any objects. Reasoning comes before all of that
(`thoughts.py`).
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from localllm.errors import UsageError
from localllm.request import Grammar, GrammarKind
from localllm.text.grammar.functions import FUNCTION_NAME, ToolConstraint, ToolFunction
from localllm.text.grammar.reasoning import ReasoningGrammar
from localllm.text.grammar.schema import ANNOTATION_KEYWORDS, check_schema, resolve_pointer
from localllm.text.grammar.source import BODY_RULE, compile_source
from localllm.text.output.blocks import ToolCallFormat
from localllm.text.output.calls import parse_typed
from localllm.text.output.channels import CHANNEL, MESSAGE, START, ChannelFormat
from localllm.text.output.formats import BARE_JSON, HARMONY, OutputFormat
from localllm.text.output.spelling import ID_SLOT, KEY_SLOT, NAME_SLOT, ParameterSyntax

CONTENT_GRAMMAR = "content"  # the name of the grammar that the content keeps to
ANY_OBJECT = '{"type": "object"}'
TERMINALS = "ANY: /(?s:.*)/\nSOME: /(?s:.+)/\nKEY: /[a-zA-Z_][a-zA-Z0-9_]*/"
SCALAR_TYPES = frozenset(("boolean", "integer", "number", "null"))
JSON_TYPES = SCALAR_TYPES | {"string", "array", "object"}
ROOT_KEYWORDS = (
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    *ANNOTATION_KEYWORDS,
)
STRING_KEYWORDS = ("type", "minLength", "maxLength", *ANNOTATION_KEYWORDS)
SIMPLER_SCHEMA = "make it simpler, or leave it to the model to call"
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class ToolCallGrammar:
    """Builds the grammar for one answer of one model."""

    def __init__(
        self,
        output: OutputFormat,
        reasoning: ReasoningGrammar,
        token_of: Callable[[str], int | None],
        constraint: ToolConstraint,
    ):
        """`token_of`: returns the control token with this text, if there is one. Raises UsageError for constraints
        that are not supported.
        """
        self.output_format = output
        self.reasoning = reasoning
        self.constraint = constraint
        self.tool_format = output.tools or BARE_JSON
        self.syntax = output.channels.syntax if output.channels else self.tool_format.syntax
        self.markup = output.markup(with_tools=True)
        self.writer = MarkupWriter(self.markup, token_of)
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self.arguments = [self.arguments_rule(*numbered) for numbered in enumerate(constraint.functions)]
        self.write_rules()

    def grammar_parts(self) -> list[dict[str, Any]]:
        """Return grammars in llguidance's JSON, BODY first."""
        return [{"name": BODY_RULE, "lark_grammar": "\n".join([*self.rules, TERMINALS])}, *self.grammars]

    def write_rules(self) -> None:
        literal, syntax, use = self.writer.literal, self.syntax, self.constraint.tool_use
        several = use.parallel and syntax.separator is not None
        following = f"({literal(syntax.separator or '')} call)*" if several else ""
        closing = f"{following} {literal(syntax.calls_end)}"
        self.rules += [f"call: {self.call_options()}", f"calls: {literal(syntax.calls_begin)} call {closing}"]
        if syntax.id_pattern:
            self.rules.append(f"ID: /{syntax.id_pattern}/")
        if use.must_call:
            self.rules.append("start: calls")
        elif self.constraint.content:
            self.write_content_or_calls(self.constraint.content)
        elif self.output_format.channels:
            self.write_messages(self.output_format.channels)
        elif self.output_format.tools is None:
            if any(map(self.constraint.is_strict, self.constraint.functions)):
                remedy = "require a call, or leave out strict"
                raise UsageError("this model has no markup that distinguishes a call from text", remedy)
            self.rules.append("start: ANY")
        elif self.tool_format.bare_begin:  # an answer that begins otherwise is not a call for routers either
            self.rules += ["start: TEXT | calls", f"TEXT: /(\\s*([^\\s{self.tool_format.bare_begin}](?s:.*))?)?/"]
        else:
            self.write_text_before(self.tool_format, closing)

    def write_content_or_calls(self, content: Grammar) -> None:
        """A call from the beginning on, or content that follows a grammar, with nothing before either.

        Raises UsageError for markup of calls that llguidance cannot distinguish from the content by its first
        token.
        """
        harmony = self.output_format.channels == HARMONY
        if harmony or (self.output_format.tools is not None and self.tool_format.bare_begin):
            remedy = "leave out the tools or the grammar, or require a call"
            raise UsageError("this model's tool calls cannot be combined with a grammar", remedy)
        self.grammars.append({**json.loads(compile_source(content)), "name": CONTENT_GRAMMAR})
        held = f"@{CONTENT_GRAMMAR}"
        if self.output_format.channels:
            held = f"{self.writer.literal(MESSAGE)} {held}"
        else:
            held = self.reasoning.content_rule(held)
        self.rules.append(f"start: {held}" if self.output_format.tools is None else f"start: calls | {held}")

    def write_messages(self, channels: ChannelFormat) -> None:
        """Write the rules for answers in channels: a call, or a message to the user; gpt-oss may announce calls
        first."""
        literal = self.writer.literal
        if channels != HARMONY:
            self.rules.append(f"start: calls | {literal(MESSAGE)} ANY")
            return
        self.rules += [
            "start: announced* (calls | final)",
            f'announced: {literal(CHANNEL)} "commentary" {literal(MESSAGE)} said',
            *self.writer.text_until("said", "SPOKEN", channels.message_ends[0] + START + "assistant"),
            f"SPOKEN: ANY & ~(ANY {quote(channels.message_ends[0])} ANY)",
            f'final: {literal(CHANNEL)} "final" {literal(MESSAGE)} ANY',
        ]

    def write_text_before(self, tool_format: ToolCallFormat, rest: str) -> None:
        """Text up to the beginning of a call, if there is one."""
        marker = tool_format.begin[0]
        self.rules += [
            f"start: {self.reasoning.content_rule('TEXT')} | head "
            f"({self.call_options(self.syntax.calls_begin, marker)}) {rest}",
            *self.writer.text_until("head", "TEXT", marker),
            f"TEXT: ANY & ~(ANY {quote(marker)} ANY)",
        ]

    def call_options(self, before: str = "", without: str = "") -> str:
        """Return alternatives for a call of any function, each preceded by `before`, minus the prefix
        `without`.
        """
        opened = (
            (before + self.syntax.call_begin).replace(NAME_SLOT, function.name).removeprefix(without)
            for function in self.constraint.functions
        )
        return " | ".join(
            f"{self.literal_with_id(text)} {rest}" for text, rest in zip(opened, self.arguments, strict=True)
        )

    def literal_with_id(self, text: str) -> str:
        """Return the Lark literal of a text that may contain an ID slot."""
        return " ID ".join(self.writer.literal(part) for part in text.split(ID_SLOT))

    def arguments_rule(self, index: int, function: ToolFunction) -> str:
        """Return the arguments of a call, and the markup that closes it."""
        close = self.literal_with_id(self.syntax.call_end)
        strict = self.constraint.is_strict(function)
        parameter_syntax = self.syntax.parameters
        with _name_function_in_errors(function):
            if parameter_syntax is None:
                return f"{self.json_rule(f'arguments_{index}', function.schema if strict else ANY_OBJECT)} {close}"
            if strict:
                return f"{self.parameter_rules(index, function, parameter_syntax)} {close}"
        if parameter_syntax.text_before is None:
            before = self.writer.literal(parameter_syntax.before.removeprefix(KEY_SLOT))
            pair = f"{before} {self.json_rule('anything', 'true')}"
            return f"(KEY {pair} ({quote(parameter_syntax.separator)} KEY {pair})*)? {close}"
        inside = self.writer.control_tokens((*self.tool_format.inner_markup, self.tool_format.string_quote))
        between = f"({' | '.join(('SOME', *inside))})* " if inside else ""
        self.rules += [f"any_{index}: {between}rest_{index}"]
        self.rules += self.writer.text_until(f"rest_{index}", "ANY", self.syntax.call_end)
        return f"any_{index}"

    def json_rule(self, name: str, schema: str) -> str:
        """Return the rule for a value of this schema."""
        if all(part["name"] != name for part in self.grammars):
            self.grammars.append(
                {**json.loads(compile_source(Grammar(GrammarKind.JSON_SCHEMA, schema))), "name": name}
            )
        return f"@{name}"

    def parameter_rules(self, index: int, function: ToolFunction, syntax: ParameterSyntax) -> str:
        """Return the rules of each parameter in turn; required ones come first if a separator is used."""
        schema = json.loads(function.schema)
        check_schema(schema)
        parameters = parse_parameters(schema, syntax)
        if syntax.separator:
            parameters.sort(key=lambda parameter: not parameter.required)
        for number, parameter in enumerate(parameters):
            name, options = f"p_{index}_{number}", list[str]()
            if parameter.text_pattern is not None and syntax.text_before is not None:
                after = syntax.text_after or syntax.after
                self.rules += [
                    f"B_{index}_{number}: ({parameter.text_pattern}) & ~(ANY ({self.forbidden_texts(after)}) ANY)",
                    *self.writer.text_until(f"t_{index}_{number}", f"B_{index}_{number}", after),
                ]
                before = self.writer.literal(syntax.text_before.replace(KEY_SLOT, parameter.name))
                options.append(f"{before} t_{index}_{number}")
            if parameter.json_schema is not None:
                before = self.writer.literal(syntax.before.replace(KEY_SLOT, parameter.name))
                after = self.writer.literal(syntax.after)
                options.append(
                    f"{before} {self.json_rule(f'value_{index}_{number}', parameter.json_schema)} {after}"
                )
            self.rules.append(f"{name}: {' | '.join(options)}")
        names = [(f"p_{index}_{number}", parameter.required) for number, parameter in enumerate(parameters)]
        return parameter_sequence(names, quote(syntax.separator) if syntax.separator else "")

    def forbidden_texts(self, after: str) -> str:
        """Return texts that a parser would treat as the end of a value."""
        ends = {after.strip(), self.syntax.call_end.strip(), *self.markup} - {""}
        return " | ".join(quote(end) for end in sorted(ends))


def parameter_sequence(names: list[tuple[str, bool]], between: str) -> str:
    """Return rules in sequence, optional unless required, with `between` as separator."""
    if not between:
        return " ".join(name if required else f"{name}?" for name, required in names)
    required_names = [name for name, required in names if required]
    optional = [name for name, required in names if not required]
    followed = " ".join(f"({between} {name})?" for name in optional)
    if required_names or not optional:
        return f" {between} ".join(required_names) + " " + followed
    options = []
    for index, name in enumerate(optional):
        options.append(name + "".join(f" ({between} {later})?" for later in optional[index + 1 :]))
    return f"({' | '.join(options)})?"


@contextmanager
def _name_function_in_errors(function: ToolFunction) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(
            f"the function {function.name} cannot be constrained: {error.message}", error.remedy
        ) from None


class MarkupWriter:
    """Writes markup in Lark: as control tokens if the model has them, otherwise as characters.

    literals: markup that may be or contain control tokens; token_of: returns the control token with this text, if
    there is one.
    """

    def __init__(self, literals: Collection[str], token_of: Callable[[str], int | None]):
        tokens = {literal: token_of(literal) for literal in literals if literal}
        self._tokens = {literal: token for literal, token in tokens.items() if token is not None}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._parts = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")

    def literal(self, text: str) -> str:
        """Return the Lark form of exactly this text; empty for an empty text."""
        parts = filter(None, self._parts.split(text))
        return " ".join(f"<[{self._tokens[part]}]>" if part in self._tokens else quote(part) for part in parts)

    def control_tokens(self, literals: Collection[str]) -> list[str]:
        """Return those literals that are control tokens."""
        return [f"<[{self._tokens[literal]}]>" for literal in literals if literal in self._tokens]

    def text_until(self, rule: str, body: str, text: str) -> list[str]:
        """Return rules for a match of the terminal `body` followed by the first occurrence of the text."""
        first, *rest = self._parts.split(text)
        if not rest:
            return [f"{rule}[suffix={quote(text)}]: {body}"]
        # Characters cannot match a control token, so the longest match ends right before it.
        letters = f"{rule.upper()}: {body} {quote(first)}" if first else f"{rule.upper()}: {body}"
        return [f"{rule}: {rule.upper()} {self.literal(''.join(rest))}", letters]


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class ToolParameter:
    """A parameter. At least one of `text_pattern` and `json_schema` is set."""

    name: str
    required: bool
    text_pattern: str | None
    """Lark pattern of a verbatim string, for a terminal; None if not allowed."""

    json_schema: str | None
    """Schema of a value written as JSON; None if not allowed."""


def parse_parameters(schema: Mapping[str, Any], syntax: ParameterSyntax) -> list[ToolParameter]:
    """Return a function's parameters in its schema's order. Additional ones that the schema allows are not
    generated.

    The markup lists arguments one by one, strings verbatim and others as JSON (or Python's spelling of booleans).
    A parser interprets each by its schema, so a schema for which a string could be mistaken for a number is
    rejected. Raises UsageError, with the parameter, for what this markup cannot express or a parser would read as
    another value.
    """
    if unsupported := next(
        (word for word in schema if word not in ROOT_KEYWORDS and not word.startswith("x-")), None
    ):
        raise UsageError(
            f"the schema's {unsupported} at # is not supported in the markup of this model's calls", SIMPLER_SCHEMA
        )
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if missing := next((key for key in required if key not in properties), None):
        raise UsageError(f"the parameter {missing} is required, but is not among the properties", "add it")
    if unsupported := next((key for key in properties if not FUNCTION_NAME.fullmatch(key)), None):
        raise UsageError(
            f"the parameter {unsupported!r} cannot be written in this model's markup", "give it another name"
        )
    return [_parameter(key, part, schema, syntax, required=key in required) for key, part in properties.items()]


def _parameter(
    key: str, part: Any, root: Mapping[str, Any], syntax: ParameterSyntax, *, required: bool
) -> ToolParameter:
    resolved = _resolved(part, root)
    kinds = _kinds(resolved, root)
    if syntax.text_before is None or "string" not in kinds:
        if syntax.scalars_only and not kinds <= SCALAR_TYPES:
            raise _refusal(key, "a list or an object")
        as_python = (
            syntax.text_before is not None
            and not syntax.marks_text
            and resolved == {**resolved, "type": "boolean"}
        )
        text = '"True" | "False"' if as_python and _words(resolved) == {"type"} else None
        return ToolParameter(key, required, text, _alone(part, root))
    text = _text(key, part, resolved, kinds, syntax)
    nullable = syntax.marks_text and "null" in kinds
    return ToolParameter(key, required, text, '{"type": "null"}' if nullable else None)


def _text(key: str, part: Any, resolved: Any, kinds: frozenset[str], syntax: ParameterSyntax) -> str:
    """Return the pattern of such a parameter's text."""
    words = _words(resolved)
    if not words:
        return "ANY"
    literals = resolved.get("enum", [resolved["const"]] if "const" in resolved else [])
    if literals and all(isinstance(text, str) for text in literals):
        if not syntax.marks_text and (
            ambiguous := next((text for text in literals if parse_typed(text, part) != text), None)
        ):
            raise _refusal(key, f"the text {ambiguous!r}, which reads as another value")
        return " | ".join(quote(text) if text else "/(?s:.{0})/" for text in literals)
    if (
        resolved.get("type") == "string"
        and words <= {*STRING_KEYWORDS}
        and (syntax.marks_text or resolved is part)
    ):
        low, high = resolved.get("minLength", 0), resolved.get("maxLength", "")
        return "ANY" if words == {"type"} else f"/(?s:.{{{low},{high}}})/"
    members = [resolved, *resolved.get("anyOf", ())]
    if kinds <= {"string", "null"} and all(_words(member) <= {"type", "anyOf"} for member in members):
        return "ANY"
    raise _refusal(key, "a text of this kind or another value")


def _words(schema: Any) -> set[str]:
    """Return keywords that restrict values."""
    keywords = schema if isinstance(schema, Mapping) else {}
    return {word for word in keywords if word not in ANNOTATION_KEYWORDS and not word.startswith("x-")}


def _refusal(key: str, what: str) -> UsageError:
    return UsageError(
        f"the parameter {key} may be {what}, which this model's markup cannot express unambiguously",
        SIMPLER_SCHEMA,
    )


def _alone(part: Any, root: Mapping[str, Any]) -> str:
    """Return a parameter's schema with the definitions it refers to."""
    shared = {name: root[name] for name in ("$schema", "$defs", "definitions") if name in root}
    return json.dumps({**shared, **part} if isinstance(part, Mapping) else part)


def _resolved(part: Any, root: Mapping[str, Any]) -> Any:
    """Follow a chain of references, none of which leads back to itself: `check_schema` refuses those."""
    while isinstance(part, Mapping) and isinstance(part.get("$ref"), str) and len(_words(part)) == 1:
        part = resolve_pointer(root, part["$ref"])
    return part


def _kinds(part: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types that a value may have, or a superset."""
    part = _resolved(part, root)
    if not isinstance(part, Mapping) or depth > 8:
        return JSON_TYPES
    named = part.get("type", list(JSON_TYPES))
    kinds = frozenset([named] if isinstance(named, str) else named)
    for word in ("anyOf", "oneOf"):
        if word in part:
            kinds &= frozenset().union(*(_kinds(member, root, depth + 1) for member in part[word]))
    for member in part.get("allOf", ()):
        kinds &= _kinds(member, root, depth + 1)
    values = part.get("enum", [part["const"]] if "const" in part else None)
    if values is not None:
        kinds &= {_NAMES.get(type(value), "null") for value in values} | {"number"}
    return kinds
