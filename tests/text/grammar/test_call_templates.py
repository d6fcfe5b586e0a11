"""Grammars allow calls exactly as real templates write them, since models are trained on these."""

from typing import Any

import pytest

from localllm.request import ToolUse
from localllm.text.grammar.functions import build_tool_constraint
from localllm.text.output.formats import OutputFormat
from tests.text.grammar.test_calls import END, model
from tests.text.output import turns

CALLS = [("weather", {"city": "Köln", "days": 3}), ("get_news", {"city": "q", "exact": True})]
ONE_ONLY = {  # one call an answer
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
    "glimmer_chat_template",
    "openai-gpt-oss-120b",
    *(f"meta-llama-Llama-{size}-Instruct" for size in ("3.1-8B", "3.2-3B", "3.3-70B")),
}
OTHERWISE = {
    "openai-gpt-oss-120b": "its history has another order of the header than its answers",
    "Reka-Edge": "nothing stands between two calls, where others of its kind have a line end",
    "Kimi-K2-Instruct": "it is refused by the sandbox of transformers",
    "Apriel-1.6-15b-Thinker-fixed": "its prompt begins a sentence that its history leaves out",
    "llama-cpp-deepseek-r1": "it writes a generator as JSON",
}
FLAT = ("city", "days", "exact")  # Gemma writes lists and objects in a way that it cannot be held to
FORGETTING = {"deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "ibm-granite-granite-3.3-2B-Instruct"}
TEMPLATES = {
    name: source
    for name, source in turns.templates().items()
    if (output := OutputFormat.detect({"default": source}, ())).tools or output.channels
}


def turn_of(source: str, calls: list[tuple[str, Any]]) -> tuple[str, str]:
    try:
        return turns.cut_turn(source, turns.message(calls=calls))
    except ValueError:
        return turns.cut_turn(source, turns.message(calls=calls, as_text=True))


def held(tool: dict[str, Any], *, flat: bool, strict: bool) -> dict[str, Any]:
    function = tool["function"]
    properties = function["parameters"]["properties"]
    kept = {key: part for key, part in properties.items() if key in FLAT or not flat}
    return {
        "function": {**function, "strict": strict, "parameters": {**function["parameters"], "properties": kept}}
    }


@pytest.mark.quick_every(2)
@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - OTHERWISE - FORGETTING))
@pytest.mark.parametrize("required", [True, False])
def test_calls_as_templates_write_them_are_allowed(name: str, required: bool) -> None:
    output = OutputFormat.detect({"default": TEMPLATES[name]}, ())
    tokenizer, grammars = model(output)
    strict = [held(tool, flat="gemma" in name, strict=not required) for tool in turns.TOOLS]
    asked = build_tool_constraint(strict, ToolUse(required=required))
    assert asked
    for calls in (CALLS[:1], CALLS[1:], *([] if name in ONE_ONLY else [CALLS])):
        prompt, turn = turn_of(TEMPLATES[name], calls)
        follower = grammars.follow(asked, prompt)
        turn = turn if output.channels else turn.removeprefix("\n\n").removeprefix("\n")
        ids = [*tokenizer.encode(turn, special=False), END]
        allowed = follower.allowed(ids)
        assert allowed == ids, (turn, tokenizer.decode(allowed, skip_special=False))
