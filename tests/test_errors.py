"""The tree in the docstring of errors.py is complete."""

import re

from localllm import errors


def test_every_error_stands_in_the_docstring_with_its_code_and_status() -> None:
    documented = {
        name: (int(code), int(status))
        for name, code, status in re.findall(r"(\w+)\s+exit (\d+)\s+(\d{3})", errors.__doc__ or "")
    }
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.LocalLLMError)
    ]
    assert documented == {kind.__name__: (kind.exit_code, kind.http_status) for kind in kinds}


def test_an_error_is_one_sentence_with_its_remedy() -> None:
    error = errors.ContextOverflow(100, 64, "give --context 200")
    assert str(error) == "the prompt has 100 tokens and the context holds 64; give --context 200"
