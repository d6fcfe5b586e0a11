"""Checks that two models use the same token ids, so that one can draft for the other."""

from localllm.errors import UsageError
from localllm.text.tokenizer import Tokenizer

# Tokens that only one of them has, as in llama.cpp: versions of a family differ slightly.
MAX_UNSHARED_TOKENS = 128


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, names: tuple[str, str]) -> None:
    """Compare the tokens themselves, rather than names of files or how texts are split.

    names: of both models. Raises UsageError with the number of differences and the first. Tokens that only one of
    them has are rarely drafted, so that a few are accepted.
    """
    max_size = max(target.vocab_size, draft.vocab_size)
    pairs = [(target.token(i), draft.token(i)) for i in range(max_size)]
    differ = [
        i
        for i, (target_token, draft_token) in enumerate(pairs)
        if target_token != draft_token and None not in (target_token, draft_token)
    ]
    unshared = [i for i, pair in enumerate(pairs) if pair.count(None) == 1]
    first = next(iter(differ or unshared), None)
    if first is not None and (differ or len(unshared) > MAX_UNSHARED_TOKENS):
        target_token, draft_token = (f"{token!r}" if token is not None else "no token" for token in pairs[first])
        count = len(differ) + len(unshared)
        raise UsageError(
            f"{names[1]} has another vocabulary than {names[0]}: {count} of {max_size} tokens differ, first "
            f"{first}, which is {draft_token} and not {target_token}",
            "name a draft model of the same family",
        )
