import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from localllm.errors import UsageError
from localllm.hub.catalog import bundled_folder, catalog
from localllm.quality.text import EVALUATION_TEXT, split_into_windows
from localllm.text.tokenizer import Tokenizer

DEMO = bundled_folder(catalog()["demo"])
assert DEMO
TEXT = EVALUATION_TEXT.read_text(encoding="utf-8")
BOS, EOS = 0, 4


@pytest.fixture
def plain() -> Tokenizer:
    """Tokenizer that adds nothing to a text."""
    return Tokenizer.from_folder(DEMO)


@pytest.fixture
def framed(tmp_path: Path) -> Tokenizer:
    """Tokenizer that adds BOS before and EOS after a text."""
    source = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    bos, eos = source.id_to_token(BOS), source.id_to_token(EOS)
    source.post_processor = TemplateProcessing(f"{bos} $A {eos}", special_tokens=[(bos, BOS), (eos, EOS)])
    source.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.from_folder(tmp_path)


def as_llama_cpp(stream: list[int], size: int, bos: int | None) -> list[tuple[int, ...]]:
    """Split like tools/perplexity/perplexity.cpp: complete chunks of the text, with their first token replaced by
    BOS.
    """
    chunks = []
    for chunk in range(len(stream) // size):
        tokens = stream[chunk * size : (chunk + 1) * size]
        if bos is not None:
            tokens[0] = bos
        chunks.append(tuple(tokens))
    return chunks


def test_windows_are_those_of_llama_cpp_and_the_rest(plain: Tokenizer, framed: Tokenizer) -> None:
    ids = plain.encode(TEXT)
    found = split_into_windows(TEXT, plain, window=100)
    assert [*found.ids[:-1]] == as_llama_cpp(ids, 100, None)
    assert [token for window in found.ids for token in window] == ids
    assert (found.tokens, found.scored) == (len(ids), len(ids) - len(found.ids))
    found = split_into_windows(TEXT, framed, window=100)
    assert [*found.ids[:-1]] == as_llama_cpp([BOS, *ids], 100, BOS)
    assert all(window[0] == BOS for window in found.ids)
    assert found.ids[-1][-1] == ids[-1] != EOS
    assert found.tokens == len(ids) + 1


def test_as_many_tokens_are_scored_as_by_llama_cpp(plain: Tokenizer) -> None:
    """Scores n_ctx - n_ctx / 2 - 1 tokens of each complete chunk."""
    found = split_into_windows(TEXT, plain, window=100, max_tokens=1000, first_scored=51)
    assert found.scored == 10 * (100 - 50 - 1)


def test_no_more_tokens_than_requested(plain: Tokenizer, framed: Tokenizer) -> None:
    for tokenizer in (plain, framed):
        found = split_into_windows(TEXT, tokenizer, window=64, max_tokens=150)
        assert [len(window) for window in found.ids] == [64, 64, 22]
        assert (
            split_into_windows(TEXT, tokenizer, window=64, max_tokens=129).tokens == 128
        )  # one token alone tells nothing


def test_a_text_that_is_too_short_is_refused_with_numbers(plain: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"the text has \d+ tokens, of which \d+ would be .*; at least 64 are"):
        split_into_windows("Once upon a time.", plain)
    with pytest.raises(UsageError, match="the text has 0 tokens"):
        split_into_windows("", plain)
    with pytest.raises(UsageError, match=r"of which 19 would be scored in windows of 512 and 20 tokens in all"):
        split_into_windows(TEXT, plain, max_tokens=20)
    with pytest.raises(UsageError, match="a window of 1 tokens is too small; use one of 2 or more"):
        split_into_windows(TEXT, plain, window=1)


def test_the_evaluation_text_is_enough_for_every_vocabulary(plain: Tokenizer) -> None:
    assert 9_000 < len(TEXT) < 12_000
    assert split_into_windows(TEXT, plain).scored > 2_000
    assert json.loads(next(line for line in TEXT.splitlines() if line.startswith("{")))
