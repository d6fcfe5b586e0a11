import json

import pytest

from localllm.errors import OutputInvalid
from localllm.metrics import Stopwatch
from localllm.request import Completion, FinishReason, Grammar, GrammarKind
from localllm.text.grammar.result import check_completion, check_content

PRICES = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "array", "items": {"type": "number", "minimum": 0, "multipleOf": 0.01}, "maxItems": 2}),
)
LIST = Grammar(GrammarKind.GBNF, 'root ::= ("- " [^\\n]+ "\\n")+')
KEY = Grammar(GrammarKind.REGEX, r"[a-z]+(=\d+)?")
PAIR = Grammar(GrammarKind.LARK, 'start: WORD ":" WORD\nWORD: /[a-zé]+/')
TREE = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "additionalProperties": {"$ref": "#"}}')
SLOW = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"anyOf": [{"type": "string", "pattern": "^(a+)+b$"}, {"type": "string", "pattern": "^a+c$"}]}),
)
DATE = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "date"}')


@pytest.mark.parametrize(
    ("grammar", "content"),
    [
        (PRICES, "[0.3, 1]"),
        (PRICES, f"[{'9' * 300}.29]"),
        (PRICES, "[]"),
        (Grammar(GrammarKind.JSON), '{"a": [1e-99999999999999999999]}'),
        (Grammar(GrammarKind.CHOICE, '["a", "b, c"]'), "b, c"),
        (LIST, "- one\n- zwölf\n"),
        (KEY, "a=1"),
        (PAIR, "née:ok"),
        (DATE, '"2024-02-29"'),
    ],
)
def test_valid_results_pass(grammar: Grammar, content: str) -> None:
    check_content(grammar, content)


@pytest.mark.parametrize(
    ("grammar", "content", "said"),
    [
        (PRICES, "[0.3, ", "is not JSON"),
        (PRICES, "[NaN]", "NaN is not JSON"),
        (PRICES, "[1, 2, 3]", "at $"),
        (PRICES, "[1, 0.005]", "at $[1]: Decimal('0.005')"),
        (PRICES, "[1e9999999]", "cannot be checked"),
        (Grammar(GrammarKind.JSON), "[]", "not of type 'object'"),
        (Grammar(GrammarKind.JSON), '{"a": 1} and more', "Extra data"),
        (Grammar(GrammarKind.CHOICE, '["a", "b"]'), "c", "none of 2 choices"),
        (LIST, "- one\n- two", "ends before its gbnf does"),
        (KEY, "a=b", "leaves its regex at byte 2: 'b'"),
        (PAIR, "née:", "ends before"),
        (DATE, '"2023-02-29"', "'2023-02-29' is not a 'date'"),  # which a mask lets come
    ],
)
def test_invalid_results_are_located(grammar: Grammar, content: str, said: str) -> None:
    with pytest.raises(OutputInvalid) as caught:
        check_content(grammar, content)
    assert said in str(caught.value)


def test_deep_nesting_is_reported_as_invalid() -> None:
    with pytest.raises(OutputInvalid, match="nested too deeply"):
        check_content(TREE, '{"a":' * 900 + "{}" + "}" * 900)


def answer(text: str, reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(text, (), reason, Stopwatch(0.0).finish(1, 0, 0), 0, ())


def test_complete_answers_are_checked_and_truncated_ones_not() -> None:
    for of_stranger in (False, True):
        check_completion(None, answer("x"))
        check_completion(PRICES, answer("[1,2]"), untrusted=of_stranger)
        check_completion(PRICES, answer("[1,", FinishReason.LENGTH), untrusted=of_stranger)
        with pytest.raises(OutputInvalid):
            check_completion(PRICES, answer("[1,"), untrusted=of_stranger)


def test_no_pattern_of_a_stranger_takes_for_ever() -> None:
    check_completion(SLOW, answer(json.dumps("a" * 5000 + "c")), untrusted=True)
    with pytest.raises(OutputInvalid, match="at byte"):
        check_completion(SLOW, answer(json.dumps("a" * 5000 + "d")), untrusted=True)
