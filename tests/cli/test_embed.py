"""`localllm embed`, and `list`, `show` and `plan` of an embedder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localllm as library
from tests.llm.encoder_checkpoints import MEAN, make_encoder, sentence_transformer

TEXTS = ["the cat sat", "a dog runs slowly", "un red mat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("nomic")
    make_encoder(folder, "NomicBert")
    sentence_transformer(folder, MEAN, settings={"prompts": {"query": "the "}}, longest=24)
    return folder


@pytest.fixture(scope="module")
def vectors(folder: Path) -> np.ndarray:
    with library.load_embedder(folder) as embedder:
        return embedder.embed(TEXTS).vectors


def test_each_text_becomes_a_line(real: Any, folder: Path, vectors: np.ndarray) -> None:
    for arguments, piped in (
        (TEXTS, b""),
        ((), "\n".join(TEXTS).encode()),
        ((), "\r\n".join(TEXTS).encode() + b"\r\n"),
    ):
        code, out, _ = real("embed", str(folder), *arguments, piped=piped)
        assert code == 0
        assert np.array_equal(np.array([json.loads(line) for line in out.splitlines()], np.float32), vectors)


def test_json_reports_tokens_and_truncation(real: Any, folder: Path) -> None:
    code, out, err = real("embed", str(folder), "--json", "--truncate", "--dimensions", "7", "cat", "cat " * 30)
    first, second = map(json.loads, out.splitlines())
    assert code == 0
    assert (first["index"], first["tokens"], first["truncated"], len(first["embedding"])) == (0, 3, 0, 7)
    assert (second["index"], second["tokens"], second["truncated"]) == (1, 24, 8)
    assert "text 2 was truncated by 8 tokens" in err


def test_a_prompt_of_the_model_is_put_before(real: Any, folder: Path) -> None:
    assert real("embed", str(folder), "--prompt", "query", "cat") == real("embed", str(folder), "the cat")


def test_more_lines_than_are_embedded_together(real: Any, folder: Path, vectors: np.ndarray) -> None:
    code, out, _ = real("embed", str(folder), piped="\n".join(TEXTS * 100).encode())
    found = np.array([json.loads(line) for line in out.splitlines()])
    assert code == 0 and np.abs(found - np.tile(vectors, (100, 1))).max() < 5e-6


@pytest.mark.parametrize(
    ("arguments", "piped", "code", "told"),
    [
        ((), b"", 2, "no texts are given"),
        ((), b"cat\n\ndog", 2, "line 2 of stdin is empty"),
        ((), b"cat\n\xff", 2, "line 2 of stdin is not valid UTF-8"),
        (("",), b"", 2, "a text to embed is empty"),
        (("cat " * 30,), b"", 4, "the prompt has 32 tokens and the context holds 24"),
        (("cat", "--dimensions", "49"), b"", 2, "give 1 to 48"),
        (("cat", "--prompt", "passage"), b"", 2, "no prompt 'passage'"),
        (("cat", "--context", "65"), b"", 2, "a context of 65 tokens"),
    ],
)
def test_invalid_options_are_rejected(
    arguments: Any, piped: bytes, code: int, told: str, real: Any, folder: Path
) -> None:
    found, _, err = real("embed", str(folder), *arguments, piped=piped)
    assert (found, told in err) == (code, True), err


def test_a_decoder_embeds_too(real: Any) -> None:
    code, out, _ = real("embed", "demo", "Once upon a time")
    vector = np.array(json.loads(out))
    assert code == 0 and abs(np.linalg.norm(vector) - 1) < 1e-6


def test_an_embedder_does_not_chat(real: Any, folder: Path) -> None:
    code, out, err = real("run", str(folder), "hello")
    assert (code, out) == (8, "") and "does not support chat" in err and "localllm embed" in err


@pytest.mark.parametrize("arguments", [("quantize", "-o", "out"), ("run", "--quant", "int8", "hello"), ("bench",)])
def test_token_options_are_rejected(arguments: Any, real: Any, folder: Path, tmp_path: Path) -> None:
    command, *rest = arguments
    code, out, err = real(
        command, str(folder), *(str(tmp_path / each) if each == "out" else each for each in rest)
    )
    assert (code, out) == (8, "") and ("vectors" in err or "embedding model" in err)
    code, _, err = real("run", "demo", "--draft-model", str(folder), "hello")
    assert code == 8 and "cannot draft tokens" in err


@pytest.mark.slow
def test_show_and_plan_know_an_embedder(real: Any, folder: Path) -> None:
    code, out, _ = real("show", str(folder), "--json")
    facts = json.loads(out)
    with library.load_embedder(folder) as embedder:
        weights, memory = embedder.weight_bytes, embedder.memory
    assert code == 0 and facts["architecture"] == "NomicBertModel"
    assert facts["parameters"] * 4 == facts["weight_bytes"] == weights
    assert facts["dimensions"] == 48 and "computes embeddings" in real("show", str(folder))[1]
    assert facts["kv_bytes_per_token"] == 0 and memory.cache_bytes == 0
    code, out, _ = real("plan", str(folder), "--device", "cpu", "--json")
    planned = json.loads(out)
    assert code == 0 and planned["context"] == 24 and planned["fits"]
    assert [choice["quant"] for choice in planned["quantizations"]] == [None]
