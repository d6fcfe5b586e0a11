"""Every family of the oracle table on a GPU, with the proofs and bounds of a CPU."""

from pathlib import Path

import pytest
import torch

from tests.models.families import FAMILIES
from tests.models.proofs import PROOFS, Proof, Subject
from tests.tiny import make_checkpoint


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    pytest.importorskip("transformers")
    kind, changes = FAMILIES[request.param]
    folder: Path = tmp_path_factory.mktemp("family")
    return Subject(request.param, folder, make_checkpoint(folder, kind, **changes))


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.title)
def test_family(written: Subject, proof: Proof, device: torch.device) -> None:
    try:
        worst = proof.measure(Subject(written.name, written.folder, written.theirs, device))
    except ModuleNotFoundError as missing:  # such as gguf, which writes files of that format
        pytest.skip(f"{missing.name} is not installed")
    assert worst is None or worst <= proof.tolerance
