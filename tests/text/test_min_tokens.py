"""No text of a real tokenizer has fewer tokens than the bound from its length."""

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from localllm.checkpoint.gguf.header import read_gguf
from localllm.hub.resolve import resolve_model
from localllm.text.bounds import TokenCountBound
from localllm.text.control import ChatPiece, RenderedChat
from localllm.text.sentencepiece_model import read_sentencepiece_model
from localllm.text.tokenizer import Tokenizer
from tests.shared import shared
from tests.text.vocabularies import random_texts

FOLDERS = ("tokenizers/qwen3", "tokenizers/phi-3-mini", "llama3.2-bpe", "stories260K", "TinyStories-656K-hf")
FILES = (
    *(f"vocabs/ggml-vocab-{name}.gguf" for name in ("llama-spm", "phi-3", "gpt-2", "deepseek-coder")),
    *("stories260K-f32.gguf", "llama3.2-bpe/vocab.gguf"),
)
REAL = ("demo", *FOLDERS, *FILES, "llama2-tokenizer.model")
# What normalizers compose or put ASCII for, what vocabularies lack, and what added tokens swallow.
STRANGE = [
    *(
        "e\u0301",
        "\u1100\u1161\u11a8",
        "\u03b1\u0313\u0300\u0345",
        "\u212a",
        "\u037e",
        "\u2126",
        "\ufb03",
        "\u0130",
    ),
    *("\U0001f9a5", "\u2581", "\ufdfa", "\u00ad", "\x00", "\r\n", "\t", " " * 60, "\n" * 40, "-" * 90, "=" * 70),
    *("<|end|>", "</s>", "<|im_start|>", "<|endoftext|>  ", "    </s>   "),
]


@cache
def tokenizer(name: str) -> Tokenizer:
    if name == "demo":
        return Tokenizer.from_folder(Path(resolve_model(name).path))
    path = shared(name)
    if path.is_dir():
        return Tokenizer.from_folder(path)
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(read_gguf(path).metadata, path)
    return Tokenizer(read_sentencepiece_model(path))


def hard_texts(of: Tokenizer, seed: int, count: int) -> list[str]:
    """Texts of the longest tokens, of unusual characters, and of mixtures."""
    rng = random.Random(seed)
    written = [of.decode([index], skip_special=False) for index in range(of.vocab_size)]
    longest = sorted(written, key=len)[-40:]
    wordy = sorted(written, key=lambda text: sum(map(str.isalnum, text)))[-40:]
    sources = [longest, wordy, STRANGE, [*longest, *STRANGE], [*wordy, *STRANGE, " ", "a"]]
    texts = []
    for _ in range(count):
        source = rng.choice(sources)
        pieces = rng.choices(source, k=rng.randrange(1, 30)) if rng.random() < 0.7 else [rng.choice(source)] * 20
        texts.append(rng.choice(["", " "]).join(pieces))
    return texts


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("name", REAL)
def test_no_text_has_fewer_tokens_than_its_length_says(name: str) -> None:
    of = tokenizer(name)
    for text in (*hard_texts(of, 7, 400), *random_texts(3, 400)):
        least = of._fewest.min_tokens(text)
        assert least <= len(of.encode(text, special=False))
        assert least <= len(of.encode_chat(RenderedChat((ChatPiece(text),))))
        halves = RenderedChat(
            (ChatPiece(text[: len(text) // 2]), ChatPiece(text[len(text) // 2 :], literal=False))
        )
        assert least <= len(of.encode_chat(halves))


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("name", REAL)
def test_something_is_known_of_real_tokenizers_and_no_more_than_is_true(name: str) -> None:
    of, known = tokenizer(name), tokenizer(name)._fewest
    assert known.max_letters
    texts = hard_texts(of, 11, 600)
    for field in ("max_characters", "max_letters"):
        if found := getattr(known, field):
            bolder = replace(known, **{field: max(1, found // 3)})
            assert any(bolder.min_tokens(text) > len(of.encode(text, special=False)) for text in texts)


def made(model: models.Model, normalizer=None, pre_tokenizer=None, added=()) -> TokenCountBound:
    backend = tokenizers.Tokenizer(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    backend.add_tokens(list(added))
    return TokenCountBound.from_tokenizer(backend, list(backend.get_vocab()))


LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
VOCABULARY = {token: index for index, token in enumerate(["?", "ab", *LETTERS])}


def bpe(**settings) -> models.BPE:
    return models.BPE(VOCABULARY, [("a", "b")], unk_token="?", **settings)


def test_unbounded_normalizers_give_no_minimum() -> None:
    assert made(bpe()) == TokenCountBound(2, 2, False)
    assert made(bpe(), normalizers.NFKC()) == TokenCountBound(2, 2, True)
    assert made(bpe(), added=[AddedToken("abcde", lstrip=True)]) == TokenCountBound(None, 5, False)
    assert made(bpe(fuse_unk=True)) == TokenCountBound(None, 2, False)
    assert made(models.BPE(VOCABULARY, [])) == TokenCountBound(None, 2, False)  # what it does not know is left out
    nothing = TokenCountBound(None, None, False)
    assert made(bpe(), normalizers.Strip()) == nothing
    assert made(bpe(), normalizers.Replace("a", "")) == nothing
    assert made(bpe(), normalizers.Replace(tokenizers.Regex("a+"), "a")) == nothing
    assert made(bpe(), normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])) == nothing
    assert made(bpe(), None, pre_tokenizers.WhitespaceSplit()) == nothing
    assert made(bpe(), None, pre_tokenizers.Split("a", "removed")) == nothing
    assert made(bpe(end_of_word_suffix="</w>")) == nothing
    assert made(models.BPE({"?": 0, "b": 1}, [], unk_token="?", fuse_unk=True)) == nothing
    assert made(models.WordPiece(VOCABULARY, unk_token="?")) == nothing


def test_texts_that_may_well_fit_are_not_measured() -> None:
    of = tokenizer("demo")
    assert of.min_token_count("word " * 100, 125) == 0
    assert of.min_token_count("word " * 100, 10) > 10
