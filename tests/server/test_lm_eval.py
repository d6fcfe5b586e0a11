"""lm-evaluation-harness gets the same likelihoods over HTTP as from the weights with `transformers`."""

import re
from typing import Any

import pytest

from tests.shared import shared

pytestmark = pytest.mark.filterwarnings("default")  # its warnings are its own

CLOSE = 1e-3


@pytest.fixture(scope="module")
def models(stories_url: str) -> tuple[Any, Any]:
    """The harness's own model, and its client of our server."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        pytest.importorskip("lm_eval")
        from lm_eval.models.huggingface import HFLM
        from lm_eval.models.openai_completions import LocalCompletionsAPI

        folder = str(shared("stories260K"))
        theirs = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=4)
        ours = LocalCompletionsAPI(
            base_url=f"{stories_url}/v1/completions",
            model="stories260K",
            tokenizer=folder,
            tokenizer_backend="huggingface",
            batch_size=4,
            max_length=512,
            add_bos_token=True,  # as the tokenizer does it for the other
            max_retries=1,
        )
        return theirs, ours


def instances(kind: str, arguments: list[tuple[str, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, place) for place, each in enumerate(arguments)]


def test_log_likelihoods_of_continuations(models: tuple[Any, Any]) -> None:
    theirs, ours = models
    text = shared("text/tiny.txt").read_text()
    sentences = re.findall(r"[A-Z][^.!?]{20,160}[.!?]", text)[:24]
    asked = [(sentence[: len(sentence) // 2], sentence[len(sentence) // 2 :]) for sentence in sentences]
    asked.append(("Once upon a time, there was a little girl named", " Lily. She loved to play outside in the"))
    expected = theirs.loglikelihood(instances("loglikelihood", asked))
    found = ours.loglikelihood(instances("loglikelihood", asked))
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=CLOSE)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert expected[-1][1] and not all(greedy for _, greedy in expected)


def test_the_likelihood_of_a_long_text(models: tuple[Any, Any]) -> None:
    """Measures perplexity in one window, since the client and the backend split longer texts differently."""
    theirs, ours = models
    asked: list[tuple[str, ...]] = [(shared("text/tiny.txt").read_text()[:900],)]
    [expected] = theirs.loglikelihood_rolling(instances("loglikelihood_rolling", asked))
    [found] = ours.loglikelihood_rolling(instances("loglikelihood_rolling", asked))
    assert found == pytest.approx(expected, rel=CLOSE) and expected < -300
