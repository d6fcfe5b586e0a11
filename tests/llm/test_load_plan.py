"""A draft model must share the vocabulary of its target."""

import json
import shutil
from pathlib import Path

import pytest

from localllm.errors import UsageError
from localllm.llm.load_plan import check_same_vocabulary
from localllm.text.tokenizer import Tokenizer
from tests.shared import shared


def edition(folder: Path, **tokens: int) -> Tokenizer:
    """Write a tokenizer with additional tokens."""
    shutil.copy(shared("tokenizers/qwen3") / "tokenizer_config.json", folder)
    described = json.loads((shared("tokenizers/qwen3") / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    described["added_tokens"] += [{"id": id, "content": token, **plain} for token, id in tokens.items()]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return Tokenizer.from_folder(folder)


@pytest.mark.slow
def test_a_few_tokens_more_are_the_same_vocabulary(tmp_path: Path) -> None:
    qwen = Tokenizer.from_folder(shared("tokenizers/qwen3"))
    more = edition(tmp_path, **{"<|more|>": qwen.vocab_size})
    check_same_vocabulary(qwen, more, ("large", "small"))
    check_same_vocabulary(more, qwen, ("large", "small"))


def test_the_first_differing_token_is_reported() -> None:
    stories, tiny = (Tokenizer.from_folder(shared(name)) for name in ("stories260K", "TinyStories-656K-hf"))
    with pytest.raises(UsageError, match=r"the vocabularies of small and large differ: \d+ of 2048 .* first 1,"):
        check_same_vocabulary(stories, tiny, ("large", "small"))
