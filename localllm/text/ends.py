"""Which tokens end a model's turn, by its chat template: generation_config.json may be absent or forget some."""

from collections.abc import Collection

# A model that says one of these has come to the end of what it has to say, or begins to speak for somebody else.
ENDS_OF_TURN = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|tool_response>", "<|end|>",
    "<|return|>", "<|call|>", "<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>",
    "<|user|>", "<|observation|>",
)  # fmt: skip


def ends_of_turn(templates: Collection[str], added_tokens: Collection[str]) -> list[str]:
    """Those added tokens of the list above that a template of the model mentions.

    Where answers are messages that end with `<|return|>` (harmony), `<|end|>` ends but one of several.
    """
    written = "\n".join(templates)
    ends = [token for token in ENDS_OF_TURN if token in added_tokens and token in written]
    return [token for token in ends if token != "<|end|>" or "<|return|>" not in ends]
