"""Random walks through the grammar of each call format, parsed by the format's own router."""

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from localllm.errors import OutputInvalid, UsageError
from localllm.request import Grammar, GrammarKind, ToolUse
from localllm.text.backends import byte_alphabet
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.grammar.functions import build_tool_constraint
from localllm.text.grammar.result import check_tool_calls
from localllm.text.output import formats
from localllm.text.output.formats import OutputFormat
from localllm.text.output.reader import OutputDelta
from localllm.text.tokenizer import Tokenizer
from localllm.text.vocabulary import TokenizerDescription
from tests.text.grammar.schemas import SCHEMAS
from tests.text.grammar.walk import CLOSERS, walk
from tests.text.output.turns import joined, route

END = 256
HUGE = re.compile(r"[0-9][eE]\+?[0-9]{3}")
THINK = formats.ReasoningFormat(*formats.THINK)
OUTPUTS = {
    row.format.syntax.call_begin.partition("@name")[0].strip() + row.format.syntax.calls_begin.strip(): (
        OutputFormat(channels=row.format)
        if row in formats.CHANNEL_RULES
        else OutputFormat(reasoning=THINK, tools=row.format)
    )
    for row in (*formats.CHANNEL_RULES, *formats.TOOL_RULES)
} | {"none": OutputFormat(reasoning=THINK)}
FLAT: dict[str, Any] = {
    "city": {"type": "string"},
    "short": {"type": "string", "minLength": 2, "maxLength": 5},
    "unit": {"enum": ["celsius", "fahrenheit", "kelvin<"]},
    "days": {"type": "integer", "minimum": 1, "maximum": 14},
    "exact": {"type": "boolean"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "nothing": {"type": "null"},
    "none": {"type": ["integer", "null"]},
}
NESTED: dict[str, Any] = {
    "where": {"$ref": "#/$defs/place"},
    "flags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    "maybe": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
}
DEFS = {
    "place": {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "name": {"type": "string", "maxLength": 6}},
        "required": ["x"],
        "additionalProperties": False,
    }
}


def tool(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def schema_of(properties: dict[str, Any], required: Sequence[str]) -> dict[str, Any]:
    found = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return found | ({"$defs": DEFS} if "$ref" in json.dumps(properties) else {})


def markup_of(output: OutputFormat) -> list[str]:
    return sorted(output.markup(with_tools=True) - {"", '"'})


@cache
def model(output: OutputFormat, *, as_text: bool = False) -> tuple[Tokenizer, GrammarCompiler]:
    """Tokenizer with letters, and the markup as control tokens, unless `as_text`."""
    words = {letter: index for index, letter in enumerate(byte_alphabet().values())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>", *([] if as_text else markup_of(output))])
    tokenizer = Tokenizer(TokenizerDescription(Path("none"), backend, {}, {}, (END,)))
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size, (END,), output)


def tools_for(output: OutputFormat, seed: int) -> list[dict[str, Any]]:
    """Two functions that can be called with this markup."""
    spelling = (output.channels or output.tools or formats.BARE_JSON).syntax
    draw = random.Random(seed)
    if spelling.parameters is None:
        objects = [schema for schema in SCHEMAS if schema.get("type") == "object"]
        return [tool(name, draw.choice(objects)) for name in ("weather", "get.news-1")]
    known = FLAT if spelling.parameters.scalars_only else FLAT | NESTED
    if spelling.parameters.text_before is None:
        known = {name: part for name, part in known.items() if name != "short"}
    found = []
    for name in ("weather", "get_news"):
        keys = draw.sample(sorted(known), draw.randrange(5))
        found.append(tool(name, schema_of({key: known[key] for key in keys}, keys[: draw.randrange(4)])))
    return found


def said_by(
    output: OutputFormat,
    tools: list[dict[str, Any]],
    use: ToolUse,
    seed: int,
    *,
    as_text: bool = False,
    leak: bool = False,
    begun: str = "",
) -> list[OutputDelta] | None:
    """Generate and parse a random answer with this beginning; None if it does not end."""
    tokenizer, grammars = model(output, as_text=as_text)
    asked = build_tool_constraint(tools, use)
    assert asked
    tokens = tokenizer.token_bytes(tokenizer.vocab_size)
    closers = {*CLOSERS, *(text.encode() for text in markup_of(output))}
    follower = grammars.follow(asked, "")
    beginning = tokenizer.encode(begun, special=False)
    assert follower.allowed(beginning) == beginning
    for token in beginning:
        follower.advance(token)
    said, ended = walk(follower, tokens, {END}, seed, 4000, leak=leak, closers=closers)
    router = (output.for_required_call() if use.must_call else output).make_parser("", tools)
    return route(router, [begun + said.decode(errors="replace")]) if ended else None


def are_right(deltas: list[OutputDelta], tools: list[dict[str, Any]], use: ToolUse) -> bool:
    """Whether the deltas contain only valid calls and reasoning."""
    asked = build_tool_constraint(tools, use)
    assert asked
    try:
        check_tool_calls(asked, [delta.call for delta in deltas if delta.call])
    except OutputInvalid:
        return False
    return not joined(deltas)[1].strip()


def is_huge(deltas: list[OutputDelta]) -> bool:
    """Whether there is a number beyond all floats, which routers do not accept in a call."""
    return bool(HUGE.search(joined(deltas)[1]))


@pytest.mark.quick_every(11)
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_random_walks_give_valid_calls(name: str, as_text: bool) -> None:
    output, ended, use = OUTPUTS[name], 0, ToolUse(required=True)
    for seed in range(6):
        tools = tools_for(output, seed)
        deltas = said_by(output, tools, use, seed, as_text=as_text)
        if deltas and not is_huge(deltas):
            ended += 1
            assert are_right(deltas, tools, use), (deltas, tools)
    assert ended >= 2


def test_a_mask_with_one_wrong_token_is_detected() -> None:
    found = []
    for place, output in enumerate(OUTPUTS.values()):
        for seed in range(3):
            tools, use = tools_for(output, seed), ToolUse(required=True)
            deltas = said_by(output, tools, use, 100 * place + seed, leak=True)
            found += [] if deltas is None else [are_right(deltas, tools, use)]
    assert len(found) > 20 and found.count(False) > len(found) / 2


def begun(output: OutputFormat) -> str:
    """Some text, followed by the beginning of a call."""
    if output.channels:
        return output.channels.syntax.call_begin.partition("@name")[0]
    assert output.tools
    return "{" if output.tools.bare_begin else f"I say <b>. {output.tools.begin[0]}"


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("name", sorted(OUTPUTS.keys() - {"none"}))
def test_a_strict_schema_applies_once_a_call_has_started(name: str, as_text: bool) -> None:
    """The other function accepts any arguments, including those that routers cannot parse."""
    output, strict = OUTPUTS[name], 0
    for seed in range(6):
        first, second = tools_for(output, seed)
        tools = [tool("weather", first["function"]["parameters"], strict=True), second]
        deltas = said_by(output, tools, ToolUse(), seed, as_text=as_text, begun=begun(output))
        if deltas and not is_huge(deltas):
            _, content, calls = joined(deltas)
            strict += any(name == "weather" for name, _ in calls)
            assert content.strip() in ("", "I say <b>.") or "get_news" in content, deltas
            assert are_right(deltas, tools, ToolUse()) or content, deltas
    assert strict or as_text, "no call ended"


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("name", sorted(OUTPUTS.keys() - {"none"}))
def test_text_without_a_call_is_free(name: str, as_text: bool) -> None:
    output = OUTPUTS[name]
    tokenizer, grammars = model(output, as_text=as_text)
    asked = build_tool_constraint([tool("weather", schema_of({}, []), strict=True)], ToolUse())
    assert asked
    said = "Hi } é <b> {, \n\n call weather.\n"
    if output.channels:
        start, channel = "<|start|>assistant", "<|channel|>" if output.channels == formats.HARMONY else ""
        final, thought = (
            (channel + "final" * bool(channel) + "<|message|>"),
            "<|channel|>analysis" if channel else " to=self",
        )
        said = f"{thought}<|message|>Hm.{output.channels.message_ends[0]}{start}{final}{said}"
    for text in (said, said + said if not output.channels else said):
        ids = [*tokenizer.encode(text, special=False), END]
        assert grammars.follow(asked, "").allowed(ids) == ids
    wrong = [*tokenizer.encode(begun(output) + "???", special=False)]
    assert len(grammars.follow(asked, "").allowed(wrong)) < len(wrong)


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("name", sorted(OUTPUTS.keys() - {"none"}))
def test_with_a_schema_an_answer_is_calls_or_valid_json(name: str, as_text: bool) -> None:
    output = OUTPUTS[name]
    tokenizer, grammars = model(output, as_text=as_text)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    content = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema | {"additionalProperties": False}))
    tools = [tool("weather", schema_of({}, []), strict=True)]  # other arguments may be text that is no call
    asked = build_tool_constraint(tools, ToolUse(), content)
    assert asked
    if output.channels == formats.HARMONY or (output.tools and output.tools.bare_begin):
        with pytest.raises(UsageError, match="cannot be combined with a grammar"):
            grammars.compile(asked, "")
        return
    head = "<|message|>" if output.channels else ""
    for text, fits in (('{"ok": true}', True), ('{"ok": 1}', False), ("Hi", False)):
        ids = [*tokenizer.encode(head + text, special=False), END]
        assert (grammars.follow(asked, "").allowed(ids) == ids) is fits, text
    starts = begun(output).removeprefix("I say <b>. ")
    ids = tokenizer.encode(starts, special=False)
    assert grammars.follow(asked, "").allowed(ids) == ids
    wrong = [*tokenizer.encode(starts + "???", special=False)]
    assert len(grammars.follow(asked, "").allowed(wrong)) < len(wrong)
    ended = 0
    for seed in range(8):
        tokens = tokenizer.token_bytes(tokenizer.vocab_size)
        closers = {*CLOSERS, *(text.encode() for text in markup_of(output))}
        said, done = walk(grammars.follow(asked, ""), tokens, {END}, seed, 4000, closers=closers)
        if done:
            deltas = route(output.make_parser("", tools), [said.decode(errors="replace")])
            _, text, calls = joined(deltas)
            ended += 1
            assert bool(calls) != bool(text.strip()), deltas
            assert calls or json.loads(text) in ({"ok": True}, {"ok": False}), deltas
    assert ended


GEMMA, CODER = "<|tool_call>call:", "<tool_call>\n<function="
LOOP = {"$ref": "#/$defs/loop"}


@pytest.mark.parametrize(
    ("name", "changes", "fault"),
    [
        (CODER, {"minProperties": 1}, "the schema's minProperties at # is not supported in the markup"),
        (CODER, {"required": ["gone"]}, "the parameter gone is required, but is not among the properties"),
        (CODER, {"properties": {"a b": {}}}, "the parameter 'a b' cannot be written in this model's markup"),
        (CODER, {"properties": {"a": {"type": ["string", "integer"]}}}, "a may be a text of this kind or another"),
        (CODER, {"properties": {"a": {"type": ["string", "null"], "enum": ["null"]}}}, "a may be the text 'null'"),
        (
            CODER,
            {"properties": {"a": LOOP}, "$defs": {"loop": LOOP}},
            "#/.defs/loop requires itself, so that no value satisfies it",
        ),
        (GEMMA, {"properties": {"a": {"type": "array"}}}, "a may be a list or an object, which this model's"),
        ("none", {}, "this model has no markup that distinguishes a call from text; require a call"),
    ],
)
def test_a_strict_function_that_the_markup_cannot_express_is_refused(
    name: str, changes: dict[str, Any], fault: str
) -> None:
    asked = build_tool_constraint([tool("weather", schema_of({}, []) | changes, strict=True)], ToolUse())
    assert asked
    with pytest.raises(UsageError, match=fault) as refused:
        model(OUTPUTS[name])[1].compile(asked, "")
    assert str(refused.value).startswith("the function weather cannot be constrained: ") or name == "none"


def test_parameters_of_any_value_and_of_combined_schemas_and_answers_without_markup() -> None:
    tokenizer, grammars = model(OUTPUTS[CODER])
    schema = schema_of({"any": True, "count": {"allOf": [{"type": "integer"}]}}, ["any", "count"])
    asked = build_tool_constraint([tool("weather", schema)], ToolUse(required=True))
    assert asked
    for count, fits in (("7", True), ("x", False)):
        parts = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in (("any", "[x"), ("count", count))]
        ids = tokenizer.encode(f"{CODER}weather>\n{''.join(parts)}</function>\n</tool_call>", special=False)
        assert (grammars.follow(asked, "").allowed(ids) == ids) is fits
    tokenizer, grammars = model(OUTPUTS["none"])
    asked = build_tool_constraint([tool("weather", schema)], ToolUse(parallel=False))
    ids = tokenizer.encode("Any {text", special=False)
    assert asked and grammars.follow(asked, "").allowed(ids) == ids
