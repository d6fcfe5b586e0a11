"""Builds the tokenizer that a GGUF file's metadata describes.

Defaults of missing keys follow llama.cpp (src/llama-vocab.cpp), the format's reference.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from localllm.errors import UnsupportedModel
from localllm.files import damaged_file
from localllm.text.backends import (
    SpaceNormalization,
    build_byte_level_bpe,
    build_character_bpe,
    build_score_bpe,
    build_unigram,
    build_word_piece,
    find_byte_aliases,
)
from localllm.text.folder import END_TOKENS, MESSAGE_END, find_end_tokens
from localllm.text.pretokenizers import DEFAULT, PRE_TOKENIZERS
from localllm.text.vocabulary import (
    ADDED_TYPES,
    TokenizerDescription,
    TokenType,
    Vocabulary,
    check_vocabulary,
    register_added_tokens,
    set_bos_eos,
)

ValueT = TypeVar("ValueT")

MODELS = ("llama", "gpt2", "gemma4", "t5", "bert")
DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},  # Falcon's <|endoftext|>; in other vocabularies 11 may be a comma
    "t5": {"eos": 1, "unknown": 2, "padding": 0},
    "gemma4": {},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
}
SPECIAL_TOKEN_KEYS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # as spelled in the format
    "mask_token": "mask",
}
MISSING_ID = 2**32 - 1  # -1, which some converters write for "none"
# Phi-3's other added tokens strip whitespace after them.
PHI3_UNSTRIPPED_TOKENS = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def read_gguf_tokenizer(metadata: Mapping[str, Any], file: Path) -> TokenizerDescription:
    """Build the tokenizer of a GGUF file.

    Raises DamagedModel for keys of a wrong type or that contradict each other, and UnsupportedModel for an
    unsupported model or pre-tokenizer; exceptions of the Rust library are not caught.
    """
    return _Metadata(metadata, file).build()


class _Metadata:
    """The keys of `tokenizer.`, each checked when it is read."""

    def __init__(self, metadata: Mapping[str, Any], file: Path):
        self._metadata = metadata
        self._file = file
        self._model = self._get("ggml.model", str)
        if self._model not in MODELS:
            raise UnsupportedModel(
                f"the tokenizer of {file} has type {self._model!r}",
                f"these are supported: {', '.join(MODELS)}",
            )
        self._vocabulary = self._read_vocabulary()
        self._ids = {name: self._id(name) for name in (*SPECIAL_TOKEN_KEYS.values(), "eot", "eom")}

    def build(self) -> TokenizerDescription:
        ending = self._ending()
        types = list(self._vocabulary.types)
        for token in ending:
            if self._vocabulary.tokens[token] in END_TOKENS:  # some converters mark them as normal
                types[token] = TokenType.CONTROL
        vocabulary = replace(self._vocabulary, types=types, added_token_options=self._matching())
        backend, begins, ends = self._backend(vocabulary, ending)
        register_added_tokens(backend, vocabulary)
        last = "seperator" if self._model == "bert" else "eos"
        begin, end = self._around("bos", begins), self._around(last, ends)
        set_bos_eos(backend, begin, end)
        literals = {name: vocabulary.literal(self._ids[key]) for name, key in SPECIAL_TOKEN_KEYS.items()}
        return TokenizerDescription(
            self._file,
            backend,
            {name: literal for name, literal in literals.items() if literal},
            self._chat_templates(),
            ending,
            vocabulary.aliases | (find_byte_aliases(vocabulary) if self._model == "gpt2" else {}),
        )

    def _backend(self, vocabulary: Vocabulary, ending: Collection[int]) -> tuple[tokenizers.Tokenizer, bool, bool]:
        """Return the tokenizer, and whether BOS and EOS are added by default."""
        unknown = vocabulary.literal(self._ids["unknown"])
        if self._ids["unknown"] in ending:
            # An end token that was named only for lack of another; it would end texts with unknown characters.
            unknown = None
        if self._model == "gpt2":
            name = self._get("ggml.pre", str, "") or DEFAULT
            if name not in PRE_TOKENIZERS:
                raise UnsupportedModel(
                    f"{self._file} names the pre-tokenizer {name!r}",
                    f"these are supported: {', '.join(PRE_TOKENIZERS)}",
                )
            pre_tokenizer = PRE_TOKENIZERS[name]
            return (
                build_byte_level_bpe(vocabulary, self._merges(), pre_tokenizer, unknown),
                pre_tokenizer.adds_bos,
                False,
            )
        if self._model == "gemma4":
            return (
                build_character_bpe(
                    vocabulary, self._merges(), unknown, SpaceNormalization(add_prefix_space=False)
                ),
                True,
                False,
            )
        if self._model == "bert":
            if unknown is None:
                raise damaged_file(self._file, "its vocabulary of word pieces has no unknown token")
            return build_word_piece(vocabulary, unknown), True, True
        prefix = self._get("ggml.add_space_prefix", bool, True)
        if self._model == "llama":
            return build_score_bpe(vocabulary, unknown, SpaceNormalization(prefix)), True, False
        if self._ids["unknown"] is None:
            raise damaged_file(self._file, "its unigram vocabulary has no unknown token")
        collapse_spaces = self._get("ggml.remove_extra_whitespaces", bool, False)
        spacing = SpaceNormalization(prefix, collapse_spaces, self._bytes("ggml.precompiled_charsmap"))
        return build_unigram(vocabulary, self._ids["unknown"], spacing), False, True

    def _read_vocabulary(self) -> Vocabulary:
        tokens = self._list("ggml.tokens", str)
        types = self._list("ggml.token_type", int, [int(TokenType.NORMAL)] * len(tokens))
        by_scores = self._model in ("llama", "t5")
        scores = self._list("ggml.scores", (int, float), ... if by_scores else [0.0] * len(tokens))
        return check_vocabulary(Vocabulary(tokens, types, scores), self._file)

    def _merges(self) -> list[tuple[str, str]]:
        halves = (merge.partition(" ") for merge in self._list("ggml.merges", str))
        merges = [(left, right) for left, _, right in halves]
        if not all(map(all, merges)):
            raise damaged_file(self._file, "it has merges that are not two tokens")
        return merges

    def _id(self, name: str) -> int | None:
        key = f"ggml.{name}_token_id"
        token = self._get(key, int, MISSING_ID)
        count = len(self._vocabulary.tokens)
        if token == MISSING_ID:
            default = DEFAULT_IDS[self._model].get(name)
            control = default is not None and default < count and self._vocabulary.types[default] in ADDED_TYPES
            return default if control else None
        if not 0 <= token < count:
            raise damaged_file(self._file, f"tokenizer.{key} is {token}, but there are {count} tokens")
        return token

    def _around(self, name: str, default: bool) -> tuple[str, int] | None:
        """Return the token added before or after each text, and its id."""
        key = f"ggml.add_{name}_token"
        is_added = self._get(key, bool, None)
        if self._model == "gemma4" and name == "bos":
            is_added = True  # early conversions set false, but the model needs it
        token = self._ids[name]
        literal = self._vocabulary.literal(token)
        if token is not None and literal:
            return (literal, token) if (default if is_added is None else is_added) else None
        if is_added:
            raise damaged_file(self._file, f"tokenizer.{key} is true, but there is no such token")
        return None

    def _ending(self) -> tuple[int, ...]:
        ids = self._vocabulary.ids  # no key lists the tokens that end an answer
        end_tokens = find_end_tokens(ids)
        # gpt-oss files may name the end of a message, several of which are in an answer.
        message_end = None if MESSAGE_END in end_tokens else ids.get(MESSAGE_END)
        ids_from_keys = [self._ids[name] for name in ("eos", "eot", "eom")]
        named_ids = [token for token in ids_from_keys if token not in (None, message_end)]
        return tuple(dict.fromkeys([*named_ids, *sorted(ids[end] for end in end_tokens)]))

    def _matching(self) -> dict[str, dict[str, bool]]:
        """Return options of Phi-3's tokens that strip whitespace; like llama.cpp, it relies on the model's
        name.
        """
        name = str(self._metadata.get("general.name", "")).lower()
        if "phi-3" not in name and "phi3" not in name:
            return {}
        tokens = zip(self._vocabulary.tokens, self._vocabulary.types, strict=True)
        stripping = (
            token
            for token, token_type in tokens
            if token_type in ADDED_TYPES and token not in PHI3_UNSTRIPPED_TOKENS
        )
        return {token: {"rstrip": True} for token in stripping}

    def _chat_templates(self) -> dict[str, str]:
        names = self._list("chat_templates", str, [])
        keys = {name: f"chat_template.{name}" for name in names}
        if "tokenizer.chat_template" in self._metadata:
            keys["default"] = "chat_template"
        return {name: self._get(key, str) for name, key in keys.items()}

    def _bytes(self, name: str) -> bytes:
        values = self._list(name, int, [])
        if not all(-128 <= byte < 256 for byte in values):  # the format has signed and unsigned bytes
            raise damaged_file(self._file, f"tokenizer.{name} is not made of bytes")
        return bytes(byte % 256 for byte in values)

    def _list(
        self, name: str, kind: type[ValueT] | tuple[type, ...], default: list[ValueT] | Any = ...
    ) -> list[ValueT]:
        values = self._get(name, Sequence, default)
        types = kind if isinstance(kind, tuple) else (kind,)
        if isinstance(values, str) or not set(map(type, values)) <= set(types):
            raise damaged_file(self._file, f"tokenizer.{name} is not a list of {types[0].__name__}")
        return list(values)

    def _get(self, name: str, kind: type[ValueT], default: Any = ...) -> Any:
        """Return the value of `tokenizer.<name>`; without a default, the key is required."""
        value = self._metadata.get(f"tokenizer.{name}", default)
        if value is default and default is not ...:
            return value
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            problem = "is missing" if value is ... else f"is not of type {kind.__name__}"
            raise damaged_file(self._file, f"tokenizer.{name} {problem}")
        return value
