"""Determines which limit ended an answer, and the remedy."""

from localllm.protocol.model import ChatModel
from localllm.request import SamplingParams


def reached_max_tokens(params: SamplingParams, token_count: int) -> bool:
    """Return whether max_tokens ended an answer of this many tokens."""
    return params.max_tokens is not None and token_count >= params.max_tokens


def length_limit(
    model: ChatModel, params: SamplingParams, token_count: int, *, flag: str = "/set max_tokens"
) -> tuple[str, str]:
    """Return the limit that ended an answer of this many tokens, and the remedy. flag: what raises it here"""
    if reached_max_tokens(params, token_count):
        return f"{flag.removeprefix('/set ')} ({params.max_tokens})", f"raise it with {flag} to let it go on"
    return f"the context ({model.context} tokens)", "load the model with a larger --context if it has one"
