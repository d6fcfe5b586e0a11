"""A tokenizer as the metadata of a GGUF file has it: the keys after `tokenizer.`.

Byte-level BPE becomes the model `gpt2` with the name of its pre-tokenizer, BPE over characters the model `llama`
with scores. Source: llama.cpp's `conversion/base.py` and `src/llama-vocab.cpp`. Knows nothing of weights. No
torch.
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
PREFERRED_PRE_TOKENIZERS = (
    "llama-bpe",
    "qwen2",
    "gpt-2",
    "smollm",
    "tekken",
    "gpt-4o",
)  # of pre-tokenizers alike, what to call them
SPECIAL_TOKEN_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
UNMERGED_SCORE = -1e6  # the score of what no merge makes


def tokenizer_keys(tokenizer: Tokenizer, rows: int, name: str) -> dict[str, Any]:
    """rows: of the embedding, which may be more than the tokens. name: of the model, for errors.

    Raises UnsupportedModel for a tokenizer that the format has no word for.
    """
    form = tokenizer.as_json()
    model, added = form["model"], {token["id"]: token for token in form["added_tokens"]}
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
            int(token_type(token, added.get(i), unknown, bytes_apart=model["byte_fallback"])),
        )
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if is_byte_level(form):
        found: dict[str, Any] = {
            "ggml.model": "gpt2",
            "ggml.pre": pre_tokenizer_name(form, name),
            "ggml.merges": [" ".join(merge) for merge in merges],
        }
    else:
        found = {"ggml.model": "llama", "ggml.pre": "default", "ggml.scores": merge_scores(tokens, merges)}
        found["ggml.add_space_prefix"] = adds_prefix_space(form, name)
    found |= {"ggml.tokens": tokens, "ggml.token_type": types}
    for key, short in SPECIAL_TOKEN_KEYS.items():
        i = ids.get(tokenizer.special_tokens.get(key, ""))
        if i is not None and i < rows:
            found[f"ggml.{short}_token_id"] = i
    around = tokenizer.encode("a")
    found["ggml.add_bos_token"] = around[0] == found.get("ggml.bos_token_id")
    found["ggml.add_eos_token"] = around[-1] == found.get("ggml.eos_token_id")
    return found | template_keys(tokenizer)


def token_type(token: str, added: dict[str, Any] | None, unknown: str | None, *, bytes_apart: bool) -> TokenType:
    if added is not None:
        if token == unknown:
            return TokenType.UNKNOWN
        return TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return TokenType.BYTE if bytes_apart and BYTE_TOKEN.fullmatch(token) else TokenType.NORMAL


def flatten_steps(part: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, however they are nested."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[inner]:
            yield from flatten_steps(step, inner)
    else:
        yield part


def is_byte_level(form: dict[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in flatten_steps(form["pre_tokenizer"], "pretokenizers"))


def pre_tokenizer_name(form: dict[str, Any], name: str) -> str:
    """The name that llama.cpp knows the tokenizer's patterns by."""
    patterns: list[str] = []
    for step in flatten_steps(form["pre_tokenizer"], "pretokenizers"):
        match step["type"]:
            case "Split" if step["behavior"].lower() == "isolated" and not step["invert"]:
                patterns.append(step["pattern"].get("Regex", ""))
            case "Digits" if step["individual_digits"]:
                patterns.append(r"\p{N}")
            case "ByteLevel" if not step["add_prefix_space"]:
                patterns += [GPT2] if step["use_regex"] else []
            case kind:
                raise unsupported_tokenizer(name, f"the pre-tokenizer {kind}")
    changed = [step["type"] for step in flatten_steps(form["normalizer"], "normalizers") if step["type"] != "NFC"]
    if changed:
        raise unsupported_tokenizer(name, f"the normalizer {changed[0]}")
    ignore_merges = form["model"].get("ignore_merges", False)
    for known in (*PREFERRED_PRE_TOKENIZERS, *PRE_TOKENIZERS):
        words = PRE_TOKENIZERS[known]
        if words.patterns == tuple(patterns) and words.ignore_merges == ignore_merges:
            return known
    raise unsupported_tokenizer(name, "patterns that llama.cpp has no name for")


def adds_prefix_space(form: dict[str, Any], name: str) -> bool:
    """Is a space put before a text? Raises UnsupportedModel for any other way to treat spaces."""
    prefix = spaces = False
    for step in (
        *flatten_steps(form["normalizer"], "normalizers"),
        *flatten_steps(form["pre_tokenizer"], "pretokenizers"),
    ):
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                spaces = True
            case {"type": "Metaspace", "replacement": "▁", "split": False}:
                prefix, spaces = step["prepend_scheme"] != "never", True
            case _:
                raise unsupported_tokenizer(name, f"the step {step['type']}")
    if not spaces:
        raise unsupported_tokenizer(name, f"spaces that are not written as {SPACE}")
    return prefix


def merge_scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """SentencePiece merges the pair whose token has the highest score, so scores fall with the order of merges."""
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks) + 1)
    return [
        -float(ranks[token]) if token in ranks else UNMERGED_SCORE if len(token) > 1 else 0.0 for token in tokens
    ]


def template_keys(tokenizer: Tokenizer) -> dict[str, Any]:
    named = dict(tokenizer.chat_templates)
    default = named.pop("default", None)
    found: dict[str, Any] = {"chat_template": default} if default else {}
    if named:
        found["chat_templates"] = sorted(named)
    return found | {f"chat_template.{name}": source for name, source in named.items()}


def unsupported_tokenizer(name: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the tokenizer of {name} has {what}, which GGUF cannot say", "leave out --to gguf: a folder keeps it"
    )
