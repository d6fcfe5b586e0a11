"""Texts of many kinds, and conversions of tokenizer.json to GGUF."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

WORDS = (
    *("hello", " the", "The", "don't", "WE'LL", "naïve", "12345", " 3.14", "foo_bar", "CamelCase", "x==y", "//"),
    *("日本語", "한국어", "हिन्दी", "עברית", "عربي", "ไทย", "é", "e\u0301", "\ufb01", "Ω", "😁", "👨‍👩‍👧", "🏳️‍🌈"),
    *("\u200d", "\ufe0f", "'s", "'S", "\u017f", "▁", "<", "|>", "_", "$", "%", "\\", "``", "ß", "İ", "\u01c6"),
)
PLANES = (
    *((0, 32), (32, 127), (128, 0x800), (0x300, 0x370), (0x800, 0xD800), (0xE000, 0x10000)),
    *((0x1F300, 0x1FA00), (0x10000, 0x110000)),
)
SPACES = (*" \n\t\x0b\x0c\x85\u00a0\u2003\u3000\u2028", "  ", "   ", "\n\n", "\r\n")


def random_texts(seed: int, count: int) -> list[str]:
    """Words, runs of spaces and of letters, control and combining characters, and characters of every plane."""
    draw = random.Random(seed)

    def character() -> str:
        first, last = draw.choice(PLANES)
        return chr(draw.randrange(first, last))

    def piece() -> str:
        kind = draw.random()
        if kind < 0.35:
            return draw.choice(WORDS)
        if kind < 0.55:
            return draw.choice(SPACES) * draw.choice([1, 1, 1, 2, 3, 5, 8, 17])
        if kind < 0.65:
            return draw.choice("aA=-~#*0 \n") * draw.randrange(2, 40)
        return "".join(character() for _ in range(draw.randrange(1, 5)))

    return ["".join(piece() for _ in range(draw.randrange(1, 16))) for _ in range(count)]


def digest(ids: list[list[int]]) -> str:
    """Short digest of the ids of many texts."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def as_metadata(folder: Path, pre: str) -> dict[str, Any]:
    """GGUF metadata converted from a byte-level tokenizer.json."""
    content = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token for token in content["added_tokens"]}
    ids = content["model"]["vocab"] | {token["content"]: i for i, token in added.items()}
    tokens = sorted(ids, key=lambda token: ids[token])
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
        ],
    }
