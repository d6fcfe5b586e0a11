import base64
import json
import random
import shutil
from pathlib import Path

import pytest

from localllm.checkpoint.gguf.header import read_gguf
from localllm.errors import DamagedModel, LocalLLMError, UnsupportedModel
from localllm.text.sentencepiece_model import read_fields
from localllm.text.tokenizer import Tokenizer
from tests.shared import shared
from tests.text.sentencepiece import BPE, BYTES, SPECIAL, UNIGRAM, WORDS, field, message, model
from tests.text.vocabularies import random_texts


def build(folder: Path, content: bytes, **config: object) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("llama2")
    shutil.copy(shared("llama2-tokenizer.model"), folder / "tokenizer.model")
    return Tokenizer.from_folder(folder)


def test_ids_of_llama_2_are_those_that_llama_cpp_expects(llama2: Tokenizer):
    file = shared("vocabs/ggml-vocab-llama-spm.gguf.inp")
    texts = file.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = file.with_suffix(".out").read_text().splitlines()
    assert len(lines) == 46
    for text, line in zip(texts, lines, strict=False):  # the texts end with a separator
        assert llama2.encode(text, special=False) == [int(token) for token in line.split()], text


def test_all_editions_of_llama_2_agree_on_random_texts(llama2: Tokenizer):
    file = shared("vocabs/ggml-vocab-llama-spm.gguf")
    gguf = Tokenizer.from_gguf(read_gguf(file).metadata, file)
    for text in random_texts(2, 2000):
        assert llama2.encode(text) == gguf.encode(text), text
        assert llama2.decode(llama2.encode(text)) == text.replace("\u2581", " ")
    assert llama2.special_tokens == gguf.special_tokens
    assert (llama2.eos_ids, llama2.control_tokens) == (gguf.eos_ids, gguf.control_tokens)


# The ids are those of sentencepiece 0.2.3 for the same models.
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            model(SPECIAL + WORDS, UNIGRAM),
            [[13, 3, 16], [3, 3, 13, 12, 3, 3, 10, 3], [3, 16, 10, 9], [13, 0, 12, 3, 0]],
        ),
        (
            model(SPECIAL + BYTES + WORDS, BPE),
            [
                [269, 259, 272],
                [259, 259, 269, 268, 259, 259, 266, 259],
                [259, 272, 266, 265],
                [269, 13, 268, 259, 198, 172, 12],
            ],
        ),
        (
            model(SPECIAL + BYTES + WORDS, UNIGRAM, one_space=1),
            [[269, 259, 272], [269, 268, 259, 266], [259, 272, 266, 265], [269, 13, 268, 259, 198, 172, 12]],
        ),
        (
            model(SPECIAL + BYTES + WORDS, BPE, dummy_prefix=0),
            [
                [268, 259, 272],
                [259, 269, 268, 259, 259, 266, 259],
                [272, 266, 265],
                [268, 13, 268, 259, 198, 172, 12],
            ],
        ),
    ],
    ids=["unigram", "bpe", "one space", "no prefix"],
)
def test_ids_are_those_of_sentencepiece(tmp_path: Path, content: bytes, expected: list[list[int]]):
    tokenizer = build(tmp_path, content)
    for text, ids in zip(["the bab", "  thethe  ab ", "babab1", "the\nthe é\t"], expected, strict=True):
        assert tokenizer.encode(text, special=False) == ids, text


def test_a_symbol_of_the_model_is_matched_first_and_a_space_follows_it(tmp_path: Path):
    tokenizer = build(tmp_path, model(SPECIAL + BYTES + WORDS, BPE))
    assert tokenizer.encode("ahh<tool>the", special=False) == [270, 263, 263, 273, 269]
    assert tokenizer.added_tokens == {"<unk>", "<s>", "</s>", "<tool>"}
    assert tokenizer.control_tokens == {"<unk>", "<s>", "</s>"}


def test_a_leading_space_is_removed_again(tmp_path: Path):
    tokenizer = build(tmp_path, model(SPECIAL + BYTES + WORDS, BPE))
    assert tokenizer.decode(tokenizer.encode(" the <tool>é")) == " the <tool> é"  # all that changes


def test_folder_files_add_tokens_and_special_tokens(tmp_path: Path):
    added = {
        "2": {"content": "</s>", "special": True},
        "274": {"content": "<|im_end|>", "special": True, "rstrip": True},
        "280": {"content": "<think>", "special": False},
    }
    content = model(SPECIAL + BYTES + WORDS, BPE)
    assert build(tmp_path, content).encode("ab") == [1, *build(tmp_path, content).encode("ab", special=False)]
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 275}')
    tokenizer = build(
        tmp_path,
        content,
        added_tokens_decoder=added,
        eos_token="<|im_end|>",
        pad_token={"content": "<pad>"},
        add_bos_token=False,
        add_eos_token=True,
    )
    assert tokenizer.encode("a<|im_end|>  a<think><pad>") == [270, 274, 270, 280, 275, 274]
    assert tokenizer.eos_ids == (274,)
    assert tokenizer.special_tokens["pad_token"] == "<pad>"
    assert tokenizer.control_tokens == {"<unk>", "<s>", "</s>", "<|im_end|>", "<pad>"}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "vocabulary is empty"),
        (b"\xff" * 20, "not a SentencePiece model"),
        (field(1, 7), "field 1 is not a message"),
        (field(1, message(f1=b"\xff")), "not a SentencePiece model"),
        (field(1, message(f1=7)), "field 1 is not of type bytes"),
        (field(1, b"abc")[:-1], "not a SentencePiece model"),
        (model([("a", float("nan"), 1)], BPE), "scores that are not finite"),
        (model([("a", 0.0, 9)], BPE), "type that does not exist"),
        (model(SPECIAL, BPE) + field(2, message(f3=BPE, f40=99)), "unknown token is not one of"),
        (model(SPECIAL, UNIGRAM, table=b"\xff\xff\xff\xff"), "table of characters"),
    ],
)
def test_a_damaged_model_is_named(tmp_path: Path, content: bytes, why: str):
    with pytest.raises(DamagedModel, match=rf"tokenizer\.model.*{why}"):
        build(tmp_path, content)


@pytest.mark.parametrize(
    "content",
    [
        model(SPECIAL, 3),  # words
        model(SPECIAL, BPE) + field(2, message(f3=BPE, f24=1)),  # spaces after words
        model(SPECIAL, BPE) + field(3, message(f5=0)),  # spaces as they are
    ],
)
def test_a_model_of_another_kind_does_not_run(tmp_path: Path, content: bytes):
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.model has an unsupported model type"):
        build(tmp_path, content)


@pytest.mark.parametrize(
    "added",
    [
        {"x": {"content": "<a>"}},
        {"5": {}},
        {"5": {"content": 5}},
        {"-1": {"content": "<a>"}},
        {"9000000000": {"content": "<a>"}},
        [5],
        7,
    ],
)
def test_tokens_that_cannot_be_added_are_damage(tmp_path: Path, added: object):
    with pytest.raises(DamagedModel, match=r"tokens.json|tokenizer_config.json"):
        build(tmp_path, model(SPECIAL + BYTES + WORDS, BPE), added_tokens_decoder=added)


def test_mutated_models_end_in_an_error_of_ours_or_work(tmp_path: Path):
    draw = random.Random(5)
    whole = [model(SPECIAL + BYTES + WORDS, kind, table=bytes([0, 4, *[0] * 1026])) for kind in (BPE, UNIGRAM)]
    refused = 0
    for _ in range(400):
        content = bytearray(draw.choice(whole))
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(content))
            content[place : place + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        if draw.random() < 0.2:
            del content[draw.randrange(len(content)) :]
        try:
            tokenizer = build(tmp_path, bytes(content))
            tokenizer.decode(tokenizer.encode("the </s> \u00e9"))
        except LocalLLMError:
            refused += 1
    assert 100 < refused < 390


def test_fields_are_bounded_by_the_bytes():
    assert list(read_fields(memoryview(b"\x08\x96\x01\x1a\x03abc\x25\x00\x00\x80\x3f"))) == [
        (1, 150),
        (3, b"abc"),
        (4, 1),
    ]
    for content in (b"\x08", b"\x08" + b"\xff" * 11, b"\x1a\xff\xff\xff\xff\x0f", b"\x25\x00", b"\x09" + bytes(8)):
        with pytest.raises(ValueError):
            list(read_fields(memoryview(content)))


def test_a_vocabulary_of_tiktoken_is_refused_by_its_name(tmp_path):
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines) + "\n")
    with pytest.raises(UnsupportedModel, match=r"a vocabulary of tiktoken.*; take an edition .* tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
