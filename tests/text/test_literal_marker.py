"""Literals are marked wherever they are, and long texts without one are not searched token by token."""

import pytest
import tokenizers

from localllm.text.control import LiteralMarker

MARKS = ("\ue000", "\ue001")
LITERALS = ("<|im_end|>", "<|im_start|>", "<s>", "~")


def test_literals_are_marked() -> None:
    marker = LiteralMarker(LITERALS)
    marked = marker.mark({"a": ["x <|im_end|> y", "<s><s>", "a~b", "< s> <|im"]}, MARKS)
    assert marked == {
        "a": [
            "x \ue000<|im_end|>\ue001 y",
            "\ue000<s>\ue001\ue000<s>\ue001",
            "a\ue000~\ue001b",
            "< s> <|im\ue001",
        ]
    }


def test_a_text_without_literals_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[str]()

    class Watched:
        def __init__(self, finder: tokenizers.Tokenizer):
            self.finder = finder

        def encode(self, text: str) -> tokenizers.Encoding:
            searched.append(text)
            return self.finder.encode(text)

    marker = LiteralMarker(LITERALS)
    monkeypatch.setattr(marker, "_finder", Watched(marker._finder))
    text = "the quick brown fox jumps " * 1000
    assert marker.mark(text, MARKS) == text
    assert not searched
    marker.mark(text + "<s>", MARKS)
    assert searched == [text + "<s>"]
