"""Model turns cut from conversations that their own template wrote: the oracle of the routers."""

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import jinja2

from localllm.request import EventType
from localllm.text.output.formats import OutputFormat
from localllm.text.output.reader import OutputDelta, OutputParser
from tests.shared import DATA

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# Where the engine stops; a router never sees these.
STOPS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|return|>", "<|call|>", "<|end_of_text|>", "</s>",
    "<end_of_turn>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>",
    "<sep>", "</assistant>",
)  # fmt: skip
ENDS = ("<|end|>", "<|message_sep|>", "<SPECIAL_12>")  # these too, as the last of a turn
HIDDEN = ("<|message_sep|>", "<SPECIAL_12>")  # a detokenizer shows no control token that is no markup
THINKING = [
    {**dict.fromkeys(names, value)}
    for value in (True, False)
    for names in (("enable_thinking",), ("thinking",), ("enable_thinking", "thinking"))
]


def tool(name: str) -> dict[str, Any]:
    kinds = {"city": "string", "days": "integer", "flags": "array", "where": "object", "exact": "boolean"}
    properties = {key: {"type": kind, "description": key} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


TOOLS = [tool("weather"), tool("get_news")]


def templates() -> dict[str, str]:
    return {file.stem: file.read_text() for file in sorted((DATA / "templates").glob("*.jinja"))}


def render(source: str, messages: list[dict[str, Any]], *, generate: bool, **arguments: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], _ = render_jinja_template(
        [messages], tools=TOOLS, chat_template=source, add_generation_prompt=generate, **SPECIAL, **arguments
    )
    return text


def cut_turn(source: str, said: dict[str, Any]) -> tuple[str, str]:
    """Return a prompt, and the model's turn after it. Raises ValueError if the template has none."""
    question = {"role": "user", "content": "Q?"}
    prompts, wholes = [], []
    try:
        for arguments in ({}, *THINKING):
            prompts.append(render(source, [question], generate=True, **arguments))
            wholes.append(render(source, [question, said], generate=False, **arguments))
    except (jinja2.TemplateError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    # History may be without the thoughts that a prompt begins.
    prompts += [prompt.rstrip().removesuffix("<think>") for prompt in prompts]
    pairs = [pair for pair in itertools.product(prompts, wholes) if pair[1].startswith(pair[0])]
    if not pairs:
        raise ValueError("the prompt is no beginning of the conversation")
    # The variant that forgets least; of those, the one with the longest prompt.
    prompt, whole = max(pairs, key=lambda pair: (len(kept(said, pair[1][len(pair[0]) :])), len(pair[0])))
    return prompt, without_end(whole[len(prompt) :])


def kept(said: dict[str, Any], turn: str) -> list[str]:
    """Parts of the message that the template wrote."""
    parts = [said.get("reasoning"), said["content"]]
    parts += [call["function"]["name"] for call in said.get("tool_calls", [])]
    return [part for part in parts if isinstance(part, str) and part and part in turn]


def without_end(turn: str) -> str:
    for stop in STOPS:
        turn = turn.partition(stop)[0]
    for end in ENDS:
        turn = turn.rstrip().removesuffix(end)
    for token in HIDDEN:
        turn = turn.replace(token, "")
    return turn


def message(
    *, content: str = "", reasoning: str = "", calls: Sequence[tuple[str, Any]] = (), as_text: bool = False
) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        said |= dict.fromkeys(("reasoning_content", "thinking", "reasoning"), reasoning)
    if calls:
        said["tool_calls"] = [
            {
                "id": f"abcdef{place:03d}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(values) if as_text else values},
            }
            for place, (name, values) in enumerate(calls)
        ]
    return said


def route(router: OutputParser, pieces: list[str]) -> list[OutputDelta]:
    return [delta for piece in pieces for delta in router.push(piece)] + router.finish()


def joined(deltas: list[OutputDelta]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content, and calls with parsed arguments."""
    texts = {kind: "".join(delta.text for delta in deltas if delta.kind is kind) for kind in EventType}
    calls = [(delta.call.name, json.loads(delta.call.arguments)) for delta in deltas if delta.call]
    return texts[EventType.REASONING], texts[EventType.CONTENT], calls


def cuts(text: str, seed: int = 0) -> list[list[str]]:
    """Split the text in three ways: as a whole, by character, and in random pieces."""
    draw = random.Random(seed)
    ways = [[text], list(text)]
    for most in (3, 12):
        places = list(itertools.accumulate(draw.randint(1, most) for _ in text))
        ways.append([text[a:b] for a, b in itertools.pairwise([0, *places]) if a < len(text)])
    assert all("".join(way) == text for way in ways)
    return ways


def router_of(source: str, prompt: str, tools: Any = TOOLS) -> OutputParser:
    return OutputFormat.detect({"default": source}, ()).make_parser(prompt, tools)
