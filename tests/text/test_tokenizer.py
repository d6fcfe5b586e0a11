import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from localllm.errors import DamagedModel, UnsupportedModel, UsageError
from localllm.text.tokenizer import Tokenizer, token_bytes
from tests.shared import shared

Open = Callable[[str], Tokenizer]
AWKWARD = [
    "",
    " ",
    "hello world",
    "  two  spaces  ",
    "\n\n\ttabs\r\n",
    "Hello, y'all! 😁 👨‍👩‍👧",
    "日本語のテキスト",
    "e\u0301 ﬁ Ω",
    "3 33 333 3333",
    "a<|im_end|>b </s> c <|end|>\n d",
    "def f(x):\n    return x\n",
    "\x00\x07\ufffd",
]


@pytest.mark.parametrize(("name", "file"), [("stories260K", "expected-tokens.json"), ("llama3", "expected.json")])
def test_ids_are_those_of_llama_cpp(tokenizer: Open, folder: Callable[[str], Path], name: str, file: str):
    begin = [] if name == "stories260K" else [128000]  # llama.cpp was asked for Llama 3 without its BOS
    for case in json.loads((folder(name) / file).read_text()):
        assert tokenizer(name).encode(case["text"]) == begin + case["ids"], case["text"]


@pytest.mark.quick_every(3)
@pytest.mark.parametrize("name", ["stories260K", "tinystories", "llama3", "qwen3", "phi3"])
def test_ids_and_text_are_those_of_transformers(tokenizer: Open, folder: Callable[[str], Path], name: str):
    from transformers import PreTrainedTokenizerFast

    ours, theirs = tokenizer(name), PreTrainedTokenizerFast.from_pretrained(folder(name))
    for text in AWKWARD:
        assert ours.encode(text) == theirs(text).input_ids, text
        ids = ours.encode(text, special=False)
        assert ids == theirs(text, add_special_tokens=False).input_ids, text
        for skip_special in (True, False):
            decoded = theirs.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special=skip_special) == decoded
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_ids[:1] == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


@pytest.mark.parametrize("name", ["stories260K", "tinystories", "llama3", "qwen3", "phi3"])
def test_added_tokens_are_spelled_as_in_the_file(tokenizer: Open, folder: Callable[[str], Path], name: str):
    for token in json.loads((folder(name) / "tokenizer.json").read_text())["added_tokens"]:
        assert tokenizer(name).token(token["id"]) == token["content"]


def test_tokenizer_json_overrides_add_bos_token(tokenizer: Open, folder: Callable[[str], Path]):
    config = json.loads((folder("tinystories") / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is True
    assert tokenizer("tinystories").encode("hi")[0] == 1  # by the post-processor
    assert tokenizer("phi3").encode("hi")[0] != 1  # which Phi-3 has not


def test_a_vocabulary_without_byte_tokens_gives_the_unknown_token(tokenizer: Open):
    ids = tokenizer("tinystories").encode("the日本", special=False)
    assert ids == [*tokenizer("tinystories").encode("the", special=False), 0]
    assert tokenizer("tinystories").decode([0], skip_special=False) == "<unk>"


def test_limits_in_the_file_are_switched_off(tmp_path: Path, folder: Callable[[str], Path]):
    content = json.loads((folder("stories260K") / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<unk>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.from_folder(tmp_path).encode("once upon a time")) in range(5, 20)


def test_lone_surrogates_are_refused(tokenizer: Open):
    with pytest.raises(UsageError, match=r"character 1 .* surrogate"):
        tokenizer("stories260K").encode("a\ud800b")


def test_a_folder_without_tokenizer_json_names_the_remedy(tmp_path: Path):
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json or .*; look for"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}',
        b'{"model": {"type": "Strange"}}',
        b'{"version": "1.0", "added_tokens": [{"id": -1}], "model": {}}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_tokenizer_json_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DamagedModel, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("key", ["precompiled_charsmap", "precompiled_charsma\\u0070"])
def test_a_table_that_would_end_the_process_is_damage(model: Path, key: str):
    """Four bytes declare a table of 8 GiB; with limited memory, the library aborts the process."""
    content = (model / "tokenizer.json").read_text()
    steps = f'[{{"type": "Sequence", "normalizers": [{{"type": "Precompiled", "{key}": "/////w=="}}]}}]'
    whole = json.dumps({**json.loads(content), "normalizer": "HERE"})
    (model / "tokenizer.json").write_text(
        whole.replace('"HERE"', f'{{"type": "Sequence", "normalizers": {steps}}}')
    )
    with pytest.raises(DamagedModel, match="table of characters has 4 bytes, but states 4294967295"):
        Tokenizer.from_folder(model)


def test_an_enormous_tokenizer_json_is_not_read(model: Path):
    with (model / "tokenizer.json").open("r+b") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(DamagedModel, match=r"tokenizer\.json is damaged: it is larger"):
        Tokenizer.from_folder(model)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
        ("model", {"type": "WordLevel", "vocab": {}, "unk_token": "u"}),
    ],
)
def test_damage_that_shows_when_a_text_is_encoded_is_an_error_of_ours(model: Path, part: str, value: object):
    content = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps({**content, part: value}))
    tokenizer = Tokenizer.from_folder(model)
    with pytest.raises(DamagedModel, match=r"tokenizer\.json is inconsistent"):
        tokenizer.encode("hi there")


class Panic(BaseException):
    """Like pyo3's PanicException, no subclass of Exception."""


@pytest.mark.parametrize(("raised", "expected"), [(Panic, DamagedModel), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_panic_is_damage_and_an_interrupt_is_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: type[BaseException],
    expected: type[BaseException],
):
    def broken(content: bytes) -> None:
        raise raised

    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr("tokenizers.Tokenizer.from_buffer", broken)
    with pytest.raises(expected):
        Tokenizer.from_folder(tmp_path)


@pytest.fixture
def model(tmp_path: Path, folder: Callable[[str], Path]) -> Path:
    shutil.copy(folder("stories260K") / "tokenizer.json", tmp_path / "tokenizer.json")
    return tmp_path


def test_tokenizer_config_goes_before_special_tokens_map(model: Path):
    (model / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "<unk>"}')
    (model / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>", "lstrip": false}}')
    tokenizer = Tokenizer.from_folder(model)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_ids == (2,)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'"text"'])
def test_a_damaged_tokenizer_config_is_named(model: Path, content: bytes):
    (model / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(DamagedModel, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(model)


def test_chat_templates_are_found_in_all_their_places(model: Path):
    assert Tokenizer.from_folder(model).chat_templates == {}
    (model / "chat_template.json").write_text('{"chat_template": "one"}')
    assert Tokenizer.from_folder(model).chat_templates == {"default": "one"}
    (model / "tokenizer_config.json").write_text('{"chat_template": "two"}')
    assert Tokenizer.from_folder(model).chat_templates == {"default": "two"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_folder(model).chat_templates == {"default": "a", "tool_use": "b"}
    (model / "chat_template.jinja").write_text("three")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("four")
    assert Tokenizer.from_folder(model).chat_templates == {"default": "three", "tool_use": "four"}


@pytest.mark.parametrize(("content", "why"), [(b"\xff", "is not UTF-8"), (b" " * 2**21, "is larger than any")])
def test_a_file_that_is_no_chat_template_is_damage(model: Path, content: bytes, why: str):
    (model / "chat_template.jinja").write_bytes(content)
    with pytest.raises(DamagedModel, match=why):
        Tokenizer.from_folder(model)


@pytest.mark.parametrize("entry", [[{"name": "default"}], 3, [3], [{"name": "default", "template": 3}]])
def test_a_chat_template_of_unknown_form_is_damage(model: Path, entry: object):
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    with pytest.raises(DamagedModel, match="chat_template"):
        Tokenizer.from_folder(model)


TEXT = 'Größe: 12 €\n\t{"key": [1, "💥"]}  <|im_end|>  naïve 日本 '


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("folder", ["stories260K", "llama3.2-bpe", "tokenizers/qwen3", "tokenizers/phi-3-mini"])
def test_the_bytes_of_tokens_joined_are_the_text(folder: str) -> None:
    tokenizer = Tokenizer.from_folder(shared(folder))
    found = tokenizer.token_bytes(tokenizer.vocab_size)
    ids = tokenizer.encode_continuation(TEXT)
    assert b"".join(found[token] for token in ids).decode() == TEXT


def test_rows_without_a_token_have_no_bytes() -> None:
    tokenizer = Tokenizer.from_folder(shared("stories260K"))
    assert tokenizer.token_bytes(520)[512:] == [b""] * 8


@pytest.mark.parametrize("decoder", [None, tokenizers.decoders.WordPiece(), tokenizers.decoders.CTC()])
def test_a_decoder_without_bytes_is_refused(decoder: tokenizers.decoders.Decoder | None) -> None:
    with pytest.raises(UnsupportedModel, match="does not define bytes of tokens"):
        token_bytes(["a"], decoder)
