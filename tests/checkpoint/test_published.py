"""Headers that come with the program equal those of the published files."""

import pytest

from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.checkpoint.published import CONFIGS, published_header
from localllm.formatting import parse_count
from localllm.hub.catalog import find_entry
from tests.plan.published import LLAMA_8B, LLAMA_70B, write_sparse


@pytest.mark.parametrize(("name", "config"), [("llama3.1:8b-bf16", LLAMA_8B), ("llama3.1:70b-bf16", LLAMA_70B)])
def test_header_equals_that_of_the_files(tmp_path, name, config):
    header, files = published_header(name), read_header(write_sparse(tmp_path / "model", config))
    assert header
    assert parse_config(header.config) == parse_config(files.config)
    sizes = [{key: (t.name, t.dtype, t.shape) for key, t in each.tensors.items()} for each in (header, files)]
    assert sizes[0] == sizes[1]
    assert header.stored_bytes == files.stored_bytes


@pytest.mark.parametrize("name", CONFIGS)
def test_catalogue_has_the_same_size(name):
    header, entry = published_header(name), find_entry(name)
    assert header and entry and entry.parameters
    parameters = sum(tensor.elements for tensor in header.tensors.values())
    assert parameters == pytest.approx(parse_count(entry.parameters), rel=0.005)
    assert header.config["max_position_embeddings"] == entry.context


def test_other_names_have_none():
    assert published_header("llama3.1:8b") is None
