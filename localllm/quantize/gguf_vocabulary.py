"""A tokenizer as the metadata of a GGUF file: the keys after `tokenizer.`.

Byte-level BPE becomes the model `gpt2` with the name of its pre-tokenizer, and BPE over characters the model
`llama` with scores. Source: llama.cpp's `conversion/base.py` and `src/llama-vocab.cpp`. No weights, no torch.
"""

import re
from collections.abc import Iterator
from typing import Any

from localllm.errors import UnsupportedModel
from localllm.text.backends import SPACE
from localllm.text.pretokenizers import GPT2, PRE_TOKENIZERS
from localllm.text.tokenizer import Tokenizer
from localllm.text.vocabulary import TokenType

BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
# Preferred names among equivalent pre-tokenizers.
PREFERRED_PRE_TOKENIZERS = ("llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "gpt-4o")
SPECIAL_TOKEN_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
UNMERGED_SCORE = -1e6  # of tokens that no merge produces


def tokenizer_keys(tokenizer: Tokenizer, rows: int, name: str) -> dict[str, Any]:
    """Return the keys. rows: of the embedding, without which a token is left out; name: of the model, for errors.

    Raises UnsupportedModel for a tokenizer that GGUF cannot represent.
    """
    tokenizer_json = tokenizer.as_json()
    model, added = tokenizer_json["model"], {token["id"]: token for token in tokenizer_json["added_tokens"]}
    if model["type"] != "BPE":
        raise unsupported_tokenizer(name, f"a {model['type']} model")
    ids = {token: i for token, i in model["vocab"].items()} | {t["content"]: i for i, t in added.items()}
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types = [int(TokenType.UNUSED)] * rows
    unknown = tokenizer.special_tokens.get("unk_token")
    for token, i in ids.items():
        if i >= rows:
            continue
        tokens[i], types[i] = (
            token,
            int(token_type(token, added.get(i), unknown, has_byte_tokens=model["byte_fallback"])),
        )
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if is_byte_level(tokenizer_json):
        keys: dict[str, Any] = {
            "ggml.model": "gpt2",
            "ggml.pre": pre_tokenizer_name(tokenizer_json, name),
            "ggml.merges": [" ".join(merge) for merge in merges],
        }
    else:
        keys = {"ggml.model": "llama", "ggml.pre": "default", "ggml.scores": merge_scores(tokens, merges)}
        keys["ggml.add_space_prefix"] = adds_prefix_space(tokenizer_json, name)
    keys |= {"ggml.tokens": tokens, "ggml.token_type": types}
    for key, short in SPECIAL_TOKEN_KEYS.items():
        i = ids.get(tokenizer.special_tokens.get(key, ""))
        if i is not None and i < rows:
            keys[f"ggml.{short}_token_id"] = i
    encoded = tokenizer.encode("a")
    keys["ggml.add_bos_token"] = encoded[0] == keys.get("ggml.bos_token_id")
    keys["ggml.add_eos_token"] = encoded[-1] == keys.get("ggml.eos_token_id")
    return keys | template_keys(tokenizer)


def token_type(
    token: str, added: dict[str, Any] | None, unknown: str | None, *, has_byte_tokens: bool
) -> TokenType:
    if added is not None:
        if token == unknown:
            return TokenType.UNKNOWN
        return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return TokenType.BYTE if has_byte_tokens and BYTE_TOKEN.fullmatch(token) else TokenType.NORMAL


def flatten_steps(part: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, however they are nested."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[inner]:
            yield from flatten_steps(step, inner)
    else:
        yield part


def is_byte_level(tokenizer_json: dict[str, Any]) -> bool:
    return any(
        step["type"] == "ByteLevel" for step in flatten_steps(tokenizer_json["pre_tokenizer"], "pretokenizers")
    )


def pre_tokenizer_name(tokenizer_json: dict[str, Any], name: str) -> str:
    """Return llama.cpp's name for the tokenizer's patterns."""
    patterns: list[str] = []
    for step in flatten_steps(tokenizer_json["pre_tokenizer"], "pretokenizers"):
        match step["type"]:
            case "Split" if step["behavior"].lower() == "isolated" and not step["invert"]:
                patterns.append(step["pattern"].get("Regex", ""))
            case "Digits" if step["individual_digits"]:
                patterns.append(r"\p{N}")
            case "ByteLevel" if not step["add_prefix_space"]:
                patterns += [GPT2] if step["use_regex"] else []
            case kind:
                raise unsupported_tokenizer(name, f"the pre-tokenizer {kind}")
    other_steps = [
        step["type"]
        for step in flatten_steps(tokenizer_json["normalizer"], "normalizers")
        if step["type"] != "NFC"
    ]
    if other_steps:
        raise unsupported_tokenizer(name, f"the normalizer {other_steps[0]}")
    ignore_merges = tokenizer_json["model"].get("ignore_merges", False)
    for candidate in (*PREFERRED_PRE_TOKENIZERS, *PRE_TOKENIZERS):
        pre_tokenizer = PRE_TOKENIZERS[candidate]
        if pre_tokenizer.patterns == tuple(patterns) and pre_tokenizer.ignore_merges == ignore_merges:
            return candidate
    raise unsupported_tokenizer(name, "patterns that llama.cpp has no name for")


def adds_prefix_space(tokenizer_json: dict[str, Any], name: str) -> bool:
    """Return whether a space is prepended to a text. Raises UnsupportedModel for other treatments of spaces."""
    adds_prefix = replaces_spaces = False
    for step in (
        *flatten_steps(tokenizer_json["normalizer"], "normalizers"),
        *flatten_steps(tokenizer_json["pre_tokenizer"], "pretokenizers"),
    ):
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                adds_prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                replaces_spaces = True
            case {"type": "Metaspace", "replacement": "▁", "split": False}:
                # It adds none to a text that begins with a space, which GGUF cannot express.
                adds_prefix, replaces_spaces = step["prepend_scheme"] != "never", True
            case _:
                raise unsupported_tokenizer(name, f"the step {step['type']}")
    if not replaces_spaces:
        raise unsupported_tokenizer(name, f"spaces that are not represented as {SPACE}")
    return adds_prefix


def merge_scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Return scores that decrease in the order of merges: SentencePiece merges the pair with the highest score."""
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks) + 1)
    return [
        -float(ranks[token]) if token in ranks else UNMERGED_SCORE if len(token) > 1 else 0.0 for token in tokens
    ]


def template_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    templates = dict(tokenizer.chat_templates)
    default = templates.pop("default", None)
    keys: dict[str, Any] = {"chat_template": default} if default else {}
    if templates:
        keys["chat_templates"] = sorted(templates)
    return keys | {f"chat_template.{name}": source for name, source in templates.items()}


def unsupported_tokenizer(name: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the tokenizer of {name} has {what}, which GGUF cannot represent",
        "leave out --to gguf: a folder keeps it",
    )
