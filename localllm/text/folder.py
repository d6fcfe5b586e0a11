"""Reads the files next to tokenizer.json: names of special tokens, and chat templates."""

from collections.abc import Collection, Iterable
from pathlib import Path

from localllm.errors import DamagedModel
from localllm.files import damaged_file, read_json

MAX_TEMPLATE_BYTES = 2**20  # real ones have up to 30,000
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


def read_special_tokens(path: Path) -> dict[str, str]:
    """Return `{"bos_token": "<s>", ...}`; tokenizer_config.json takes precedence over special_tokens_map.json.

    Raises DamagedModel if a file is not a JSON object.
    """
    config = {
        **read_json(path / "special_tokens_map.json"),
        **read_json(path / "tokenizer_config.json"),
    }
    literals: dict[str, str] = {}
    for name, value in config.items():
        literal = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(literal, str):
            literals[name] = literal
    return literals


def read_chat_templates(path: Path) -> dict[str, str]:
    """Return templates by name. Separate files take precedence over tokenizer_config.json, as in `transformers`.

    Raises DamagedModel if a file is too large, not UTF-8, not JSON, or has an unknown structure.
    """
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    files = {name: file for name, file in files.items() if file.is_file()}
    if oversized := next((file for file in files.values() if file.stat().st_size > MAX_TEMPLATE_BYTES), None):
        raise damaged_file(oversized, "it is larger than any chat template")
    try:
        templates = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    except UnicodeDecodeError as error:
        raise DamagedModel(f"a chat template in {path} is not UTF-8: {error}", "fetch the model again") from error
    if templates:
        return templates
    holders = ("tokenizer_config.json", "chat_template.json")
    entries = (read_json(path / name).get("chat_template") for name in holders)
    entry = next(filter(None, entries), None)
    if not entry:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    try:
        templates_by_name = {template["name"]: template["template"] for template in entry}
    except (TypeError, KeyError) as error:
        raise DamagedModel(f"the chat_template of {path} has an unknown form", "fetch the model again") from error
    if not all(isinstance(text, str) for text in (*templates_by_name, *templates_by_name.values())):
        raise DamagedModel(f"the chat_template of {path} has an unknown form", "fetch the model again")
    return templates_by_name


def find_end_tokens(tokens: Collection[str], known: Iterable[str] = END_TOKENS) -> set[str]:
    """Return those of `tokens` that end an answer in any model. known: candidates, by default llama.cpp's list"""
    end_tokens = {token for token in known if token in tokens}
    return end_tokens - {MESSAGE_END} if any(pair <= end_tokens for pair in CALL_END_TOKENS) else end_tokens


def find_turn_end_tokens(templates: Collection[str], added_tokens: Collection[str]) -> set[str]:
    """Return the added tokens that end a turn in a chat template, or begin another speaker's."""
    source = "\n".join(templates)
    return find_end_tokens(
        {token for token in added_tokens if token in source}, (*END_TOKENS, *TEMPLATE_END_TOKENS)
    )
