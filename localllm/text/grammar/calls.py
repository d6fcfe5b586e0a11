"""The grammar of an answer that calls functions, in the model's own markup (`text/output/spelling.py`).

Where a call is required, the answer is one call or several. Otherwise it is text, or what a grammar demands of
the content; once a call has begun, the rest of the answer is calls. Arguments of required calls and of strict
functions follow their schemas, those of other functions are any objects. Reasoning comes before all of that
(`thoughts.py`).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from localllm.errors import UsageError
from localllm.request import Grammar, GrammarKind
from localllm.text.grammar.functions import ToolConstraint, ToolFunction
from localllm.text.grammar.parameters import MarkupWriter, parse_parameters, quote
from localllm.text.grammar.schema import check_schema
from localllm.text.grammar.source import BODY_RULE, compile_source
from localllm.text.grammar.thoughts import ReasoningGrammar
from localllm.text.output.blocks import ToolCallFormat
from localllm.text.output.channels import CHANNEL, MESSAGE, START, ChannelFormat
from localllm.text.output.formats import BARE_JSON, HARMONY, OutputFormat
from localllm.text.output.spelling import ID_SLOT, KEY_SLOT, NAME_SLOT, ParameterSyntax

CONTENT_GRAMMAR = "content"  # the name of the grammar that the content keeps to
ANY_OBJECT = '{"type": "object"}'
TERMINALS = "ANY: /(?s:.*)/\nSOME: /(?s:.+)/\nKEY: /[a-zA-Z_][a-zA-Z0-9_]*/"


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
                raise UsageError("this model has no markup that tells a call from text", remedy)
            self.rules.append("start: ANY")
        elif self.tool_format.bare_begin:  # an answer that begins otherwise is no call for routers either
            self.rules += ["start: TEXT | calls", f"TEXT: /(\\s*([^\\s{self.tool_format.bare_begin}](?s:.*))?)?/"]
        else:
            self.write_text_before(self.tool_format, closing)

    def write_content_or_calls(self, content: Grammar) -> None:
        """A call from the beginning on, or content that follows a grammar, with nothing before either.

        Raises UsageError for markup of calls that llguidance cannot tell from the content by its first token.
        """
        harmony = self.output_format.channels == HARMONY
        if harmony or (self.output_format.tools is not None and self.tool_format.bare_begin):
            remedy = "leave out the tools or the grammar, or require a call"
            raise UsageError("this model's calls of tools cannot stand beside a grammar", remedy)
        self.grammars.append({**json.loads(compile_source(content)), "name": CONTENT_GRAMMAR})
        held = f"@{CONTENT_GRAMMAR}"
        if self.output_format.channels:
            held = f"{self.writer.literal(MESSAGE)} {held}"
        else:
            held = self.reasoning.content_rule(held)
        self.rules.append(f"start: {held}" if self.output_format.tools is None else f"start: calls | {held}")

    def write_messages(self, channels: ChannelFormat) -> None:
        """A call or a message to the user; gpt-oss may announce calls first."""
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

    def arguments_rule(self, place: int, function: ToolFunction) -> str:
        """Return the arguments of a call, and the markup that closes it."""
        close = self.literal_with_id(self.syntax.call_end)
        strict = self.constraint.is_strict(function)
        parameter_syntax = self.syntax.parameters
        with _name_function_in_errors(function):
            if parameter_syntax is None:
                return f"{self.json_rule(f'arguments_{place}', function.schema if strict else ANY_OBJECT)} {close}"
            if strict:
                return f"{self.parameter_rules(place, function, parameter_syntax)} {close}"
        if parameter_syntax.text_before is None:
            before = self.writer.literal(parameter_syntax.before.removeprefix(KEY_SLOT))
            pair = f"{before} {self.json_rule('anything', 'true')}"
            return f"(KEY {pair} ({quote(parameter_syntax.separator)} KEY {pair})*)? {close}"
        inside = self.writer.control_tokens((*self.tool_format.inner_markup, self.tool_format.string_quote))
        between = f"({' | '.join(('SOME', *inside))})* " if inside else ""
        self.rules += [f"any_{place}: {between}rest_{place}"]
        self.rules += self.writer.text_until(f"rest_{place}", "ANY", self.syntax.call_end)
        return f"any_{place}"

    def json_rule(self, name: str, schema: str) -> str:
        """Return the rule for a value of this schema."""
        if all(part["name"] != name for part in self.grammars):
            self.grammars.append(
                {**json.loads(compile_source(Grammar(GrammarKind.JSON_SCHEMA, schema))), "name": name}
            )
        return f"@{name}"

    def parameter_rules(self, place: int, function: ToolFunction, form: ParameterSyntax) -> str:
        """Return the rules of each parameter in turn; required ones come first if a separator is used."""
        schema = json.loads(function.schema)
        check_schema(schema)
        parameters = parse_parameters(schema, form)
        if form.separator:
            parameters.sort(key=lambda parameter: not parameter.required)
        for number, parameter in enumerate(parameters):
            name, options = f"p_{place}_{number}", list[str]()
            if parameter.text_pattern is not None and form.text_before is not None:
                after = form.text_after or form.after
                self.rules += [
                    f"B_{place}_{number}: ({parameter.text_pattern}) & ~(ANY ({self.forbidden_texts(after)}) ANY)",
                    *self.writer.text_until(f"t_{place}_{number}", f"B_{place}_{number}", after),
                ]
                options.append(
                    f"{self.writer.literal(form.text_before.replace(KEY_SLOT, parameter.name))} t_{place}_{number}"
                )
            if parameter.json_schema is not None:
                before = self.writer.literal(form.before.replace(KEY_SLOT, parameter.name))
                after = self.writer.literal(form.after)
                options.append(
                    f"{before} {self.json_rule(f'value_{place}_{number}', parameter.json_schema)} {after}"
                )
            self.rules.append(f"{name}: {' | '.join(options)}")
        names = [(f"p_{place}_{number}", parameter.required) for number, parameter in enumerate(parameters)]
        return parameter_sequence(names, quote(form.separator) if form.separator else "")

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
    for place, name in enumerate(optional):
        options.append(name + "".join(f" ({between} {later})?" for later in optional[place + 1 :]))
    return f"({' | '.join(options)})?"


@contextmanager
def _name_function_in_errors(function: ToolFunction) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(
            f"the function {function.name} cannot be constrained: {error.message}", error.remedy
        ) from None
