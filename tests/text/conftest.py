from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[3] / "shared" / "data"

FOLDERS = {
    "stories260K": "stories260K",
    "tinystories": "TinyStories-656K-hf",
    "llama3": "llama3.2-bpe",
    "qwen3": "tokenizers/qwen3",
    "phi3": "tokenizers/phi-3-mini",
}


@pytest.fixture(scope="session")
def data() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"no real test data in {DATA}")
    return DATA


@pytest.fixture(scope="session")
def folder(data: Path) -> Callable[[str], Path]:
    return lambda name: data / FOLDERS[name]


@pytest.fixture(scope="session")
def tokenizer(folder: Callable[[str], Path]) -> Callable[[str], Tokenizer]:
    opened: dict[str, Tokenizer] = {}

    def of(name: str) -> Tokenizer:
        if name not in opened:
            opened[name] = Tokenizer.from_folder(folder(name))
        return opened[name]

    return of


@pytest.fixture(scope="module")
def qwen3(tokenizer: Callable[[str], Tokenizer]) -> Iterator[ChatTemplate]:
    template = ChatTemplate.from_tokenizer(tokenizer("qwen3"))
    yield template
    template.close()
