"""The grammar of an answer that calls functions, in the markup of the model at hand (`text/output/spelling.py`).

Where a call is required, the answer is one, or several. Else it is text; once a call has begun, the rest of
the answer is calls. Arguments of required calls and of strict functions keep to their schemas, those of others are
any objects. What a model thinks before stands around all of that (`thoughts.py`).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from localllm.errors import UsageError
from localllm.request import Grammar, GrammarKind
from localllm.text.grammar.functions import Calling, Function
from localllm.text.grammar.parameters import parameters_of
from localllm.text.grammar.schema import check_schema
from localllm.text.grammar.source import BODY, checked
from localllm.text.grammar.spelled import Speller, quoted
from localllm.text.grammar.thoughts import Frame
from localllm.text.output.blocks import ToolFormat
from localllm.text.output.channels import CHANNEL, MESSAGE, START, ChannelFormat
from localllm.text.output.formats import BARE, HARMONY, OutputFormat
from localllm.text.output.spelling import ID, KEY, NAME, Parameters

ANY_OBJECT = '{"type": "object"}'
TERMINALS = "ANY: /(?s:.*)/\nSOME: /(?s:.+)/\nKEY: /[a-zA-Z_][a-zA-Z0-9_]*/"


class CallGrammar:
    """Writes it for one answer of one model."""

    def __init__(
        self, output: OutputFormat, frame: Frame, token_of: Callable[[str], int | None], calling: Calling
    ):
        """`token_of`: the control token that is written so, if there is one. Raises UsageError for what cannot be
        kept to."""
        self.output = output
        self.frame = frame
        self.calling = calling
        self.form = output.tools or BARE
        self.spelling = output.channels.spelling if output.channels else self.form.spelling
        self.markup = output.markup(with_tools=True)
        self.speller = Speller(self.markup, token_of)
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self.arguments = [self.arguments_of(*numbered) for numbered in enumerate(calling.functions)]
        self.write()

    def parts(self) -> list[dict[str, Any]]:
        """Grammars in llguidance's JSON, BODY the first."""
        return [{"name": BODY, "lark_grammar": "\n".join([*self.rules, TERMINALS])}, *self.grammars]

    def write(self) -> None:
        literal, spelling, use = self.speller.literal, self.spelling, self.calling.use
        several = use.parallel and spelling.between is not None
        more = f"({literal(spelling.between or '')} call)*" if several else ""
        rest = f"{more} {literal(spelling.end)}"
        self.rules += [f"call: {self.options()}", f"calls: {literal(spelling.begin)} call {rest}"]
        if spelling.id:
            self.rules.append(f"ID: /{spelling.id}/")
        if use.must_call:
            self.rules.append("start: calls")
        elif self.output.channels:
            self.write_messages(self.output.channels)
        elif self.output.tools is None:
            if any(map(self.calling.is_strict, self.calling.functions)):
                remedy = "require a call, or leave out strict"
                raise UsageError("this model has no markup that tells a call from text", remedy)
            self.rules.append("start: ANY")
        elif self.form.bare:  # an answer that begins otherwise is no call for routers either
            self.rules += ["start: TEXT | calls", f"TEXT: /(\\s*([^\\s{self.form.bare}](?s:.*))?)?/"]
        else:
            self.write_text_before(self.form, rest)

    def write_messages(self, form: ChannelFormat) -> None:
        """A call, or a message to the user; gpt-oss may announce calls."""
        literal = self.speller.literal
        if form != HARMONY:
            self.rules.append(f"start: calls | {literal(MESSAGE)} ANY")
            return
        self.rules += [
            "start: announced* (calls | final)",
            f'announced: {literal(CHANNEL)} "commentary" {literal(MESSAGE)} said',
            *self.speller.until("said", "SPOKEN", form.ends[0] + START + "assistant"),
            f"SPOKEN: ANY & ~(ANY {quoted(form.ends[0])} ANY)",
            f'final: {literal(CHANNEL)} "final" {literal(MESSAGE)} ANY',
        ]

    def write_text_before(self, form: ToolFormat, rest: str) -> None:
        """Text, up to where a call begins, if one does."""
        mark = form.begin[0]
        self.rules += [
            f"start: {self.frame.content('TEXT')} | head ({self.options(self.spelling.begin, mark)}) {rest}",
            *self.speller.until("head", "TEXT", mark),
            f"TEXT: ANY & ~(ANY {quoted(mark)} ANY)",
        ]

    def options(self, before: str = "", without: str = "") -> str:
        """A call of any of the functions; `before` it, but for what is `without`."""
        opened = (
            (before + self.spelling.open).replace(NAME, function.name).removeprefix(without)
            for function in self.calling.functions
        )
        return " | ".join(
            f"{self.literal(text)} {rest}" for text, rest in zip(opened, self.arguments, strict=True)
        )

    def literal(self, text: str) -> str:
        """Of a text that may have an ID in it."""
        return " ID ".join(self.speller.literal(part) for part in text.split(ID))

    def arguments_of(self, place: int, function: Function) -> str:
        """The arguments of a call, and what closes it."""
        close = self.literal(self.spelling.close)
        strict = self.calling.is_strict(function)
        form = self.spelling.parameters
        with _blaming(function):
            if form is None:
                return f"{self.json(f'arguments_{place}', function.schema if strict else ANY_OBJECT)} {close}"
            if strict:
                return f"{self.one_by_one(place, function, form)} {close}"
        if form.text is None:
            pair = f"{self.speller.literal(form.before.removeprefix(KEY))} {self.json('anything', 'true')}"
            return f"(KEY {pair} ({quoted(form.between)} KEY {pair})*)? {close}"
        inside = self.speller.tokens((*self.form.inside, self.form.quote))
        between = f"({' | '.join(('SOME', *inside))})* " if inside else ""
        self.rules += [f"any_{place}: {between}rest_{place}"]
        self.rules += self.speller.until(f"rest_{place}", "ANY", self.spelling.close)
        return f"any_{place}"

    def json(self, name: str, schema: str) -> str:
        """A value of this schema."""
        if all(part["name"] != name for part in self.grammars):
            self.grammars.append({**json.loads(checked(Grammar(GrammarKind.JSON_SCHEMA, schema))), "name": name})
        return f"@{name}"

    def one_by_one(self, place: int, function: Function, form: Parameters) -> str:
        """Each parameter after the other; those that are required first where something stands between them."""
        schema = json.loads(function.schema)
        check_schema(schema)
        parameters = parameters_of(schema, form)
        if form.between:
            parameters.sort(key=lambda parameter: not parameter.required)
        for number, parameter in enumerate(parameters):
            name, options = f"p_{place}_{number}", list[str]()
            if parameter.text is not None and form.text is not None:
                after = form.text_after or form.after
                self.rules += [
                    f"B_{place}_{number}: ({parameter.text}) & ~(ANY ({self.never_in_a_text(after)}) ANY)",
                    *self.speller.until(f"t_{place}_{number}", f"B_{place}_{number}", after),
                ]
                options.append(f"{self.speller.literal(form.text.replace(KEY, parameter.key))} t_{place}_{number}")
            if parameter.schema is not None:
                before = self.speller.literal(form.before.replace(KEY, parameter.key))
                after = self.speller.literal(form.after)
                options.append(f"{before} {self.json(f'value_{place}_{number}', parameter.schema)} {after}")
            self.rules.append(f"{name}: {' | '.join(options)}")
        names = [(f"p_{place}_{number}", parameter.required) for number, parameter in enumerate(parameters)]
        return sequence(names, quoted(form.between) if form.between else "")

    def never_in_a_text(self, after: str) -> str:
        """What a router would take for the end of something."""
        ends = {after.strip(), self.spelling.close.strip(), *self.markup} - {""}
        return " | ".join(quoted(end) for end in sorted(ends))


def sequence(names: list[tuple[str, bool]], between: str) -> str:
    """Rules one after the other, those not required maybe; something between each two."""
    if not between:
        return " ".join(name if required else f"{name}?" for name, required in names)
    always = [name for name, required in names if required]
    maybe = [name for name, required in names if not required]
    followed = " ".join(f"({between} {name})?" for name in maybe)
    if always or not maybe:
        return f" {between} ".join(always) + " " + followed
    firsts = []
    for place, name in enumerate(maybe):
        firsts.append(name + "".join(f" ({between} {later})?" for later in maybe[place + 1 :]))
    return f"({' | '.join(firsts)})?"


@contextmanager
def _blaming(function: Function) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(
            f"the function {function.name} cannot be held to: {error.message}", error.remedy
        ) from None
