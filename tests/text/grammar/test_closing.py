"""Answers close before their limit, and unmentioned properties are not started."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm
from localllm import LLM, SamplingParams
from localllm.request import FinishReason, Grammar, GrammarKind
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.grammar.schema import close_objects
from localllm.text.tokenizer import Tokenizer
from tests.scripted import write_scripted
from tests.text.grammar.schemas import SCHEMAS
from tests.text.grammar.test_schemas import satisfies
from tests.text.grammar.walk import allowed_now, walk

ENDLESS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"k": {"type": "string"}, "v": {"type": "number"}},
                "required": ["k", "v"],
            },
        },
        "note": {"type": "string"},
    },
    "required": ["name", "tags"],
}
HELLO = [{"role": "user", "content": "Who came?"}]


def grammar_of(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("limit", [30, 47, 64, 120])
def test_every_answer_ends_within_the_limit(grammars: GrammarCompiler, tokenizer: Tokenizer, limit: int) -> None:
    tokens, ends = tokenizer.token_bytes(tokenizer.vocab_size), set(tokenizer.eos_ids)
    cut = 0
    for seed in range(25):
        follower = grammars.follow(grammar_of(ENDLESS), None, limit)
        text, ended = walk(follower, tokens, ends, seed, limit, closers=())
        assert ended or follower.finished, text
        assert satisfies(text, ENDLESS)
        cut += follower.cut
    assert cut > 15


def test_schemas_of_all_kinds_end_within_a_few_hundred_tokens(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    tokens, ends = tokenizer.token_bytes(tokenizer.vocab_size), set(tokenizer.eos_ids)
    closed = 0
    for seed, schema in enumerate(SCHEMAS[::8]):
        follower = grammars.follow(grammar_of(schema), None, 400)
        text, ended = walk(follower, tokens, ends, seed, 400, closers=())
        closed += (ended or follower.finished) and satisfies(text, schema)
    assert closed >= 0.95 * len(SCHEMAS[::8])


def test_where_it_is_closed_does_not_depend_on_drafts(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    random = np.random.default_rng(3)
    alone, together = (grammars.follow(grammar_of(ENDLESS), None, 60) for _ in range(2))
    said: list[int] = []
    while not alone.finished:
        said.append(int(random.choice(np.flatnonzero(allowed_now(alone)))))
        if said[-1] in tokenizer.eos_ids:
            said.pop()
            break
        alone.advance(said[-1])
    assert alone.cut
    at = 0
    while at < len(said):
        drafts = said[at : at + int(random.integers(1, 7))]
        masks = together.begin(drafts)()
        assert masks[len(drafts)] is not None
        for token in drafts:
            together.advance(token)
        at += len(drafts)
    assert together.cut and together.forced(3) == []


@pytest.mark.parametrize("draft", ["lookup", "off"])
def test_a_closed_answer_is_reported_as_truncated(draft: str) -> None:
    with localllm.load("demo", device="cpu", draft=draft) as llm:
        reasons = []
        for seed in range(4):
            params = SamplingParams(temperature=1, seed=seed, max_tokens=50, grammar=grammar_of(ENDLESS))
            done = llm.chat(HELLO, params)
            assert satisfies(done.text.encode(), ENDLESS)
            assert len(done.token_ids) <= 50
            reasons.append(done.finish_reason)
    assert reasons.count(FinishReason.LENGTH) >= 3


def test_unmentioned_properties_are_not_generated(stories: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}}}
    done = stories.generate("Once", SamplingParams(temperature=0, max_tokens=200, grammar=grammar_of(schema)))
    assert done.finish_reason is FinishReason.STOP and json.loads(done.text).keys() <= {"a", "b"}


@pytest.fixture(scope="module")
def stories() -> Any:
    with localllm.load("demo", device="cpu") as llm:
        yield llm


def test_thoughts_end_early_enough_for_the_answer(tmp_path: Path) -> None:
    """The model repeats the same reasoning."""
    folder = write_scripted(tmp_path / "m", ("<think>", "hm", " so"), special=())
    schema = {"type": "object", "properties": {"ok": {"enum": [True]}}, "required": ["ok"]}
    with localllm.load(folder, device="cpu") as llm:
        bias = dict.fromkeys(llm.eos_ids, -100.0)
        params = SamplingParams(temperature=0, max_tokens=60, grammar=grammar_of(schema), logit_bias=bias)
        done = llm.chat(HELLO, params)
    assert done.reasoning.startswith("hm so") and json.loads(done.text) == {"ok": True}
    assert done.finish_reason is FinishReason.LENGTH


A, B = ({"type": "object", "properties": {name: {}}} for name in "ab")
CLOSED_A = A | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED_A),
        (A | {"additionalProperties": True}, None),
        (A | {"additionalProperties": {"type": "string"}}, None),
        (A | {"patternProperties": {"^x": {}}}, None),
        (A | {"required": ["b"]}, None),
        (A | {"minProperties": 2}, None),
        ({"type": "object"}, None),
        ({"type": "array", "items": A}, {"type": "array", "items": CLOSED_A}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"allOf": [A, B]}, None),
        (A | {"anyOf": [B, {"required": ["a"]}]}, None),
        ({"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}}, None),
        (B | {"$ref": "#/$defs/a", "$defs": {"a": A}}, None),
        (
            {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": A}},
            {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": CLOSED_A}, "additionalProperties": False},
        ),
    ],
)
def test_objects_are_closed_unless_the_schema_speaks_of_more(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert close_objects(schema) == (expected or schema)
    assert json.dumps(schema) == before
