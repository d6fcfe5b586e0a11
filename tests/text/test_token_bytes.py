import pytest
import tokenizers

from localllm.errors import UnsupportedModel
from localllm.text.tokenizer import Tokenizer, token_bytes
from tests.shared import shared

TEXT = 'Größe: 12 €\n\t{"key": [1, "💥"]}  <|im_end|>  naïve 日本 '


@pytest.mark.parametrize("folder", ["stories260K", "llama3.2-bpe", "tokenizers/qwen3", "tokenizers/phi-3-mini"])
def test_the_bytes_of_tokens_joined_are_the_text(folder: str) -> None:
    tokenizer = Tokenizer.from_folder(shared(folder))
    found = tokenizer.token_bytes(tokenizer.vocab_size)
    ids = tokenizer.encode_continuation(TEXT)
    assert b"".join(found[token] for token in ids).decode() == TEXT


def test_rows_without_a_token_have_no_bytes() -> None:
    tokenizer = Tokenizer.from_folder(shared("stories260K"))
    assert tokenizer.token_bytes(520)[512:] == [b""] * 8


@pytest.mark.parametrize("decoder", [None, tokenizers.decoders.WordPiece(), tokenizers.decoders.CTC()])
def test_a_decoder_without_bytes_is_refused(decoder: tokenizers.decoders.Decoder | None) -> None:
    with pytest.raises(UnsupportedModel, match="does not define bytes of tokens"):
        token_bytes(["a"], decoder)
