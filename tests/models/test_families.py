"""Every family is tested on a random float32 checkpoint whose sizes differ from defaults.

`pytest tests/models --models-table` writes the results to docs/models.md.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.gguf_writer import write_gguf
from tests.models.families import FAMILIES
from tests.models.proofs import PROOFS, Proof, Subject
from tests.models.table import DOCUMENT, Results, rows_of
from tests.tiny import LLAMA3_ROPE, make_checkpoint, make_engine


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    kind, changes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    return Subject(request.param, folder, make_checkpoint(folder, kind, **changes))


@pytest.mark.quick_every(5)
@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.title)
def test_family(subject: Subject, proof: Proof, models_table: Results) -> None:
    worst = proof.measure(subject)
    models_table[subject.name, proof.title] = worst
    assert worst is None or worst <= proof.tolerance


def test_the_table_in_the_documents_has_every_family_and_proof() -> None:
    assert rows_of(DOCUMENT.read_text()) == {(name, proof.title) for name in FAMILIES for proof in PROOFS}, (
        "pytest tests/models --models-table"
    )


def test_a_family_that_is_not_in_gguf_is_named_with_the_table_that_lacks_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Olmo")
    with pytest.raises(LookupError, match=r"^Olmo has no GGUF architecture; add it .* NOT_IN_GGUF$"):
        write_gguf(tmp_path, tmp_path / "model.gguf")


def test_a_class_that_transformers_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=r"^transformers \S+ has no UnwrittenForCausalLM; install"):
        make_checkpoint(tmp_path, "Unwritten")


def test_config_of_before_transformers_5_is_understood(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Llama", rope_parameters=LLAMA3_ROPE)
    expected = make_engine(tmp_path).logits([5, 6, 7])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    file.write_text(json.dumps(config))
    torch.testing.assert_close(make_engine(tmp_path).logits([5, 6, 7]), expected)
