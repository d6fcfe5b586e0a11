"""Tokenizers that would exhaust memory, with which the Rust library would abort the process."""

import base64
import json
import re
from types import SimpleNamespace

import pytest

from localllm.errors import DamagedModel, UnsupportedModel, UsageError
from localllm.text.bounds import (
    MAX_NORMALIZED_BYTES,
    PIECE_CHARS,
    check_normalized_length,
    check_sections,
    growth_of_normalizer,
    read_sections,
)
from localllm.text.tokenizer import Tokenizer
from tests.work import counted_lines

TWENTY_FOLD = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20}
MODEL = {"type": "BPE", "vocab": {"a": 0, "b": 1, "▁": 2, "<unk>": 3}, "merges": [], "unk_token": "<unk>"}


def described(**sections):
    return {"version": "1.0", "added_tokens": [], **sections, "model": MODEL}


def write(folder, content):
    folder.mkdir(exist_ok=True)
    file = folder / "tokenizer.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def around(pieces, ids=1):
    special = {"<s>": {"id": "<s>", "ids": [0] * ids, "tokens": ["a"] * ids}}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * pieces + [{"Sequence": {"id": "A", "type_id": 0}}]
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def table(entry: bytes) -> str:
    trie = bytes(1024)
    return base64.b64encode(len(trie).to_bytes(4, "little") + trie + entry + b"\0").decode()


ADDED = {"id": 4, "special": False, "normalized": True, "lstrip": False, "rstrip": False, "single_word": False}
HOSTILE = {
    "normalizer": {"normalizer": {"type": "Sequence", "normalizers": [TWENTY_FOLD] * 8}},
    "nested": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [TWENTY_FOLD] * 8}]}
    },
    "unicode forms": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "NFKD"}, {"type": "Replace", "pattern": {"Regex": "."}, "content": "\ufdfa"}]
            * 3,
        }
    },
    "prepend": {"normalizer": {"type": "Prepend", "prepend": "x" * 10_000_000}},
    "table": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": table(b"x" * 100_000)}},
    "steps": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}},
    "pre-tokenizer": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}] * 100}},
    "pattern": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "a|" * 60_000 + "b"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "decoder": {"decoder": {"type": "Sequence", "decoders": [TWENTY_FOLD] * 8}},
    "template": {"post_processor": around(10_000, 100_000)},
    "templates": {"post_processor": {"type": "Sequence", "processors": [around(500), around(600)]}},
    "text again": {"post_processor": around(1) | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000}},
    "added token": {
        "normalizer": {"type": "Sequence", "normalizers": [TWENTY_FOLD] * 2},
        "added_tokens": [{**ADDED, "content": "a" * 1_000_000}],
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_could_take_all_memory_is_refused(tmp_path, name):
    folder = write(tmp_path / "hostile", described(**HOSTILE[name]))
    with pytest.raises(UnsupportedModel, match="is not safe to run"), counted_lines() as count:
        Tokenizer.from_folder(folder)
    assert count.lines < 500_000  # 70,000 at most measured, of a template with 10,000 pieces


def late(section):
    return json.dumps(described())[:-1] + f", {section}}}"


@pytest.mark.parametrize("spelling", ["normalizer", "\\u006eormalizer"])
def test_a_section_behind_the_model_is_read_as_well(tmp_path, spelling):
    section = f'"{spelling}": {json.dumps(HOSTILE["normalizer"]["normalizer"])}'
    with pytest.raises(UnsupportedModel, match="safe to run"):
        Tokenizer.from_folder(write(tmp_path / "late", late(section)))


def test_a_duplicate_section_is_damage(tmp_path):
    normalizer = json.dumps(HOSTILE["normalizer"]["normalizer"])
    content = json.dumps(described(normalizer=None)).replace(
        '"normalizer": null', f'"normalizer": {normalizer}, "normalizer": null'
    )
    assert content.count('"normalizer"') == 2
    with pytest.raises(DamagedModel, match="it has normalizer twice"):
        Tokenizer.from_folder(write(tmp_path / "twice", content))


def test_vocabulary_entries_named_like_sections_are_ignored():
    words = {"decoder": 5, "normalizer": 6, "model": 7, "ä": 8}
    content = {**described(normalizer=None), "model": {**MODEL, "vocab": words}}
    for ensure_ascii in (True, False):
        assert read_sections(json.dumps(content, ensure_ascii=ensure_ascii).encode()).keys() == content.keys() - {
            "model"
        }


@pytest.mark.parametrize("name", ["stories260K", "tinystories", "llama3", "qwen3", "phi3"])
def test_published_tokenizers_are_within_the_bounds(folder, name):
    sections = read_sections((folder(name) / "tokenizer.json").read_bytes())
    assert {"normalizer", "decoder", "post_processor"} <= sections.keys()
    check_sections(sections, name)


ALBERT = [
    {"type": "Replace", "pattern": {"String": "``"}, "content": '"'},
    {"type": "NFKD"},
    {"type": "StripAccents"},
    {"type": "Lowercase"},
    {"type": "Precompiled", "precompiled_charsmap": table("ﷺ".encode() * 11)},
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
]


def test_the_longest_published_chain_of_normalizers_is_within_them():
    check_sections({"normalizer": {"type": "Sequence", "normalizers": ALBERT}}, "albert")


def test_a_text_is_measured_before_it_is_normalized(tmp_path):
    normalizer = {"type": "Sequence", "normalizers": [TWENTY_FOLD, TWENTY_FOLD]}
    tokenizer = Tokenizer.from_folder(write(tmp_path / "longer", described(normalizer=normalizer)))
    assert len(tokenizer.encode("ab")) == 401
    assert len(tokenizer.encode("b" * 200_000)) == 200_000, "measured, and short enough"
    for encode in (tokenizer.encode, tokenizer.encode_continuation):
        with pytest.raises(UsageError, match=re.escape("makes more than 33.6 MB of the text")):
            encode("a" * 2 * (MAX_NORMALIZED_BYTES // 400))


def test_no_more_of_a_text_is_measured_than_shows_that_it_is_too_long():
    measured = list[int]()

    def normalize(text: str) -> str:
        measured.append(len(text))
        return text * 400

    longest = MAX_NORMALIZED_BYTES // 400
    with pytest.raises(UsageError):
        check_normalized_length("a" * 2 * longest, SimpleNamespace(normalize_str=normalize), 400)
    assert max(measured) <= PIECE_CHARS and longest < sum(measured) <= longest + PIECE_CHARS


def test_the_growth_bound_covers_the_library(tmp_path):
    texts = "ﷺ", "ΐ", "İ", "各", "ŉ", "\u0344", " a", "é", "𝅘𝅥𝅮", "ｶﾞ"
    kinds = ["NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "StripAccents", "ByteLevel"]
    steps = [{"type": kind} for kind in kinds]
    steps.append(
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": True,
            "lowercase": True,
        }
    )
    steps += [
        TWENTY_FOLD,
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "yyy"},
    ]
    for step in steps:
        backend = Tokenizer.from_folder(write(tmp_path / "one", described(normalizer=step)))._backend
        growth = growth_of_normalizer(backend.normalizer)
        for text in texts:
            made = backend.normalizer.normalize_str(text)
            assert len(made.encode()) <= growth * len(text.encode()) + 3, (step, text, made)
