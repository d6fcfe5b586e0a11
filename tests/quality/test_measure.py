"""Every quality measure against its formula, and perplexity against the loss of transformers."""

import math
import statistics
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from localllm.errors import LocalLLMError
from localllm.metrics import percentile
from localllm.quality import measure
from localllm.quality.measure import measure_distance, output_error
from localllm.quality.text import Windows
from tests.tiny import make_checkpoint

VOCAB = 11
RANDOM = torch.Generator().manual_seed(0)
WINDOWS = Windows(tuple(tuple(torch.randint(VOCAB, (n,), generator=RANDOM).tolist()) for n in (20, 20, 7)))
COMMON = torch.randn(VOCAB, VOCAB, generator=RANDOM)


class Table:
    """Returns logits of a window in pieces, which depend on all previous ids; similar for all seeds."""

    def __init__(self, seed: int, piece: int = 100):
        self.rows = COMMON + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        self.piece = piece

    def __call__(self, ids: Sequence[int]) -> tuple[Tensor, ...]:
        return self.rows[torch.tensor(ids)].cumsum(0).div(2).split(self.piece)


def softmax(logits: list[float]) -> list[float]:
    whole = math.fsum(math.exp(x) for x in logits)
    return [math.exp(x) / whole for x in logits]


def written_out(reference: Table, other: Table, windows: Windows) -> dict[str, list[float]]:
    """Compute the measures of each position, one probability at a time."""
    found: dict[str, list[float]] = {name: [] for name in ("p", "q", "kl", "same")}
    for ids in windows.ids:
        ours, theirs = (torch.cat(table(ids)).tolist() for table in (reference, other))
        for at in range(windows.first_scored, len(ids)):
            p, q = softmax(ours[at - 1]), softmax(theirs[at - 1])
            found["p"].append(p[ids[at]])
            found["q"].append(q[ids[at]])
            found["kl"].append(math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
            found["same"].append(float(p.index(max(p)) == q.index(max(q))))
    return found


def error_of(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


@pytest.mark.parametrize("first", [1, 5])
def test_every_number_is_its_formula(first: int) -> None:
    windows = Windows(WINDOWS.ids, first)
    reference, other = Table(1), Table(2)
    found = measure_distance(reference, other, windows)
    by_hand = written_out(reference, other, windows)
    p, q, kl, same = by_hand.values()
    assert len(p) == windows.scored == 47 - 3 * first
    for estimate, values in (
        (found.log_ratio, [math.log(a / b) for a, b in zip(p, q, strict=True)]),
        (found.divergence.mean, kl),
        (found.same_top, same),
        (found.right_token, [b - a for a, b in zip(p, q, strict=True)]),
    ):
        assert estimate.value == pytest.approx(statistics.fmean(values), rel=1e-5)
        assert estimate.error == pytest.approx(error_of(values), rel=1e-5)
    for estimate, chances in ((found.reference_perplexity, p), (found.other_perplexity, q)):
        nats = [-math.log(chance) for chance in chances]
        assert estimate.value == pytest.approx(math.exp(statistics.fmean(nats)), rel=1e-5)
        assert estimate.error == pytest.approx(estimate.value * error_of(nats), rel=1e-5)
    assert found.divergence.median == pytest.approx(statistics.median(kl), rel=1e-5)
    assert found.divergence.p99 == pytest.approx(percentile(kl, 99), rel=1e-5)
    assert found.divergence.max == pytest.approx(max(kl), rel=1e-5)
    rms = math.sqrt(statistics.fmean((b - a) ** 2 for a, b in zip(p, q, strict=True)))
    assert found.right_token_rms == pytest.approx(rms, rel=1e-5)
    assert 0 < found.same_top.value < 1


def test_perplexity_is_that_of_the_loss_of_transformers(tmp_path) -> None:
    model = make_checkpoint(tmp_path, "Llama")
    ids = torch.randint(320, (2, 40))
    windows = Windows(tuple(tuple(row) for row in ids.tolist()))
    found = measure_distance(*[lambda ids: [model(torch.tensor([ids])).logits[0]]] * 2, windows)
    loss = model(ids, labels=ids).loss
    assert found.reference_perplexity.value == pytest.approx(math.exp(loss), rel=1e-6)


def test_pieces_and_rows_at_once_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measure_distance(Table(1), Table(2), WINDOWS)
    assert measure_distance(Table(1, piece=6), Table(2, piece=6), WINDOWS) == whole
    monkeypatch.setattr(measure, "CHUNK_ELEMENTS", 3 * VOCAB + 1)
    assert measure_distance(Table(1, piece=8), Table(2, piece=8), WINDOWS) == whole


def test_the_divergence_is_of_the_other_from_the_reference() -> None:
    sure, unsure = torch.tensor([[4.0, 0.0, 0.0]]), torch.zeros(1, 3)
    p = math.exp(4) / (math.exp(4) + 2)
    expected = p * math.log(3 * p) + (1 - p) * math.log(3 * (1 - p) / 2)
    (one,) = measure.score_rows(sure, unsure, torch.tensor([0])).divergence.tolist()
    assert one == pytest.approx(expected)
    (back,) = measure.score_rows(unsure, sure, torch.tensor([0])).divergence.tolist()
    assert back != pytest.approx(expected, rel=0.1)


def test_logits_far_apart_and_far_from_zero_keep_their_digits() -> None:
    """exp(-2000) is 0 in every dtype, and float32 cannot represent 1e-9 next to 10000."""
    reference, other = torch.tensor([[0.0, -2000.0]]), torch.tensor([[-2000.0, 0.0]])
    rows = measure.score_rows(reference, other, torch.tensor([0]))
    assert (rows.divergence.item(), rows.other_logprob.item()) == (2000, -2000)
    close = torch.tensor([[10000.0, 10000.0]]), torch.tensor([[10000.0, 10000.0009765625]])
    half_gap = 0.0009765625 / 2
    expected = math.log(math.cosh(half_gap))  # of a coin and one that is a little less fair
    assert measure.score_rows(*close, torch.tensor([0])).divergence.item() == pytest.approx(expected, rel=1e-6)


def test_the_smallest_divergences_keep_their_digits() -> None:
    """Logarithms in float32 have an error of a hundred times the divergence."""
    random = torch.Generator().manual_seed(0)
    reference = torch.randn(3, 5000, generator=random) * 3
    other = reference + torch.randn(3, 5000, generator=random) * 1e-4
    found = measure.score_rows(reference, other, torch.tensor([0, 1, 2])).divergence
    for ours, theirs, divergence in zip(reference.tolist(), other.tolist(), found.tolist(), strict=True):
        p, q = softmax(ours), softmax(theirs)
        expected = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        assert 1e-9 < expected < 1e-8
        assert divergence == pytest.approx(expected, rel=1e-4)


def test_a_model_has_no_distance_to_itself() -> None:
    found = measure_distance(Table(3), Table(3), WINDOWS)
    assert (found.divergence.max, found.log_ratio.value, found.right_token_rms) == (0, 0, 0)
    assert (found.same_top.value, found.same_top.error) == (1, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_logits_name_their_model(bad: float) -> None:
    broken = Table(1)
    broken.rows[WINDOWS.ids[0][3], 2] = bad
    with pytest.raises(LocalLLMError, match="the other model computed NaN"):
        measure_distance(Table(1), broken, WINDOWS)
    with pytest.raises(LocalLLMError, match="the reference computed NaN"):
        measure_distance(broken, Table(1), WINDOWS)


def test_logits_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        measure_distance(Table(1, piece=5), Table(1, piece=6), WINDOWS)
    with pytest.raises(ValueError, match="20 tokens got 19 rows"):
        measure_distance(*[lambda ids: [torch.zeros(len(ids) - 1, VOCAB)]] * 2, WINDOWS)


def test_of_an_output_each_token_counts_the_same() -> None:
    reference = torch.tensor([[3.0, 4.0], [3000.0, 4000.0]])
    assert output_error(reference, torch.tensor([[3.0, 5.0], [3000.0, 4000.0]])) == pytest.approx(0.2 / 2)
    assert output_error(reference, reference) == 0
