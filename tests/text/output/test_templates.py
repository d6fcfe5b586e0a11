"""The router parses a turn as the template wrote it: for every real template, with any split into pieces."""

from typing import Any

import pytest

from localllm.text.output.formats import OutputFormat
from tests.shared import shared
from tests.text.output import turns

REASONING, CONTENT = "look it up", "I say."
HARD = {
    "city": 'New "York"\n2nd line',
    "days": 3,
    "flags": ["a", "b"],
    "where": {"x": 1.5, "s": "q{}"},
    "exact": True,
    "scale": None,
}
SIMPLE = {"city": "Köln", "days": 3}
CASES: dict[str, dict[str, Any]] = {
    "answer": {"content": CONTENT},
    "thought": {"content": CONTENT, "reasoning": REASONING},
    "call": {"reasoning": REASONING, "calls": [("weather", SIMPLE)]},
    "hard": {"calls": [("get_news", HARD)]},
    "two": {"content": CONTENT, "reasoning": REASONING, "calls": [("weather", SIMPLE), ("get_news", HARD)]},
}
ALL = "answer thought call hard two"
NO_REASONING = "answer hard"  # the template forgets reasoning, and so `thought`, `call` and `two` are not whole
WHOLE = {
    "Bielik-11B-v3.0-Instruct": ALL,
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "answer call hard",
    "GLM-4.7-Flash": ALL,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ALL,
    "NVIDIA-Nemotron-Nano-v2": "hard",
    "Qwen-Qwen3-0.6B": ALL,
    "Qwen3.5-4B": ALL,
    "Reka-Edge": ALL,
    "deepseek-ai-DeepSeek-V3.2": ALL,
    "gemma4_31b_chat_template": ALL,
    "gemma4_e2b_chat_template": ALL,
    "glimmer_chat_template": "answer thought call hard",
    "google-gemma-4-31B-it": "answer call hard two",
    "google-gemma-4-31B-it-interleaved": "answer call hard two",
    "laguna_v8_chat_template": ALL,
    "nemotron35_chat_template": ALL,
    "openai-gpt-oss-120b": "answer thought call hard",
    "qwen38_chat_template": ALL,
} | dict.fromkeys(
    [
        "GigaChat3-10B-A1.8B",
        "GigaChat3.1-10B-A1.8B",
        "Mistral-Small-3.2-24B-Instruct-2506",
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
        "Qwen-QwQ-32B",
        "Qwen-Qwen2.5-7B-Instruct",
        "Qwen3-Coder",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "deepseek-ai-DeepSeek-V3.1",
        "ibm-granite-granite-4.0",
        "meetkai-functionary-medium-v3.1",
        "meta-llama-Llama-3.1-8B-Instruct",
        "meta-llama-Llama-3.2-3B-Instruct",
        "meta-llama-Llama-3.3-70B-Instruct",
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "mistralai-Mistral-Nemo-Instruct-2407",
        "moonshotai-Kimi-K2",
        "unsloth-Apriel-1.5",
        "unsloth-mistral-Devstral-Small-2507",
    ],
    NO_REASONING,
)
ANSWERS_ONLY = {  # these templates forget tool calls, too, or cannot write them
    "HuggingFaceTB-SmolLM3-3B",
    "Kimi-K2-Instruct",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
WITHOUT_TURNS = {
    "Apriel-1.6-15b-Thinker-fixed": "its prompt begins a sentence that its history leaves out; see below",
    "CohereForAI-c4ai-command-r-plus-tool_use": "it takes tools of another form",
    "llama-cpp-deepseek-r1": "it writes a generator as JSON",
    "meetkai-functionary-medium-v3.2": "its format is not supported: a call looks like any line of text",
}
TEMPLATES = turns.templates()


def test_every_template_has_its_row():
    assert {*WHOLE, *ANSWERS_ONLY, *WITHOUT_TURNS} == set(TEMPLATES) or not TEMPLATES


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - WITHOUT_TURNS))
def test_turns_written_by_templates_are_parsed_back(name: str):
    source, whole = TEMPLATES[name], []
    for case, given in CASES.items():
        if name == "NVIDIA-Nemotron-Nano-v2" and "content" in given:
            continue  # it writes <think> before every answer of the history, and no </think>
        try:
            prompt, turn = _turn(source, given)
        except ValueError:
            continue
        said = (given.get("reasoning", ""), given.get("content", ""), given.get("calls", []))
        written = (said[0] * (said[0] in turn), said[1] * (said[1] in turn), [c for c in said[2] if c[0] in turn])
        for pieces in turns.cuts(turn):
            reasoning, content, calls = turns.joined(turns.route(turns.router_of(source, prompt), pieces))
            # A space between `Assistant:` and the answer is a part of the answer.
            assert (reasoning, content.strip(), calls) == written, turn
        if written == said:
            whole.append(case)
    assert " ".join(whole) == ("answer" if name in ANSWERS_ONLY else WHOLE[name])


def _turn(source: str, given: dict[str, Any]) -> tuple[str, str]:
    try:
        return turns.cut_turn(source, turns.message(**given))
    except ValueError:
        return turns.cut_turn(source, turns.message(**given, as_text=True))


def test_thoughts_in_parts_of_a_message_come_back():
    source = shared("templates/mistralai-Ministral-3-14B-Reasoning-2512.jinja").read_text()
    parts = [{"type": "thinking", "thinking": REASONING}, {"type": "text", "text": CONTENT}]
    prompt, turn = turns.cut_turn(source, {"role": "assistant", "content": parts})
    assert turn.startswith("[THINK]")
    for pieces in turns.cuts(turn):
        assert turns.joined(turns.route(turns.router_of(source, prompt), pieces)) == (REASONING, CONTENT, [])


def test_a_prompt_that_begins_the_thoughts():
    source = shared("templates/Apriel-1.6-15b-Thinker-fixed.jinja").read_text()
    question = {"role": "user", "content": "Q?"}
    prompt = turns.render(source, [question], generate=True)
    whole = turns.render(source, [question, turns.message(**CASES["two"])], generate=False)
    begun = prompt.removesuffix("Here are my reasoning steps:\n")
    assert begun != prompt and whole.startswith(begun)
    for pieces in turns.cuts(whole[len(begun) :]):
        said = turns.joined(turns.route(turns.router_of(source, prompt), pieces))
        assert said == (REASONING, CONTENT, CASES["two"]["calls"])


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_without_tools_nothing_is_parsed_as_a_call(name: str):
    output = OutputFormat.detect({"default": TEMPLATES[name]}, ())
    if output.channels:
        return
    begin = output.tools.begin[0] if output.tools else "<tool_call>"
    text = f'Write {begin}{{"name": "f", "arguments": {{}}}}, then go on.'
    for pieces in turns.cuts(text):
        assert turns.joined(turns.route(output.make_parser("", ()), pieces)) == ("", text, [])
