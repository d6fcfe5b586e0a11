"""The patterns that split text for byte-level BPE, by their GGUF names in `tokenizer.ggml.pre`.

A pattern splits the text into its matches and the parts between them; the next one splits these again. Patterns
are from the models' own tokenizer.json where llama.cpp only approximates them (`gpt-4o`, `tekken`, `kimi-k2`),
otherwise from llama.cpp (src/llama-vocab.cpp, `llm_tokenizer_bpe`). Characters beyond ASCII are escaped.
"""

from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BREAKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_ENGLISH}\p{{N}}{{1,3}}|{_PUNCTUATION}|{_BREAKS}"
QWEN2 = rf"{_ENGLISH}\p{{N}}|{_PUNCTUATION}|{_BREAKS}"
QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BREAKS}"
)


def _cased(suffix: str, digits: str, beyond: str = "") -> str:
    """Return a pattern for words that end where lower case turns to upper case.

    suffix: may follow a word; beyond: excluded from the letters
    """
    before = r"[^\r\n\p{L}\p{N}]?"
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{beyond}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{beyond}]"
    words = f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
    punctuation = _PUNCTUATION if beyond else r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    return f"{words}|{digits}|{punctuation}|{_BREAKS}"


TEKKEN = _cased("", r"\p{N}")
O200K = _cased(f"{_CONTRACTION}?", r"\p{N}{1,3}")
KIMI = r"\p{Han}+|" + _cased(f"{_CONTRACTION}?", r"\p{N}{1,3}", r"&&[^\p{Han}]")

_HAN_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_HAN_HANGUL = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_SYMBOL_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK_LETTERS = (
    r"\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}"
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}"
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}"
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}"
    r"\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}"
    r"\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}"
    r"\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}"
    r"\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}"
    r"\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}"
    r"\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}"
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}"
)
_YOUTU_SCRIPTS = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+"
    rf"|[\x{{3105}}-\x{{312F}}]+|{_HAN_KANA}"
)
_NO_PUNCTUATION = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = rf"{_ENGLISH}\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BREAKS}"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """ignore_merges: a word that is a token is not merged; adds_bos: BOS is added by default."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_DIGIT_GPT2 = PreTokenizer((r"\p{N}", GPT2))
_PLAIN_GPT2 = PreTokenizer((GPT2,))
_PLAIN_LLAMA3 = PreTokenizer((LLAMA3,))
_PLAIN_QWEN2 = PreTokenizer((QWEN2,))
_BEGUN_LLAMA3 = PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True)
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, rf"{_SYMBOL_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BREAKS}"))
_O200K = PreTokenizer((O200K,))
_BAILING_MOE = PreTokenizer((_BAILING,))
_BLOOM = PreTokenizer((_NO_PUNCTUATION,))

DEFAULT = "default"  # if a file names none

PRE_TOKENIZERS = {
    DEFAULT: PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "a.x-4.0": _PLAIN_GPT2,
    "bailingmoe": _BAILING_MOE,
    "bailingmoe2": _BAILING_MOE,
    "bloom": _BLOOM,
    "chatglm-bpe": _PLAIN_LLAMA3,
    "codeshell": _DIGIT_GPT2,
    "command-r": _DIGIT_GPT2,
    "dbrx": _PLAIN_LLAMA3,
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[A-Za-z{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
            r"\s+$",
            _HAN_HANGUL,
            r"\p{N}+",
        )
    ),
    "deepseek-r1-qwen": _PLAIN_QWEN2,
    "deepseek-v3": _DEEPSEEK_V3,
    "exaone": _DIGIT_GPT2,
    "exaone-moe": PreTokenizer((_EXAONE_MOE,)),
    "exaone4": _PLAIN_GPT2,
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]")),
    "falcon-h1": _BEGUN_LLAMA3,
    "falcon3": _BEGUN_LLAMA3,
    "gigachat": _PLAIN_GPT2,
    "glm4": PreTokenizer((LLAMA3,), ignore_merges=True),
    "glm5": PreTokenizer((LLAMA3,), ignore_merges=True),
    "gpt-2": _PLAIN_GPT2,
    "gpt-4o": _O200K,
    "gpt3-finnish": _BLOOM,
    "granite-docling": _PLAIN_GPT2,
    "grok-2": _PLAIN_QWEN2,
    "hunyuan": _PLAIN_QWEN2,
    "hunyuan-dense": _DEEPSEEK_V3,
    "hy_v4": _DEEPSEEK_V3,
    "jais": _PLAIN_GPT2,
    "joyai-llm": _DEEPSEEK_V3,
    "kanana2": _O200K,
    "kimi-k2": PreTokenizer((KIMI,)),
    "kormo": _PLAIN_QWEN2,
    "laguna": PreTokenizer((r"[^\n]+|\n+", QWEN2)),
    "lfm2": _BEGUN_LLAMA3,
    "llada-moe": _BAILING_MOE,
    "llama-bpe": _BEGUN_LLAMA3,
    "llama-v3": _BEGUN_LLAMA3,
    "llama3": _BEGUN_LLAMA3,
    "llama4": _O200K,
    "megrez": _PLAIN_QWEN2,
    "mellum": _PLAIN_GPT2,
    "mellum2": _DIGIT_GPT2,
    "midm-2.0": _BEGUN_LLAMA3,
    "minerva-7b": _DIGIT_GPT2,
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", rf"{_ENGLISH}\p{{N}}+|{_PUNCTUATION}|{_BREAKS}"), ignore_merges=True),
    "minimax-m2": _O200K,
    "mpt": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "pixtral": _BEGUN_LLAMA3,
    "poro-chat": _BLOOM,
    "qwen2": _PLAIN_QWEN2,
    "qwen35": PreTokenizer((QWEN35,)),
    "refact": _DIGIT_GPT2,
    "seed-coder": PreTokenizer((_SEED,)),
    "smaug-bpe": _PLAIN_LLAMA3,
    "smollm": _DIGIT_GPT2,
    "solar-open": _PLAIN_QWEN2,
    "stablelm2": _PLAIN_QWEN2,
    "starcoder": _DIGIT_GPT2,
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, adds_bos=True),
    "trillion": _PLAIN_GPT2,
    "viking": PreTokenizer((_NO_PUNCTUATION, r"\p{N}")),
    "youtu": PreTokenizer((_YOUTU_SCRIPTS, O200K.replace(r"\p{N}{1,3}", r"\p{N}")), ignore_merges=True),
}
