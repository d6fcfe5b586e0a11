"""An embedder is pulled with all its modules, and recognized before its weights are fetched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import localllm
from localllm.checkpoint.header import read_header
from localllm.checkpoint.remote import remote_header
from localllm.errors import DamagedModel, UnsupportedModel
from localllm.hub.model_files import missing_files
from localllm.hub.names import RepoName, parse_name
from localllm.hub.pull import plan_pull, pull
from tests.hub.models import Watcher
from tests.llm.encoder_checkpoints import MEAN, make_encoder, sentence_transformer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "gemma"
    make_encoder(folder, "EmbeddingGemma")
    dense = torch.nn.Linear(48, 100, bias=False), torch.nn.Linear(100, 32, bias=False)
    sentence_transformer(folder, MEAN, dense, settings={"prompts": {"query": "the "}}, longest=30)
    (folder / "2_Dense" / "pytorch_model.bin").write_bytes(b"the same, pickled")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    return folder


def named(name: str) -> RepoName:
    repo = parse_name(name)
    assert isinstance(repo, RepoName)
    return repo


def test_all_modules_come_and_give_the_same_vectors(hub: Any, cache: Path, folder: Path) -> None:
    hub.add("org/embedder", folder)
    watcher = Watcher()
    job = plan_pull(named("org/embedder"), watcher.say)
    before, here = remote_header(job, watcher.say), read_header(folder)
    assert before.config == here.config and before.tensors.keys() == here.tensors.keys()
    assert before.stored_bytes == here.stored_bytes
    pulled = pull(job, watcher)
    names = {str(path.relative_to(pulled)) for path in pulled.rglob("*") if path.is_file()}
    assert {name for name in names if "/" in name} == {
        "1_Pooling/config.json",
        *(f"{place}_Dense/{name}" for place in (2, 3) for name in ("config.json", "model.safetensors")),
    }
    with localllm.load_embedder(folder) as one, localllm.load_embedder("org/embedder") as other:
        texts = ["the cat", "a dog runs"]
        assert np.array_equal(one.embed(texts, prompt="query").vectors, other.embed(texts, prompt="query").vectors)
        assert other.context == 30
    (pulled / "3_Dense" / "model.safetensors").unlink()
    assert missing_files(pulled) == ["3_Dense/model.safetensors"]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"2_Dense/model.safetensors": None}, UnsupportedModel),  # it has pickles alone
        ({"modules.json": b'[{"type": "x.Transformer", "path": ".."}]'}, DamagedModel),
        ({"modules.json": b"{"}, DamagedModel),
    ],
)
def test_unsupported_modules_are_reported_before_the_weights_are_fetched(
    changed: dict[str, bytes | None], error: type[Exception], hub: Any, cache: Path, folder: Path
) -> None:
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hub.add("org/embedder", {name: content for name, content in (files | changed).items() if content is not None})
    with pytest.raises(error):
        plan_pull(named("org/embedder"), Watcher().say)
    assert not cache.exists()
