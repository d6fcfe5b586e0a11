import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llguidance
import numpy as np
import pytest
import tokenizers

from localllm.request import Grammar, GrammarKind
from localllm.text.backends import byte_alphabet
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.grammar.follow import GrammarFollower
from localllm.text.tokenizer import Tokenizer
from localllm.text.vocabulary import TokenizerDescription
from tests.text.grammar.conftest import grammars_of
from tests.text.grammar.walk import allowed_now, bits

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))


def choice(*texts: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(texts))


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_continuation(text)


def test_masks_after_drafts_equal_those_after_tokens(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    said = spelled(tokenizer, '{"name": "Bo", "age": 12}')
    together, alone = grammars.follow(PERSON), grammars.follow(PERSON)
    for start in range(0, len(said), 4):
        drafts = said[start : start + 4]
        masks = together.begin(drafts)()
        assert len(masks) == 1 + len(drafts)
        for mask, token in zip(masks, drafts, strict=False):
            assert (bits(mask) == allowed_now(alone)).all()
            alone.advance(token)
            together.advance(token)
        assert (bits(masks[-1]) == allowed_now(alone)).all()
    assert together.finished and alone.finished


def test_a_forbidden_draft_ends_the_masks_and_changes_nothing(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    follower = grammars.follow(PERSON)
    good, bad = spelled(tokenizer, '{"name'), spelled(tokenizer, "Once upon a time")
    before = allowed_now(follower)
    masks = follower.begin([*good, *bad])()
    assert all(mask is not None for mask in masks[: len(good) + 1])
    assert all(mask is None for mask in masks[len(good) + 1 :])
    assert (allowed_now(follower) == before).all()
    assert follower.allowed([*good, *bad]) == good
    assert follower.allowed(bad) == []


def test_forced_tokens_are_predicted_in_the_tokenizers_spelling(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    follower = grammars.follow(choice("Once upon a time", "Once upon a day"))
    forced = follower.forced(100)
    assert tokenizer.decode(forced) == "Once upon a"
    assert forced == spelled(tokenizer, "Once upon a")
    assert follower.forced(1) == forced[:1]
    assert follower.allowed(forced) == forced
    free = grammars.follow(Grammar(GrammarKind.REGEX, "[a-z]+"))
    assert free.forced(100) == []


def test_an_end_token_may_come_exactly_where_the_text_may_end(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    [end] = tokenizer.eos_ids
    follower = grammars.follow(choice("a", "ab"))
    assert not allowed_now(follower)[end]
    follower.advance(*spelled(tokenizer, "a"))
    assert allowed_now(follower)[end] and not follower.finished
    follower.advance(*spelled(tokenizer, "b"))
    assert follower.finished
    assert allowed_now(follower).nonzero()[0].tolist() == [end]


@pytest.mark.parametrize("padding", [0, 1, 17, 64])
def test_rows_of_the_model_that_no_token_has_may_never_come(tokenizer: Tokenizer, padding: int) -> None:
    size = tokenizer.vocab_size + padding
    follower = grammars_of(tokenizer, size).follow(Grammar(GrammarKind.REGEX, r"(?s:.*)"))
    mask = follower.begin([])()[0]
    assert mask is not None and mask.dtype == np.int32 and len(mask) == -(-size // 32)
    assert bits(mask)[: tokenizer.vocab_size].sum() > tokenizer.vocab_size * 0.9
    assert not bits(mask)[tokenizer.vocab_size :].any()


def test_a_model_may_know_fewer_tokens_than_its_tokenizer(tokenizer: Tokenizer) -> None:
    mask = grammars_of(tokenizer, 1001).follow(Grammar(GrammarKind.REGEX, r"(?s:.*)")).begin([])()[0]
    assert mask is not None and len(mask) == 32
    assert not bits(mask)[1001:].any()


def test_control_tokens_never_come_as_text(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for grammar in (Grammar(GrammarKind.REGEX, r"(?s:.*)"), Grammar(GrammarKind.LARK, "start: /(?s:.*)/")):
        allowed = allowed_now(grammars.follow(grammar))
        markup = [index for index in tokenizer.special_ids if index not in tokenizer.eos_ids]
        assert markup and not allowed[markup].any()
    follower = grammars.follow(choice("<|user|>"))  # spelled out, it is a text like any other
    while not follower.finished:
        token = int(allowed_now(follower).argmax())
        assert token not in markup
        follower.advance(token)


def test_without_an_end_token_an_answer_ends_where_nothing_may_follow() -> None:
    alphabet = byte_alphabet().values()
    words = {letter: index for index, letter in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(TokenizerDescription(Path("none"), backend, {}, {}, ()))
    follower = grammars_of(tokenizer).follow(choice("yes", "no"))
    allowed = allowed_now(follower)
    assert len(allowed) == 256 and allowed.sum() == 2
    follower.advance(words["n"])
    follower.advance(words["o"])
    assert follower.finished


def test_an_exhausted_grammar_allows_nothing_and_reports_the_reason() -> None:
    """The first bytes of this grammar are cheap, but the next one is not."""
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_regex("(a{1000}){1000}")
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
    follower = GrammarFollower(matcher, tokenizer.vocab_size, tokenizer.vocab_size, ThreadPoolExecutor(1))
    assert allowed_now(follower).any() and follower.fault is None
    follower.advance(ord("a"))
    assert not allowed_now(follower).any()
    assert "cannot be followed further" in str(follower.fault)
    assert not follower.finished


def test_answers_are_followed_apart(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    first, second = grammars.follow(PERSON), grammars.follow(PERSON)
    waiting = [follower.begin([]) for follower in (first, second)]
    first.advance(*spelled(tokenizer, "{"))
    assert waiting[1]()[0] is not None
    assert not (allowed_now(first) == allowed_now(second)).all()
