"""Literals are marked wherever they are, and long texts without one are not searched token by token."""

import time

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


def test_a_text_without_literals_takes_a_fraction_of_the_search() -> None:
    marker = LiteralMarker(LITERALS)
    text = "the quick brown fox jumps " * 20_000

    def seconds(text: str) -> float:
        start = time.process_time()
        marker.mark(text, MARKS)
        return time.process_time() - start

    assert min(seconds(text) for _ in range(3)) < 0.2 * min(seconds(text + "<s>") for _ in range(3))
