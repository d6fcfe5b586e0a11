from pathlib import Path
from typing import Any

import pytest

from localllm.arch.cost import kv_bytes_per_token, parameter_count
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint, weights_of


@pytest.mark.parametrize(("kind", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
def test_parameters_are_counted_to_the_last(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    model = make_checkpoint(tmp_path, kind, **changes)
    config = parse_config(read_header(tmp_path).config)
    assert parameter_count(config) == sum(weight.numel() for weight in weights_of(model))


def test_a_token_takes_keys_and_values_in_every_layer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama")
    assert kv_bytes_per_token(parse_config(read_header(tmp_path).config), 2) == 3 * 2 * 2 * 10 * 2
