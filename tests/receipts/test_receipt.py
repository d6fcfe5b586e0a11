import dataclasses
import json
from typing import Any

import pytest

from localllm.errors import UsageError
from localllm.receipts.receipt import RECEIPT_VERSION, Answer, Question, Receipt, read, to_json, to_text
from localllm.request import SamplingParams
from localllm.sampling import params_to_json
from tests.cli.fake_engine import MODEL, SETUP

PARAMS = SamplingParams(temperature=0.5, logit_bias={3: float("-inf")}, stop=("x",), seed=7)
QUESTION = Question(({"role": "user", "content": "ü\n"},), None, {"depth": 3}, (1, 2), params_to_json(PARAMS))
RECEIPT = Receipt(MODEL, SETUP, {"linear": ("a", "b")}, QUESTION, Answer((5, 6), "hi", "", "stop"))


@pytest.mark.parametrize(
    "question",
    [
        QUESTION,
        dataclasses.replace(QUESTION, prompt="text", tools=({"type": "function", "n": [1.5, None]},)),
        dataclasses.replace(QUESTION, prompt=None),
    ],
    ids=["messages", "text", "ids"],
)
def test_a_receipt_comes_back_from_its_file(question: Question) -> None:
    receipt = dataclasses.replace(RECEIPT, question=question)
    text = to_text(receipt)
    assert json.loads(text) == json.loads(json.dumps(to_json(receipt)))
    assert read(text, "a") == read(text.encode(), "a") == receipt
    assert read(text, "a").question.sampling_params == PARAMS


def test_the_output_of_run_holds_one() -> None:
    assert read(json.dumps({"model": "m", "text": "hi", "receipt": to_json(RECEIPT)}), "a") == RECEIPT


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"[1]", b"3", b"{}", b'{"version": "1"}', b'{"receipt": 3}', b"[" * 10**5, b'{"a": NaN}'],
    ids=repr,
)
def test_an_invalid_receipt_is_reported(content: bytes) -> None:
    with pytest.raises(UsageError, match=r"^FILE is not (JSON|a receipt)"):
        read(content, "FILE")


def test_a_later_version_is_named() -> None:
    content = json.dumps(to_json(RECEIPT) | {"version": RECEIPT_VERSION + 1, "weather": "fine"})
    with pytest.raises(
        UsageError, match=rf"of version {RECEIPT_VERSION + 1}, but this localllm reads {RECEIPT_VERSION}"
    ):
        read(content, "FILE")


def changed(path: str, value: Any) -> str:
    """The receipt as JSON with another value at this path; `...` removes it."""
    whole = json.loads(to_text(RECEIPT))
    *way, last = path.split(".")
    place = whole
    for name in way:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("setup.threads", "two", "setup.threads"),
        ("setup.threads", 2.5, "setup.threads"),
        ("setup.threads", True, "setup.threads"),
        ("setup.threads", ..., "setup.threads"),
        ("setup.weather", "fine", "setup.weather"),
        ("answer", ..., "answer"),
        ("answer.token_ids", [1, None], "answer.token_ids.1"),
        ("answer.token_ids", [-1], "-1 is not a token id"),
        ("answer.token_ids", [2**31], "2147483648 is not a token id"),
        ("question.token_ids", [10**30], "is not a token id"),
        ("question.prompt", 3, "question.prompt"),
        ("model.files", [{"path": "x"}], "model.files.0"),
        ("kernels", {"linear": "a"}, "kernels.linear"),
        ("question.params", {}, "question.params"),
        ("question.params.temperature", -1, "question.params: temperature is -1"),
        ("question.params.seed", "7", "question.params: seed is '7'"),
        ("question.params.speed", 1, "question.params"),
        ("question.params.logit_bias", {"x": "1"}, "question.params"),
        ("question.params.logit_bias", {"3": "nan"}, "question.params: logit_bias of token 3"),
    ],
)
def test_damage_is_located(path: str, value: Any, named: str) -> None:
    with pytest.raises(UsageError, match="FILE is a damaged receipt") as told:
        read(changed(path, value), "FILE")
    assert named in told.value.message


def test_infinity_is_no_number_of_a_receipt() -> None:
    with pytest.raises(UsageError, match="is not a JSON number"):
        read(to_text(RECEIPT).replace('"threads": 1', '"threads": 1e999'), "FILE")
    with pytest.raises(ValueError, match="JSON compliant"):
        to_text(
            dataclasses.replace(RECEIPT, question=dataclasses.replace(QUESTION, prompt=({"a": float("nan")},)))
        )
