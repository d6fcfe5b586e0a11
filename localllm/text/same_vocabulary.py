"""Whether two models mean the same tokens by the same ids, so that one can guess for the other."""

from localllm.errors import UsageError
from localllm.text.tokenizer import Tokenizer

MAX_UNSHARED_TOKENS = (
    128  # tokens that only one of them has, as in llama.cpp: editions of a family differ by a few
)


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer, names: tuple[str, str]) -> None:
    """Compares the tokens themselves: neither the names of files nor how texts are cut into tokens.

    names: of both models. Raises UsageError, saying how many differ and which is the first. Tokens that only one
    of them has are never guessed, or never guessed well; of those there may be a few.
    """
    both = max(target.vocab_size, draft.vocab_size)
    pairs = [(target.token(i), draft.token(i)) for i in range(both)]
    differ = [i for i, (one, other) in enumerate(pairs) if one != other and None not in (one, other)]
    unshared = [i for i, pair in enumerate(pairs) if pair.count(None) == 1]
    first = next(iter(differ or unshared), None)
    if first is not None and (differ or len(unshared) > MAX_UNSHARED_TOKENS):
        one, other = (f"{token!r}" if token is not None else "no token" for token in pairs[first])
        count = len(differ) + len(unshared)
        raise UsageError(
            f"{names[1]} speaks another vocabulary than {names[0]}: {count} of {both} tokens differ, first "
            f"{first}, which is {other} and not {one}",
            "name a draft model of the same family",
        )
