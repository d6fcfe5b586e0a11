import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest

from localllm.checkpoint.gguf.header import read_gguf
from localllm.errors import DamagedModel, LocalLLMError, UnsupportedModel, UsageError
from localllm.text.control import ChatPiece, RenderedChat
from localllm.text.tokenizer import Tokenizer
from tests.shared import shared
from tests.text.vocabularies import as_metadata, digest, random_texts

Open = Callable[[str], Tokenizer]
FILE = Path("model.gguf")
FILES = {
    "llama-spm": "vocabs/ggml-vocab-llama-spm.gguf",
    "phi3": "vocabs/ggml-vocab-phi-3.gguf",
    "gpt-2": "vocabs/ggml-vocab-gpt-2.gguf",
    "deepseek-coder": "vocabs/ggml-vocab-deepseek-coder.gguf",
    "stories260K": "stories260K-f32.gguf",
    "llama3": "llama3.2-bpe/vocab.gguf",
}
SENTENCEPIECE = ("llama-spm", "phi3", "stories260K")
TEXTS = random_texts(20261121, 2000)
SOME = TEXTS[::4]


@pytest.fixture(scope="module")
def metadata() -> Callable[[str], dict[str, Any]]:
    """Copy of a file's metadata, in which tests may change keys."""
    read: dict[str, Mapping[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        if name not in read:
            read[name] = read_gguf(shared(FILES[name])).metadata
        return dict(read[name])

    return of


@pytest.fixture(scope="module")
def gguf(metadata: Callable[[str], dict[str, Any]]) -> Open:
    built: dict[str, Tokenizer] = {}

    def of(name: str) -> Tokenizer:
        if name not in built:
            built[name] = Tokenizer.from_gguf(metadata(name), FILE)
        return built[name]

    return of


@pytest.mark.parametrize("name", ["llama-spm", "phi3", "gpt-2", "deepseek-coder"])
def test_ids_are_those_that_llama_cpp_expects(gguf: Open, name: str):
    file = shared(FILES[name])
    texts = file.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = file.with_suffix(".gguf.out").read_text().splitlines()
    assert len(lines) == 46
    for text, line in zip(texts, lines, strict=False):  # the texts end with a separator
        assert gguf(name).encode(text, special=False) == [int(token) for token in line.split()], text


@pytest.mark.parametrize(
    ("name", "file"),
    [("stories260K", "stories260K/expected-tokens.json"), ("llama3", "llama3.2-bpe/expected.json")],
)
def test_ids_are_those_of_llama_cpp(gguf: Open, name: str, file: str):
    begin = [] if name == "stories260K" else [128000]  # llama.cpp was asked for Llama 3 without its BOS
    for case in json.loads(shared(file).read_text()):
        assert gguf(name).encode(case["text"]) == begin + case["ids"], case["text"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-spm", "9cf1a33e315fa851"),
        ("phi3", "9cf1a33e315fa851"),
        ("gpt-2", "53222e1e31654e8a"),
        ("deepseek-coder", "a5e42c5b8dc5f97f"),
        ("stories260K", "cf947e52021baac3"),
        ("llama3", "41c745dfec98f66b"),
    ],
)
def test_ids_of_random_texts_are_those_of_llama_cpp(gguf: Open, name: str, expected: str):
    """Expected ids are from llama-cpp-python 0.3.36."""
    assert digest([gguf(name).encode(text, special=False) for text in TEXTS]) == expected


@pytest.mark.parametrize("name", ["stories260K", "llama3", "phi3"])
def test_both_editions_of_a_tokenizer_agree_on_random_texts(gguf: Open, tokenizer: Open, name: str):
    draw = random.Random(3)
    literals = sorted(gguf(name).added_tokens & tokenizer(name).added_tokens)
    for text in SOME:
        with_literals = text[:5] + draw.choice(literals) + text[5:] + draw.choice(literals)
        for given in (text, with_literals):
            ids = tokenizer(name).encode(given, special=False)
            assert gguf(name).encode(given, special=False) == ids, given
            assert gguf(name).decode(ids) == tokenizer(name).decode(ids)


def test_without_a_normalizer_text_is_unchanged(tokenizer: Open, folder: Callable[[str], Path]):
    ours = Tokenizer.from_gguf(as_metadata(folder("qwen3"), "qwen2"), FILE)
    changed = 0
    for text in SOME:
        composed = normalize("NFC", text)
        ids, theirs = ours.encode(text), tokenizer("qwen3").encode(text)
        assert ours.encode(composed) == theirs, text
        assert ours.decode(ids) == text
        assert ours.decode(theirs) == tokenizer("qwen3").decode(theirs) == composed
        changed += ids != theirs
    assert changed > 5


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("name", FILES)
def test_random_texts_come_back(gguf: Open, name: str):
    for text in SOME:
        # SentencePiece writes a space as U+2581, and cannot tell which of them a text had.
        expected = text.replace("\u2581", " ") if name in SENTENCEPIECE else text
        assert gguf(name).decode(gguf(name).encode(text)) == expected


@pytest.mark.parametrize("name", FILES)
def test_control_tokens_in_a_text_are_control_ids_and_in_a_message_are_text(gguf: Open, name: str):
    tokenizer = gguf(name)
    for literal in sorted(tokenizer.control_tokens)[:20]:
        [token] = tokenizer.encode(literal, special=False)
        assert tokenizer.decode([token]) == ""
        assert tokenizer.decode([token], skip_special=False) == literal
        written = tokenizer.encode_chat(RenderedChat((ChatPiece("a"), ChatPiece(literal, literal=True))))
        assert token not in written
        assert tokenizer.decode(written) == f"a{literal}"


@pytest.mark.parametrize(
    ("name", "pre", "begin"), [("llama-spm", "default", [1]), ("gpt-2", "gpt-2", []), ("gpt-2", "llama3", [50256])]
)
def test_tokens_around_a_text_are_put_once(
    metadata: Callable[[str], dict[str, Any]], name: str, pre: str, begin: list[int]
):
    fields = metadata(name) | {"tokenizer.ggml.pre": pre}
    fields.pop("tokenizer.ggml.add_bos_token", None)
    tokenizer = Tokenizer.from_gguf(fields, FILE)
    plain = tokenizer.encode("hi", special=False)
    assert tokenizer.encode("hi") == begin + plain
    assert tokenizer.encode("") == begin
    fields |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer.from_gguf(fields, FILE)
    bos, eos = (fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos"))
    assert tokenizer.encode("hi") == [bos, *plain, eos]
    chat = RenderedChat((ChatPiece(f"{tokenizer.special_tokens['bos_token']}hi"),))
    assert tokenizer.encode_chat(chat) == [bos, *plain]


# What follows is about a small vocabulary of each kind, in which a test can see everything.


def sentencepiece(**keys: Any) -> dict[str, Any]:
    """Vocabulary of byte tokens, letters, `ab`, `abc` and `▁ab`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "c", "ab", "abc", "▁ab"]
    fields = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * 7],
        "scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -1.0],
    }
    return {
        f"tokenizer.{name}" if "chat" in name else f"tokenizer.ggml.{name}": v
        for name, v in (fields | keys).items()
    }


def byte_level(**keys: Any) -> dict[str, Any]:
    """Vocabulary of the visible letters of ASCII, the space, `ab` and `<|im_end|>`."""
    tokens = [*map(chr, range(33, 127)), "Ġ", "ab", "<|im_end|>"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 96 + [3],
        "merges": ["a b"],
        "eos_token_id": 96,
    }
    return {
        f"tokenizer.{name}" if "chat" in name else f"tokenizer.ggml.{name}": v
        for name, v in (fields | keys).items()
    }


def test_scores_order_the_merges():
    tokenizer = Tokenizer.from_gguf(sentencepiece(), FILE)
    [ab, abc, space_ab] = (tokenizer.encode(text, special=False) for text in ("xab", "xabc", "ab"))
    assert ab[-1:] == [263]
    assert abc[-1:] == [264]  # by way of `ab`
    assert space_ab == [265]
    without = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False), FILE)
    assert without.encode("ab", special=False) == [263]
    assert without.decode([259, 263]) == " ab"


def test_a_file_without_a_pre_tokenizer_gets_the_default_of_llama_cpp(
    metadata: Callable[[str], dict[str, Any]],
):
    fields = metadata("gpt-2")
    del fields["tokenizer.ggml.pre"]
    tokenizer = Tokenizer.from_gguf(fields, FILE)
    for text, ids in {
        "Hello, y'all! 12345 (x+=1)~~": [
            15496,
            11,
            331,
            6,
            439,
            0,
            220,
            10163,
            2231,
            220,
            7,
            87,
            47932,
            16,
            8,
            4907,
        ],
        "  $3.14 == `a`|b": [220, 220, 3, 18, 13, 1415, 220, 855, 4600, 64, 63, 91, 65],
        "日本語 2024年": [33768, 98, 17312, 105, 45739, 252, 220, 19004, 19, 33176, 112],
    }.items():
        assert tokenizer.encode(text) == ids, text  # llama.cpp's own


def test_unsupported_tokenizers_list_supported_ones():
    with pytest.raises(
        UnsupportedModel, match=r"model\.gguf names the pre-tokenizer 'superbpe'; these are supported: .*qwen2"
    ):
        Tokenizer.from_gguf(byte_level(pre="superbpe"), FILE)
    with pytest.raises(UnsupportedModel, match=r"model\.gguf has type 'rwkv'; .* llama, gpt2"):
        Tokenizer.from_gguf(byte_level(model="rwkv"), FILE)


def test_without_byte_tokens_a_character_is_unknown():
    fields = sentencepiece()
    keep = [i for i, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind != 6]
    for name in ("tokens", "token_type", "scores"):
        fields[f"tokenizer.ggml.{name}"] = [fields[f"tokenizer.ggml.{name}"][i] for i in keep]
    tokenizer = Tokenizer.from_gguf(fields, FILE)
    assert tokenizer.encode("abééab", special=False) == [9, 0, 7]  # a run of them is one, as in SentencePiece
    assert tokenizer.decode([9, 0, 7]) == "abab"


def test_a_byte_that_cannot_be_written_is_unknown_or_refused_but_never_left_out():
    tokenizer = Tokenizer.from_gguf(byte_level(), FILE)
    assert tokenizer.vocab_size == 97
    assert tokenizer.decode(tokenizer.encode("ab c")) == "ab c"
    assert tokenizer.decode([*tokenizer.encode("ab"), 97, 98]) == "ab"  # which are no tokens
    with pytest.raises(UsageError, match="cannot encode"):
        tokenizer.encode("aé")
    with pytest.raises(UsageError, match="cannot encode"):
        Tokenizer.from_gguf(byte_level(unknown_token_id=96), FILE).encode("aé")  # no end amid a text
    fields = sentencepiece(unknown_token_id=2)
    fields["tokenizer.ggml.tokens"] = [
        "<0x>" if token == "<0xC3>" else token for token in fields["tokenizer.ggml.tokens"]
    ]
    with pytest.raises(UsageError, match="cannot encode"):
        Tokenizer.from_gguf(fields, FILE).encode("a\u00e9")
    unknown = Tokenizer.from_gguf(byte_level(unknown_token_id=0), FILE)
    assert unknown.encode("aé") == [64, 0, 0]


def test_a_token_that_is_there_twice_is_written_once_and_read_twice():
    fields = byte_level()
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "ab", "", ""]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 1, 1, 1]
    tokenizer = Tokenizer.from_gguf(fields, FILE)
    assert tokenizer.encode("ab") == [95]
    assert tokenizer.decode([97, 98, 95, 99]) == "abab"


def test_a_letter_among_the_added_tokens_comes_back():
    fields = byte_level()
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "ù", "Ã", "¹"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 4, 1, 1]
    tokenizer = Tokenizer.from_gguf(fields, FILE)
    assert tokenizer.encode("aù") == [64, 97]
    assert tokenizer.decode([64, 97]) == "aù"


def test_the_tokens_that_end_an_answer_are_found():
    assert Tokenizer.from_gguf(byte_level(), FILE).eos_ids == (96,)
    assert Tokenizer.from_gguf(byte_level(eos_token_id=0), FILE).eos_ids == (0, 96)
    assert Tokenizer.from_gguf(byte_level(eot_token_id=1, eom_token_id=2), FILE).eos_ids == (96, 1, 2)
    mistyped = Tokenizer.from_gguf(byte_level(token_type=[1] * 97), FILE)
    assert mistyped.encode("<|im_end|>") == [96]
    assert mistyped.control_tokens == {"<|im_end|>"}
    fields = byte_level(token_type=[1] * 96 + [3] * 4)
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "<|return|>", "<|call|>", "<|end|>"]
    assert Tokenizer.from_gguf(fields, FILE).eos_ids == (96, 97, 98)  # gpt-oss goes on after <|end|>
    named = fields | {"tokenizer.ggml.eot_token_id": 99}
    assert Tokenizer.from_gguf(named, FILE).eos_ids == (96, 97, 98)


def test_missing_ids_are_those_of_llama_cpp_where_they_are_control_tokens():
    fields = sentencepiece()
    assert Tokenizer.from_gguf(fields, FILE).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    fields = byte_level(padding_token_id=2**32 - 1)
    del fields["tokenizer.ggml.eos_token_id"]
    tokenizer = Tokenizer.from_gguf(fields, FILE)
    assert (tokenizer.special_tokens, tokenizer.eos_ids) == ({}, (96,))  # token 11 is a comma here
    fields["tokenizer.ggml.token_type"] = [3 if i == 11 else 1 for i in range(97)]
    assert Tokenizer.from_gguf(fields, FILE).eos_ids == (11, 96)


def test_chat_templates_have_names():
    assert Tokenizer.from_gguf(byte_level(), FILE).chat_templates == {}
    templates = {"chat_template": "one", "chat_templates": ["tool_use"], "chat_template.tool_use": "two"}
    found = Tokenizer.from_gguf(byte_level(**templates), FILE).chat_templates
    assert found == {"default": "one", "tool_use": "two"}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (byte_level(token_type=[1] * 96), "97 tokens, types for 96"),
        (byte_level(token_type=[1] * 96 + [7]), "type that does not exist"),
        (byte_level(token_type=[1.0] * 97), "not a list of int"),
        (byte_level(tokens=[]), "empty"),
        (byte_level(tokens="abc"), "not a list of str"),
        (byte_level(tokens=["a" * 2000] * 97), "longer than"),
        (byte_level(merges=["ab"]), "merges that are not two tokens"),
        (byte_level(merges=["ab "]), "merges that are not two tokens"),
        (byte_level(merges=["a zz"]), "zz"),
        (byte_level(eos_token_id=97), "eos_token_id is 97, but there are 97 tokens"),
        (byte_level(eos_token_id=-1), "eos_token_id is -1"),
        (byte_level(eos_token_id="1"), "is not of type int"),
        (byte_level(add_bos_token=1), "is not of type bool"),
        (byte_level(add_bos_token=True), "there is no such token"),
        (byte_level(chat_templates=["x"]), "chat_template.x is missing"),
        (byte_level(chat_template=7), "is not of type str"),
        (byte_level(tokens=["\ud800", *"b" * 96]), "surrogate"),
        (sentencepiece(scores=[0.0]), "scores for 1"),
        (sentencepiece(scores=[float("nan")] * 266), "scores that are not finite"),
        (sentencepiece(model="t5", precompiled_charsmap=[255, 255, 255, 255]), "table of characters"),
        (sentencepiece(model="t5", precompiled_charsmap=[4000]), "not made of bytes"),
        ({}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.tokens is missing"),
    ],
)
def test_metadata_that_contradicts_itself_is_damage(fields: dict[str, Any], why: str):
    with pytest.raises(DamagedModel, match=rf"model\.gguf.*{why}"):
        Tokenizer.from_gguf(fields, FILE)


def test_mutated_metadata_ends_in_an_error_of_ours_or_works():
    draw = random.Random(7)
    odd = [
        0,
        -1,
        2**31,
        2**32 - 1,
        2**63,
        1e300,
        float("nan"),
        None,
        "",
        "a",
        [],
        [[]],
        {},
        True,
        b"a",
        "\0",
        "a b",
    ]
    table = [0, 4, 0, 0, *[0] * 1024, 97, 0]
    refused = 0
    for _ in range(600):
        fields = draw.choice([byte_level, sentencepiece])()
        if draw.random() < 0.2:
            fields = sentencepiece(model="t5", precompiled_charsmap=list(table))
        name = draw.choice(list(fields))
        value = fields[name]
        alike = [item for item in odd if type(item) is type(value[0] if isinstance(value, list) else value)]
        if isinstance(value, list) and draw.random() < 0.9:
            for _ in range(draw.randrange(1, 9)):
                value[draw.randrange(len(value))] = draw.choice([draw.choice(alike), *draw.choices(value, k=5)])
        else:
            fields[name] = draw.choice(odd)
        try:
            tokenizer = Tokenizer.from_gguf(fields, FILE)
            tokenizer.decode(tokenizer.encode("ab </s> \u00e9"))
        except LocalLLMError:
            refused += 1
    assert 150 < refused < 450
