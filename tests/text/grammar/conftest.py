from collections.abc import Callable
from pathlib import Path

import pytest

import localllm
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.output.formats import OutputFormat
from localllm.text.tokenizer import Tokenizer

DEMO = Path(localllm.__file__).parent / "boxed" / "demo"


def grammars_of(tokenizer: Tokenizer, size: int | None = None) -> GrammarCompiler:
    output = OutputFormat.detect(tokenizer.chat_templates, tokenizer.added_tokens)
    return GrammarCompiler(tokenizer, size or tokenizer.vocab_size, tokenizer.eos_ids, output)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DEMO)


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return grammars_of(tokenizer)


@pytest.fixture(scope="session")
def of_text(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return tokenizer.encode_continuation
