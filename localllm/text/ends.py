"""Which tokens end an answer by how they are written: files may name one of several, or none."""

from collections.abc import Collection, Iterable

END_TOKENS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>", "<end_of_utterance>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "[e~[", "<｜end▁of▁sentence｜>"),
)
MESSAGE_END = "<|end|>"
CALL_END_TOKENS = (
    {"<|return|>", "<|call|>"},
    {"<|calls|>", "<|flush|>"},
)  # beside these, <|end|> ends a message only
# These end an answer where a template writes them; elsewhere they may be anything.
TEMPLATE_END_TOKENS = ("<|eot|>", "<|END_OF_TURN_TOKEN|>", "<|user|>", "<|observation|>")


def find_end_tokens(tokens: Collection[str], known: Iterable[str] = END_TOKENS) -> set[str]:
    """Those of the tokens that end an answer, whatever model has them; llama.cpp knows the same."""
    written = {token for token in known if token in tokens}
    return written - {MESSAGE_END} if any(pair <= written for pair in CALL_END_TOKENS) else written


def find_turn_end_tokens(templates: Collection[str], added_tokens: Collection[str]) -> set[str]:
    """The added tokens that end a turn in a chat template, or begin that of somebody else."""
    source = "\n".join(templates)
    return find_end_tokens(
        {token for token in added_tokens if token in source}, (*END_TOKENS, *TEMPLATE_END_TOKENS)
    )
