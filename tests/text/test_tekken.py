import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from localllm.errors import DamagedModel, LocalLLMError, UnsupportedModel
from localllm.text.backends import byte_alphabet
from localllm.text.pretokenizers import O200K, TEKKEN
from localllm.text.tokenizer import Tokenizer
from tests.text.vocabularies import random_texts

WORDS = [*(bytes([byte]) for byte in range(256)), b"ab", b"abc", b"\xc3\xa9", b" ab"]
SPECIAL = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(("<unk>", "<s>", "</s>"))]


def tekken(words: list[bytes], reserved: int, **keys: Any) -> dict[str, Any]:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(words)
    ]
    config = {
        "pattern": TEKKEN,
        "default_vocab_size": len(words) + reserved,
        "default_num_special_tokens": reserved,
        "version": "v3",
    }
    return {"config": config, "vocab": vocab, **keys}


def build(folder: Path, content: dict[str, Any]) -> Tokenizer:
    (folder / "tekken.json").write_text(json.dumps(content))
    return Tokenizer.from_folder(folder)


def test_ids_are_those_of_the_same_vocabulary_as_tokenizer_json(tmp_path: Path, folder: Callable[[str], Path]):
    """Llama 3's vocabulary has the ranks of tiktoken, and its tokenizer.json has the merges of its authors."""
    content = json.loads((folder("llama3") / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = TEKKEN
    content["post_processor"] = None
    content["added_tokens"] = []
    ranked = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    ids = {word: rank for rank, word in enumerate(ranked[:20_000])}
    content["model"] |= {
        "vocab": ids,
        "merges": [pair for pair in content["model"]["merges"] if {*pair, "".join(pair)} <= ids.keys()],
    }
    expected = tokenizers.Tokenizer.from_str(json.dumps(content))
    byte_of = {letter: byte for byte, letter in byte_alphabet().items()}
    words = [bytes(map(byte_of.__getitem__, word)) for word in ranked]
    file = tekken(words[:25_000], 1000)
    file["config"]["default_vocab_size"] = 21_000  # it may hold more than it takes
    tokenizer = build(tmp_path, file)
    for text in random_texts(4, 2000):
        written = tokenizer.encode(text)
        assert written == [1, *(1000 + token for token in expected.encode(text).ids)], text
        assert tokenizer.decode(written) == text
    assert tokenizer.vocab_size == 21_000


def test_special_tokens_come_first_and_fill_their_place(tmp_path: Path):
    old = build(tmp_path, tekken(WORDS, 30))
    assert old.encode("[INST]ab", special=False) == [3, 30 + 256]
    assert old.encode("<SPECIAL_29>abc\u00e9", special=False) == [29, 30 + 257, 30 + 258]
    assert old.control_tokens >= {"<unk>", "<s>", "</s>", "[TOOL_CALLS]", "<SPECIAL_20>"}
    new = build(tmp_path, tekken(WORDS, 4, special_tokens=SPECIAL))
    assert new.encode("[INST]")[1:] == [4 + byte for byte in b"[INST]"]
    assert new.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert new.eos_ids == (2,)
    assert new.encode("ab</s>") == [1, 4 + 256, 2]


def test_precedence_is_between_tokenizer_json_and_tokenizer_model(tmp_path: Path, folder: Callable[[str], Path]):
    (tmp_path / "tokenizer.model").write_bytes(b"not read")
    assert build(tmp_path, tekken(WORDS, 30)).vocab_size == len(WORDS) + 30
    (tmp_path / "tokenizer.json").write_bytes((folder("stories260K") / "tokenizer.json").read_bytes())
    assert Tokenizer.from_folder(tmp_path).vocab_size == 512


def test_a_pattern_of_a_stranger_does_not_run(tmp_path: Path):
    content = tekken(WORDS, 30)
    content["config"]["pattern"] = "(a*)*b"
    with pytest.raises(UnsupportedModel, match=r"tekken\.json splits text by an unknown pattern"):
        build(tmp_path, content)
    content["config"]["pattern"] = O200K
    assert build(tmp_path, content).encode("ab's", special=False) == [30 + 256, 30 + ord("'"), 30 + ord("s")]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("config",), None),
        (("config", "default_vocab_size"), 10**12),
        (("config", "default_num_special_tokens"), 10**12),
        (("config", "default_num_special_tokens"), 5),
        (("vocab", 3, "rank"), 4),
        (("vocab", 3, "token_bytes"), "%"),
        (("vocab", 3), 7),
        (("vocab",), {}),
        (("special_tokens",), [{"rank": 99, "token_str": "a"}]),
        (("special_tokens",), [{"rank": 0, "token_str": 1}]),
        (("special_tokens",), [*SPECIAL, {"rank": 2, "token_str": "a"}]),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, place: tuple[Any, ...], value: Any):
    content: Any = tekken(WORDS, 30)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(DamagedModel, match=r"tekken\.json is damaged"):
        build(tmp_path, content)


def test_mutated_files_end_in_an_error_of_ours_or_work(tmp_path: Path):
    draw = random.Random(6)
    odd = [0, -1, 2**63, 1e300, None, "", "YQ==", [], {}, True, "\ud800"]
    refused = 0
    for _ in range(200):
        content = tekken(WORDS, 4, special_tokens=[dict(entry) for entry in SPECIAL])
        part = draw.choice(
            [content["config"], content, *content["special_tokens"], *draw.sample(content["vocab"], 9)]
        )
        key = draw.choice(list(part))
        if draw.random() < 0.2:
            del part[key]
        else:
            part[key] = draw.choice(odd)
        try:
            tokenizer = build(tmp_path, content)
            tokenizer.decode(tokenizer.encode("abc </s> \u00e9"))
        except LocalLLMError:
            refused += 1
    assert 50 < refused < 190
