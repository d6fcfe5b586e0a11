"""GGUF headers are read quickly and as the `gguf` package reads them; a hostile one is one clear error message."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from localllm.checkpoint.gguf.header import read_gguf
from localllm.errors import DamagedModel, LocalLLMError, ModelNotFound, UnsupportedModel
from tests.checkpoint import gguf_bytes as made
from tests.shared import shared
from tests.work import counted_lines

REAL = [
    "stories260K-f32.gguf",
    "gguf/model-q4_k_m.gguf",
    "gguf/model-iq4_xs.gguf",
    "vocabs/ggml-vocab-llama-spm.gguf",
]
ARCHITECTURE = made.key("general.architecture", "text", "llama")


def error_of(file: Path) -> LocalLLMError:
    with pytest.raises(LocalLLMError) as caught:
        read_gguf(file)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("name", REAL)
def test_real_files_are_read_as_the_package_reads_them(name: str) -> None:
    file = shared(name)
    header, theirs = read_gguf(file), gguf.GGUFReader(file)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == fields
    assert {name: (t.shape, t.offset, t.nbytes, t.format) for name, t in header.tensors.items()} == {
        t.name: (tuple(t.shape.tolist())[::-1], t.data_offset, t.n_bytes, t.tensor_type.name.lower())
        for t in theirs.tensors
    }


def test_a_vocabulary_of_128_000_tokens_is_read_without_calls_for_each() -> None:
    file = shared("llama3.2-bpe/vocab.gguf")
    with counted_lines() as count:
        metadata = read_gguf(file).metadata
    tokens, merges = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges"))
    assert len(tokens) == 128256
    assert count.lines < 6 * (len(tokens) + len(merges))  # 4 measured


def test_all_kinds_of_values(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint8("a", 255)
    writer.add_int8("b", -3)
    writer.add_int64("c", -(2**40))
    writer.add_float64("d", 0.1)
    writer.add_bool("e", True)
    writer.add_array("f", [True, False])
    writer.add_array("g", ["x", "ü", ""])
    writer.add_array("h", [1.5, -2.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    got = read_gguf(tmp_path / "x.gguf").metadata
    assert {k: got[k] for k in "abcdefgh"} == {
        "a": 255, "b": -3, "c": -(2**40), "d": 0.1, "e": True, "f": [True, False], "g": ["x", "ü", ""],
        "h": [1.5, -2.0],
    }  # fmt: skip


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    keys = [made.key("general.alignment", "u32", 64)]
    entries = [made.tensor("a", (4,), 0, 0), made.tensor("b", (2, 3), 1, 64)]
    file.write_bytes(made.file(keys, entries, b"\0" * 76, version=2, alignment=64))
    tensors = read_gguf(file).tensors
    assert tensors["b"].shape == (3, 2)
    assert tensors["b"].offset == tensors["a"].offset + 64


def test_bytes_that_are_no_text_become_replacement_characters_in_values(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(made.file([made.array("tokens", 8, 1, made.text(b"\xff\xfeab"))]))
    assert read_gguf(file).metadata["tokens"] == ["\ufffd\ufffdab"]


GOOD = made.tensor("a", (8,), 0, 0)
HOSTILE: dict[str, tuple[bytes, type[LocalLLMError], str]] = {
    "empty": (b"", DamagedModel, "begins with b''"),
    "magic": (made.file(magic=b"GGML"), DamagedModel, "not with GGUF"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid", DamagedModel, "git lfs pull"),
    "ends at once": (b"GGUF\3\0\0\0", DamagedModel, "first 24 bytes"),
    "version 1": (made.file(version=1), UnsupportedModel, "version 1"),
    "version 4": (made.file(version=4), UnsupportedModel, "version 4"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModel, "big endian"),
    "many tensors": (made.file(counts=(2**60, 0)), DamagedModel, "beyond the end"),
    "many keys": (made.file(counts=(0, 2**63)), DamagedModel, "beyond the end"),
    "counted too many tensors": (made.file([], [GOOD], b"\0" * 256, counts=(5, 0)), DamagedModel, "tensor"),
    "key of absurd length": (made.file([struct.pack("<Q", 2**62) + b"x" * 40]), DamagedModel, "name should have"),
    "key longer than the file": (made.file([struct.pack("<Q", 5000) + b"x" * 40]), DamagedModel, "beyond the end"),
    "key that is no text": (made.file([made.key(b"\xff\xff", "u32", 1)]), DamagedModel, "not UTF-8"),
    "key twice": (made.file([ARCHITECTURE, ARCHITECTURE]), DamagedModel, "occurs twice"),
    "value of no type": (made.file([made.text("a") + struct.pack("<IQ", 77, 0)]), DamagedModel, "type 77"),
    "text of absurd length": (
        made.file([made.text("a") + struct.pack("<IQ", 8, 2**63)]), DamagedModel, "name should have",
    ),
    "array of arrays": (made.file([made.array("a", 9, 1, b"\0" * 16)]), UnsupportedModel, "array of arrays"),
    "array of no type": (made.file([made.array("a", 50, 1, b"\0" * 16)]), DamagedModel, "type 50"),
    "array of absurd length": (made.file([made.array("a", 5, 2**61, b"\0" * 16)]), DamagedModel, "beyond the end"),
    "array of texts of absurd length": (
        made.file([made.array("a", 8, 2**61, b"\0" * 16)]), DamagedModel, "beyond the end",
    ),
    "text in an array of absurd length": (
        made.file([made.array("a", 8, 1, struct.pack("<Q", 2**62))]), DamagedModel, "name should have",
    ),
    "text in an array beyond the end": (
        made.file([made.array("a", 8, 1, struct.pack("<Q", 2000))]), DamagedModel, "beyond the end",
    ),
    "more entries than any header": (
        made.file([made.array("a", 0, 3 * 2**20, bytes(3 * 2**20))]), DamagedModel, "more than any real header",
    ),
    "truth of 2": (made.file([made.key("a", "bool", 2)]), DamagedModel, "true and false"),
    "alignment 0": (made.file([made.key("general.alignment", "u32", 0)]), DamagedModel, "alignment is 0"),
    "alignment 33": (made.file([made.key("general.alignment", "u32", 33)]), DamagedModel, "alignment is 33"),
    "alignment enormous": (made.file([made.key("general.alignment", "u32", 2**31)]), DamagedModel, "alignment"),
    "alignment a text": (made.file([made.key("general.alignment", "text", "x")]), DamagedModel, "alignment"),
    "no dimensions": (made.file([], [made.tensor("a", (), 0, 0)]), DamagedModel, "0 dimensions"),
    "many dimensions": (made.file([], [made.tensor("a", (1,), 0, 0, 2**32 - 1)]), DamagedModel, "dimensions"),
    "empty dimension": (made.file([], [made.tensor("a", (8, 0), 0, 0)]), DamagedModel, "empty shape"),
    "enormous dimensions": (
        made.file([], [made.tensor("a", (2**62, 2**62, 2**62), 0, 0)]), DamagedModel, "beyond the end of the file",
    ),
    "tensor of no type": (made.file([], [made.tensor("a", (8,), 99, 0)]), UnsupportedModel, "TYPE 99"),
    "tensor of a type that does not run": (
        made.file([], [made.tensor("a", (256,), 16, 0)]), UnsupportedModel, "IQ2_XXS",
    ),
    "no whole blocks": (made.file([], [made.tensor("a", (100,), 12, 0)]), DamagedModel, "not a multiple of"),
    "tensor beyond the file": (made.file([], [GOOD], b"\0" * 31), DamagedModel, "1 bytes beyond the end"),
    "offset beyond the file": (
        made.file([], [made.tensor("a", (8,), 0, 2**63)], b"\0" * 32), DamagedModel, "beyond the end of the file",
    ),
    "offset not aligned": (
        made.file([], [made.tensor("a", (8,), 0, 4)], b"\0" * 64), DamagedModel, "not a multiple of 32",
    ),
    "tensors overlap": (
        made.file([], [made.tensor("a", (16,), 0, 0), made.tensor("b", (8,), 0, 32)], b"\0" * 64),
        DamagedModel, "overlaps another",
    ),
    "tensors in one place": (
        made.file([], [GOOD, made.tensor("b", (8,), 0, 0)], b"\0" * 64), DamagedModel, "overlaps another",
    ),
    "tensor twice": (
        made.file([], [GOOD, made.tensor("a", (8,), 0, 32)], b"\0" * 64), DamagedModel, "'a' occurs twice",
    ),
    "tensor name that is no text": (
        made.file([], [made.tensor(b"\x80", (8,), 0, 0)], b"\0" * 32), DamagedModel, "not UTF-8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "kind", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file(tmp_path: Path, content: bytes, kind: type[LocalLLMError], words: str) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    error = error_of(file)
    assert type(error) is kind
    assert words in error.message


def test_a_file_truncated_at_every_byte_of_its_header(tmp_path: Path) -> None:
    whole = made.file([ARCHITECTURE, made.array("t", 8, 2, made.text("a") * 2)], [GOOD], b"\0" * 32)
    file = tmp_path / "x.gguf"
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        error_of(file)


def test_a_name_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(made.file([], [made.tensor("x\n\x1b[31mred", (8,), 0, 4)], b"\0" * 64))
    assert "\x1b" not in str(error_of(file))


# --- a model in several files ---


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    writer.add_context_length(77)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full((2, 8), i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("*.gguf"))


def test_any_part_opens_all(parts: list[Path]) -> None:
    assert len(parts) == 3
    headers = [read_gguf(part) for part in parts]
    assert headers[0] == headers[1] == headers[2]
    assert sorted(headers[0].tensors) == ["t0", "t1", "t2", "t3", "t4"]
    assert headers[0].tensors["t4"].file == parts[2]
    assert headers[0].metadata["llama.context_length"] == 77


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    for part in (parts[0], parts[2]):
        with pytest.raises(ModelNotFound, match=r"m-00002-of-00003\.gguf is missing"):
            read_gguf(part)


def test_a_renamed_part_is_an_incomplete_model(parts: list[Path]) -> None:
    alone = parts[0].rename(parts[0].with_name("whole.gguf"))
    assert "its name says a whole model" in error_of(alone).message


def test_swapped_parts_are_detected(parts: list[Path]) -> None:
    first, second = parts[0].read_bytes(), parts[1].read_bytes()
    parts[0].write_bytes(second)
    parts[1].write_bytes(first)
    assert "part 1 of 3" in error_of(parts[0]).message


def test_a_tensor_in_two_parts_is_an_error(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes().replace(b"t2", b"t0"))
    assert "the tensor 't0' is also in an earlier part" in error_of(parts[0]).message


def test_absurdly_many_parts_end_at_the_first_that_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "m-00001-of-99999.gguf"
    file.write_bytes(made.file())
    assert "00002-of-99999.gguf is missing" in error_of(file).message
