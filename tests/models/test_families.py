"""Every family gives the logits of `transformers`, in float32, on checkpoints whose sizes are not the defaults."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.families import FAMILIES
from tests.tiny import LLAMA3_ROPE, make_checkpoint, make_engine

TOLERANCE = 2e-4


@pytest.mark.parametrize(("kind", "changes"), FAMILIES.values(), ids=FAMILIES.keys())
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    theirs = make_checkpoint(tmp_path, kind, **changes)
    ids = torch.randint(0, 320, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = theirs(torch.tensor([ids])).logits[0]
    engine = make_engine(tmp_path, context=len(ids))
    got = engine.logits(ids)
    assert expected.std() > 0.3  # a dead model would agree with anything
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    engine.pool.check()


def test_config_of_before_transformers_5_is_understood(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama", rope_parameters=LLAMA3_ROPE)
    expected = make_engine(tmp_path).logits([5, 6, 7])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    file.write_text(json.dumps(config))
    torch.testing.assert_close(make_engine(tmp_path).logits([5, 6, 7]), expected)
