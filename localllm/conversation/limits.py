"""Which limit ended an answer, and what to do about it."""

from localllm.model import ChatModel
from localllm.request import SamplingParams


def cut_as_asked(params: SamplingParams, tokens: int) -> bool:
    """Did max_tokens end an answer of this many tokens?"""
    return params.max_tokens is not None and tokens >= params.max_tokens


def what_cut(model: ChatModel, params: SamplingParams, tokens: int) -> tuple[str, str]:
    """The limit that ended an answer of this many tokens, and what to do about it."""
    if cut_as_asked(params, tokens):
        return f"max_tokens ({params.max_tokens})", "raise max_tokens to let it go on"
    return f"the context ({model.context} tokens)", "load the model with a larger --context if it has one"
