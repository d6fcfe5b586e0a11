import json
from decimal import localcontext
from typing import Any

import jsonschema
import pytest

from localllm.request import Grammar
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.grammar.result import check_content, parse_exact_number
from localllm.text.tokenizer import Tokenizer
from tests.shared import shared
from tests.text.grammar.conftest import grammars_of
from tests.text.grammar.schemas import COUNT, SCHEMAS, Schema
from tests.text.grammar.walk import walk


def satisfies(text: bytes, schema: Schema) -> bool:
    """Whether the text is valid according to `jsonschema`."""
    try:
        value: Any = json.loads(text, parse_float=parse_exact_number)
    except ValueError:
        return False
    schema = json.loads(json.dumps(schema), parse_float=parse_exact_number)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    with localcontext(prec=1000):
        return kind(schema).is_valid(value)


def follow(
    grammars: GrammarCompiler, tokenizer: Tokenizer, schemas: list[Schema], *, leak: bool = False
) -> list[bool]:
    """For each schema whose text ended: whether the text is valid."""
    tokens, ends = tokenizer.token_bytes(tokenizer.vocab_size), set(tokenizer.eos_ids)
    found = []
    for seed, schema in enumerate(schemas):
        grammar = Grammar("json_schema", json.dumps(schema))
        text, ended = walk(grammars.follow(grammar), tokens, ends, seed, leak=leak)
        if ended:
            found.append(satisfies(text, schema))
            if found[-1]:
                check_content(grammar, text.decode())
    return found


def test_three_hundred_distinct_schemas() -> None:
    assert len(SCHEMAS) == COUNT
    assert len({json.dumps(schema) for schema in SCHEMAS}) > COUNT * 0.97


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("start", range(6))
def test_random_walks_satisfy_the_schema(grammars: GrammarCompiler, tokenizer: Tokenizer, start: int) -> None:
    schemas = SCHEMAS[start::6]
    found = follow(grammars, tokenizer, schemas)
    assert all(found) and len(found) >= len(schemas) * 0.95


def test_a_mask_with_one_wrong_token_is_detected(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    found = follow(grammars, tokenizer, SCHEMAS[:60], leak=True)
    assert len(found) > 50 and found.count(False) > len(found) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stories260K", "llama3.2-bpe"])
def test_so_it_is_with_byte_fallback_and_with_a_large_vocabulary(name: str) -> None:
    tokenizer = Tokenizer.from_folder(shared(name))
    schemas = SCHEMAS[::10]
    found = follow(grammars_of(tokenizer), tokenizer, schemas)
    assert all(found) and len(found) >= len(schemas) * 0.9
