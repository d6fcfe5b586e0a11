import json

import pytest

from localllm.errors import OutputInvalid
from localllm.request import Grammar, GrammarKind
from localllm.text.grammar.result import check

PRICES = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({"type": "array", "items": {"type": "number", "minimum": 0, "multipleOf": 0.01}, "maxItems": 2}),
)
LIST = Grammar(GrammarKind.GBNF, 'root ::= ("- " [^\\n]+ "\\n")+')
KEY = Grammar(GrammarKind.REGEX, r"[a-z]+(=\d+)?")
PAIR = Grammar(GrammarKind.LARK, 'start: WORD ":" WORD\nWORD: /[a-zé]+/')
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
def test_what_was_asked_for_is_let_through(grammar: Grammar, content: str) -> None:
    check(grammar, content)


@pytest.mark.parametrize(
    ("grammar", "content", "said"),
    [
        (PRICES, "[0.3, ", "is not JSON"),
        (PRICES, "[NaN]", "NaN is no JSON"),
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
def test_anything_else_is_told_with_its_place(grammar: Grammar, content: str, said: str) -> None:
    with pytest.raises(OutputInvalid) as caught:
        check(grammar, content)
    assert said in str(caught.value)
