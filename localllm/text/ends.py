"""Finds the tokens that end an answer by their spelling: files may name only one of several, or none."""

from collections.abc import Collection, Iterable

END_TOKENS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>", "<|tool_response>", "<end_of_utterance>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "[e~[", "<｜end▁of▁sentence｜>"),
)
MESSAGE_END = "<|end|>"
# With either of these pairs, <|end|> only ends a message.
CALL_END_TOKENS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
# These end an answer if a template uses them; otherwise their meaning is unknown.
TEMPLATE_END_TOKENS = ("<|eot|>", "<|END_OF_TURN_TOKEN|>", "<|user|>", "<|observation|>")


def find_end_tokens(tokens: Collection[str], known: Iterable[str] = END_TOKENS) -> set[str]:
    """Return the tokens that end an answer in any model; llama.cpp uses the same list."""
    end_tokens = {token for token in known if token in tokens}
    return end_tokens - {MESSAGE_END} if any(pair <= end_tokens for pair in CALL_END_TOKENS) else end_tokens


def find_turn_end_tokens(templates: Collection[str], added_tokens: Collection[str]) -> set[str]:
    """Return the added tokens that end a turn in a chat template, or begin another speaker's."""
    source = "\n".join(templates)
    return find_end_tokens(
        {token for token in added_tokens if token in source}, (*END_TOKENS, *TEMPLATE_END_TOKENS)
    )
