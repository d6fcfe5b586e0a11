import contextlib
import io
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
import tokenizers

from localllm.errors import DamagedModel, LocalLLMError, UsageError
from localllm.text import template_process
from localllm.text.messages import convert_tool_arguments
from localllm.text.template import ChatTemplate, TemplateSandbox
from localllm.text.template_process import MAX_ERROR_CHARACTERS, handle_request

NAMES = sorted(path.name for path in (Path(__file__).parents[3] / "shared/data/templates").glob("*.jinja"))
NOT_WITHOUT_TOOLS = [  # they come beside a template for chats without tools
    "CohereForAI-c4ai-command-r-plus-tool_use.jinja",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use.jinja",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja",
]
NOT_WITH_TOOLS = ["llama-cpp-deepseek-r1.jinja"]  # it writes a generator as JSON
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 < 3 & 4?  "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTrue, and not zero."},
    {"role": "user", "content": "Danke, schön 😁"},
]
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "look it up",
    "tool_calls": [
        {
            "id": "abcdef123",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Köln"}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "weather", "content": '{"sky": "grey"}'}
ANSWER = {"role": "assistant", "content": "Grey.", "reasoning_content": "so it is"}
CONVERSATIONS = {
    "one question": MESSAGES[1:2],
    "a system prompt": MESSAGES[:2],
    "two questions": MESSAGES,
    "two questions without a system prompt": MESSAGES[1:],
    "a tool call": [*MESSAGES[:2], CALL, RESULT],
    "a tool call without a system prompt": [MESSAGES[1], CALL, RESULT],
    "a tool call alone": [MESSAGES[1], {key: CALL[key] for key in ("role", "content", "tool_calls")}],
    "a tool call and its answer": [MESSAGES[1], CALL, RESULT, ANSWER, MESSAGES[3]],
    "two tool calls": [MESSAGES[1], {**CALL, "tool_calls": CALL["tool_calls"] * 2}, RESULT, RESULT],
    "thoughts": [MESSAGES[1], ANSWER],
    "thoughts before": [MESSAGES[1], ANSWER, MESSAGES[3]],
    "nothing": [],
}
ARGUMENTS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "enable_thinking": False, "thinking": False},
    {"add_generation_prompt": True, "enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a <city>.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "where"}},
            "required": ["city"],
        },
    },
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[TemplateSandbox]:
    shared = TemplateSandbox()
    yield shared
    shared.close()


@pytest.fixture
def template_of(sandbox: TemplateSandbox) -> Callable[..., ChatTemplate]:
    """Make templates that share one process, since starting one takes longer than a test."""

    def of(source: str, **arguments: Any) -> ChatTemplate:
        template = ChatTemplate({"default": source}, **arguments)
        template._sandbox = sandbox
        return template

    return of


def golden_cases() -> list[Any]:
    path = Path(__file__).parents[3] / "shared/data/templates/goldens/huggingface.js-e2e.json"
    return json.loads(path.read_text()) if path.exists() else []


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: f"{case['group']}-{case['name']}")
def test_golden_texts(case: dict[str, Any], template_of: Any):
    variables = dict(case["data"])
    today = time.strftime("%d %B %Y")
    known = {name: variables.pop(name, None) for name in ("messages", "tools", "documents")}
    # Jamba alone tells a missing one from a false one; transformers always gives one.
    add = variables.pop("add_generation_prompt", "Jamba-Large" in case["name"])
    template = template_of(case["chat_template"])
    text = template.render(
        known["messages"] or [],
        tools=known["tools"],
        documents=known["documents"],
        add_generation_prompt=add,
        arguments=variables,
    ).text
    target = case["target"].replace("10 July 2025", today)  # SmolLM3 writes the date of the day
    # MadeAgents/Hammer2.1 alone does not agree: it writes a dict without tojson, here as Python's repr.
    assert (text == target) == case["matches_python_jinja2"]


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("name", NAMES)
def test_real_templates_write_what_transformers_writes(data: Path, template_of: Any, name: str):
    source = (data / "templates" / name).read_text()
    template = template_of(source, special_tokens=SPECIAL)
    rendered = set()
    for title, messages in CONVERSATIONS.items():
        for tools in (None, [TOOL]):
            for given in ARGUMENTS:
                expected = _expected(source, messages, tools, given)
                if expected is None:
                    with pytest.raises(LocalLLMError, match="the chat template"):
                        _render(template, messages, tools, given)
                else:
                    assert _render(template, messages, tools, given) == expected
                    rendered.add((title, tools is None))
    assert (("one question", True) in rendered) == (name not in NOT_WITHOUT_TOOLS)
    assert (("one question", False) in rendered) == (name not in NOT_WITH_TOOLS)


def _expected(source: str, messages: Any, tools: Any, given: dict[str, Any]) -> str | None:
    """Output of transformers; if the template does not support arguments as objects, with arguments as text."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for chat in (messages, [convert_tool_arguments(message, as_text=True) for message in messages]):
        with contextlib.suppress(jinja2.TemplateError, TypeError, ValueError, KeyError, AssertionError):
            # transformers takes messages as they are, and templates call reasoning by two names
            named = [_with_both_names(message) for message in chat]
            [text], _ = render_jinja_template([named], tools=tools, chat_template=source, **SPECIAL, **given)
            return text
    return None


def _with_both_names(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _render(template: ChatTemplate, messages: Any, tools: Any, given: dict[str, Any]) -> str:
    add = given["add_generation_prompt"]
    arguments = {key: value for key, value in given.items() if key != "add_generation_prompt"}
    return template.render(messages, tools=tools, add_generation_prompt=add, arguments=arguments).text


CHAIN = "".join(f"{{% set v{i + 1} = v{i} ~ v{i} ~ v{i} ~ v{i} %}}" for i in range(30))
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "a loop over a grown list": "{% set l = [1] * 90000 %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",  # noqa: E501
    "a range too long": "{{ range(10**9) | list }}",
    "ranges joined": "{% for i in range(99999) %}{{ range(99999) | join }}{% endfor %}",
    "a long string": "{{ 'x' * 10**10 }}",
    "long output": "{{ 'x' * 10**8 }}",
    "much output": "{% for i in range(99999) %}{{ 'x' * 10**5 }}{% endfor %}",
    "a long list": "{{ [0] * 10**10 }}",
    "a doubling string": "{% set v0 = 'x' * 1000 %}" + CHAIN + "{{ v30 }}",
    "a power": "{{ 10**(10**9) }}",
    "a power printed": "{{ (7**(10**6)) | string | length }}",
    "a shared list as JSON": "{% set ns = namespace(l=[0]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",  # noqa: E501
    "a macro of itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a macro that branches": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",  # noqa: E501
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "the class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the class by attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "the class by map": "{{ ['']|map(attribute='__class__')|list }}",
    "the globals": "{{ raise_exception.__globals__ }}",
    "the globals of a method": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "the class by format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "the class by format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "a wide format": "{{ '{:>9999999999}'.format(1) }}",
    "a wide percent format": "{{ '%9999999999d' % 1 }}",
    "a wide filter": "{{ 'x' | center(9999999999) }}",
    "the namespace": "{% set ns = namespace(__class__=1) %}{% set ns.__init__ = 2 %}{{ ns }}",
    "a list changed": "{{ messages.append(1) }}",
    "the environment": "{{ self._TemplateReference__context.environment }}",
    "another file": "{% include '/etc/passwd' %}",
    "another module": "{% import 'os' as os %}",
    "deep nesting": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "deep brackets": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "a deep expression": "{{ " + "not " * 50_000 + "1 }}",
    "a long expression": "{{ " + "1 + " * 50_000 + "1 }}",
}  # fmt: skip


@pytest.fixture(scope="module")
def endangered() -> Iterator[ChatTemplate]:
    """Run all hostile templates in one process, together with a good one."""
    template = ChatTemplate({"default": "", "tool_use": "{{ messages[0].content }}"})
    yield template
    template.close()


@pytest.mark.quick_every(11)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_an_error_soon(endangered: ChatTemplate, name: str):
    endangered._templates["default"] = HOSTILE[name]
    begin = time.perf_counter()
    with pytest.raises((DamagedModel, UsageError)):
        endangered.render(MESSAGES)
    assert time.perf_counter() - begin < 20  # 0.9 s of CPU time; a busy machine takes longer
    assert endangered.render(MESSAGES, tools=[]).text == "Be brief."


def test_the_error_says_what_was_wrong(template_of: Any):
    def error(source: str) -> str:
        with pytest.raises(LocalLLMError) as caught:
            template_of(source).render(MESSAGES)
        return f"{type(caught.value).__name__}: {caught.value}"

    assert "PromptRefused: the chat template refuses this conversation: only users" in error(
        "{{ raise_exception('only users') }}"
    )
    assert "UsageError: the chat template cannot render this conversation (UndefinedError" in error("{{ a.b.c }}")
    assert "DamagedModel: the chat template is broken (line 1: unexpected" in error("{% if")
    with pytest.raises(UsageError, match="refuses this conversation: no; it may not support system prompts"):
        template_of("{{ raise_exception('no') }}").render(MESSAGES)
    assert "DamagedModel: the chat template ran for too long" in error(HOSTILE["nested loops"])
    assert "DamagedModel: the chat template used too much memory" in error(HOSTILE["a long string"])
    assert "DamagedModel: the chat template is broken (SecurityError" in error(HOSTILE["the globals"])


def test_tools_choose_the_template_for_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    try:
        assert template.render([]).text == "plain"
        assert template.render([], tools=[TOOL]).text == "tools"
    finally:
        template.close()


def test_a_template_is_chosen_by_name():
    template = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "{{ documents[0].text }}"})
    try:
        assert template.render([], tools=[TOOL], arguments={"chat_template": "default"}).text == "plain"
        named = {"chat_template": "rag", "documents": [{"text": "found"}]}
        assert template.render([], arguments=named).text == "found"
        with pytest.raises(UsageError, match="only templates for default, tool_use, rag; name one as"):
            template.render([], arguments={"chat_template": "other"})
    finally:
        template.close()


SETS = {"default": "plain", "tool_use": "tools", "rag": "rag"}


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("names", [["default"], ["default", "tool_use"], ["default", "rag"], list(SETS)], ids=str)
def test_named_sets_are_chosen_from_as_transformers_does(tools: Any, names: list[str]):
    from transformers import PreTrainedTokenizerFast

    templates = {name: SETS[name] for name in names}
    empty = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs = PreTrainedTokenizerFast(tokenizer_object=empty, chat_template=templates)
    template = ChatTemplate(templates)
    try:
        for name in (None, *names):
            expected = theirs.apply_chat_template(MESSAGES, tools=tools, chat_template=name, tokenize=False)
            arguments = {"chat_template": name} if name else {}
            assert template.render(MESSAGES, tools=tools, arguments=arguments).text == expected
    finally:
        template.close()


def test_arguments_of_tool_calls_may_be_json_text(template_of: Any):
    text = [{**CALL, "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "é"}'}}]}]
    objects = [{**CALL, "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é"}}}]}]
    bare = [{**CALL, "tool_calls": [{"name": "f", "arguments": '{"a": "é"}'}]}]
    written = {"| tojson": '{"a": "é"}', "| items | list": "[('a', 'é')]", "+ '!'": '{"a": "é"}!'}
    for call, chats in {"m.tool_calls[0].function": [text, objects], "m.tool_calls[0]": [bare]}.items():
        for source, expected in written.items():
            template = template_of(f"{{% set m = messages[0] %}}{{{{ {call}.arguments {source} }}}}")
            assert [template.render(chat).text for chat in chats] == [expected] * len(chats)
    odd = [{**CALL, "tool_calls": [{"function": {"name": "f", "arguments": "no JSON"}}, "x"]}]
    assert template_of("{{ messages[0].tool_calls }}").render(odd).text.endswith("'no JSON'}}, 'x']")


LONG = "x" * (MAX_ERROR_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("source", "reply"),
    [
        ("  {% if true %}\na\n  {% endif %}\nb{% generation %}c{% endgeneration %}", "text: a\nbc"),
        ("{{ {'b': 'é<', 'a': [1]} | tojson }}", 'text: {"b": "é<", "a": [1]}'),
        ("{{ dict(a=1) }}{{ dict.fromkeys('a', 2) }}", "text: {'a': 1}{'a': 2}"),
        (
            "{% set ns = namespace({'a': 1}, self=2) %}{% set ns.b = 3 %}{{ ns.a }}{{ ns.self }}{{ ns.b }}",
            "text: 123",
        ),
        ("{{ strftime_now('%d.%m.') }}", time.strftime("text: %d.%m.")),
        ("{{ raise_exception('only users') }}", "refused: only users"),
        (f"{{{{ raise_exception('{LONG}') }}}}", f"refused: {LONG[:-1]}"),
        ("a\n{% if", "damaged: line 2: unexpected 'end of template'"),
        ("{{ [].append(1) }}", "damaged: SecurityError: 'append' of a list is forbidden"),
        ("{{ namespace(__class__=1) }}", "damaged: SecurityError: a namespace has no attribute '__class__'"),
        (
            "{% set n = namespace() %}{% set n._a = 1 %}",
            "damaged: SecurityError: a namespace has no attribute '_a'",
        ),
        ("{{ 'x' * 60 }}{{ 'x' * 5 }}", "damaged: OutputTooLong: it produces more than 64 characters"),
        ("{{ range(10**9) }}", "damaged: OverflowError: Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "damaged: RecursionError: maximum recursion"),
        ("{% for i in [] %}" * 30 + "{% endfor %}" * 30, "damaged: SyntaxError: too many statically nested"),
        ("{{ a.b.c }}", "failed: UndefinedError: 'a' is undefined"),
    ],
    ids=lambda text: text[:30],
)
def test_the_process_tells_texts_refusals_failures_and_damage_apart(
    monkeypatch: pytest.MonkeyPatch, source: str, reply: str
):
    monkeypatch.setattr(template_process, "MAX_OUTPUT_CHARACTERS", 64)
    [(outcome, words)] = handle_request({"source": source, "variables": {}}).items()
    assert f"{outcome}: {words}".startswith(reply) and len(words) <= MAX_ERROR_CHARACTERS


def test_the_process_ends_when_memory_does():
    def allocate() -> None:
        raise MemoryError

    with pytest.raises(SystemExit, match="1"):
        handle_request({"source": "{{ f() }}", "variables": {"f": allocate}})


@pytest.mark.parametrize("system", ["Linux", "lower limits", "Windows"])
def test_the_process_is_limited_before_it_answers_a_line(monkeypatch: pytest.MonkeyPatch, system: str):
    stdin = io.BytesIO(
        '{"source": "{{ a }}", "variables": {"a": "é"}}\n{"source": "{% set b = b | d(a) %}"}\n'.encode()
    )
    stdout, events = io.BytesIO(), list[Any]()

    def note(what: int, value: Any) -> None:
        events.append((what, value, stdout.getvalue().count(b"\n")))

    def limit(kind: int, values: Any) -> None:
        note(kind, values)
        if system == "lower limits":
            raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(signal, "signal", note)
    if system == "Windows":
        monkeypatch.setitem(sys.modules, "resource", None)
        monkeypatch.delattr(signal, "setitimer")
    else:
        monkeypatch.setattr(resource, "setrlimit", limit)
        monkeypatch.setattr(signal, "setitimer", note)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=stdin))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=stdout))
    template_process.main()
    ready, *replies = stdout.getvalue().decode().splitlines()
    assert ready == "ready" and list(map(json.loads, replies)) == [{"text": "é"}, {"text": "a b"}]
    ignored = (signal.SIGINT, signal.SIG_IGN, 0)
    sizes = {resource.RLIMIT_AS: 2**29, resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0}
    limits = [(kind, (size, size), 0) for kind, size in sizes.items()]
    times = [(signal.ITIMER_PROF, seconds, lines) for lines in (1, 2) for seconds in (0.9, 0)]
    assert events == [ignored, *([] if system == "Windows" else limits + times)]


@pytest.mark.parametrize("templates", [{}, {"rag": "x"}])
def test_a_model_without_a_template_says_so(templates: dict[str, str]):
    with pytest.raises(UsageError, match=r"this model has .*template"):
        ChatTemplate(templates).render(MESSAGES)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": b"bytes"}],
        [{"role": "user", "content": {1, 2}}],
        ["text"],
        [{"role": "user", "content": nested(700)}],
        [{"role": "user", "content": nested(100_000)}],
    ],
)
def test_invalid_json_is_rejected(template_of: Any, messages: Any):
    with pytest.raises(UsageError):
        template_of("{{ messages }}").render(messages)


def test_arguments_go_before_special_tokens(template_of: Any):
    template = template_of("{{ bos_token }}{{ eos_token }}", special_tokens={"bos_token": "a", "eos_token": "b"})
    assert template.render([], arguments={"eos_token": "c"}).text == "ac"


def test_template_variables(template_of: Any):
    def write(source: str) -> str:
        return template_of(source).render(MESSAGES).text

    assert write("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert write("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert write("{{ {'b': 1, 'a': 1} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 1,\n "b": 1\n}'
    assert write("{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}x{% endfor %}") == "xx"
    assert write("a{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}") == "a1"
    assert write("{{ tools is none and documents is none }} {{ add_generation_prompt }}") == "True True"
    assert write("{{ dict(a=1) }}{{ dict.fromkeys('a') }}") == "{'a': 1}{'a': None}"


def arguments_of(template: ChatTemplate, think: bool | None, **given: Any) -> Any:
    try:
        return template.template_arguments(given, think=think)
    except UsageError as error:
        return str(error)


NO_SWITCH = "the chat template has no switch for thinking"


def test_a_call_of_gpt_oss_may_have_thoughts_and_words(data: Path, template_of: Any):
    template = template_of((data / "templates/openai-gpt-oss-120b.jinja").read_text(), special_tokens=SPECIAL)
    text = template.render([MESSAGES[1], CALL | {"content": "I look."}, RESULT]).text
    assert "<|channel|>analysis<|message|>I look.<|end|>" in text
    assert "<|channel|>analysis<|message|>look it up<|end|>" in template.render([MESSAGES[1], CALL, RESULT]).text


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}),
        ("HuggingFaceTB-SmolLM3-3B", {"enable_thinking": False}),
        ("gemma4_31b_chat_template", {"enable_thinking": False}),
        ("deepseek-ai-DeepSeek-V3.1", {"enable_thinking": False, "thinking": False}),
        ("ibm-granite-granite-3.3-2B-Instruct", {"thinking": False}),
        ("openai-gpt-oss-120b", f"{NO_SWITCH}; reasoning_effort=low makes it shorter"),
        ("Qwen-Qwen2.5-7B-Instruct", NO_SWITCH),
        ("unsloth-Apriel-1.5", NO_SWITCH),  # it speaks of thinking, and of a message's, and reads no such argument
    ],
)
def test_thinking_is_switched_by_the_templates_argument(data: Path, template_of: Any, name: str, off: Any):
    template = template_of((data / "templates" / f"{name}.jinja").read_text(), special_tokens=SPECIAL)
    on = {switch: True for switch in off} if isinstance(off, dict) else {} if "low" in off else off
    assert arguments_of(template, False) == off
    assert arguments_of(template, True) == on
    assert arguments_of(template, None) == {}


def test_an_argument_that_a_template_does_not_read_is_refused(data: Path, template_of: Any):
    def refusal(source: str, **given: Any) -> Any:
        return arguments_of(template_of(source, special_tokens=SPECIAL), None, **given)

    assert refusal("{% if a is not defined %}{% set a = 1 %}{% endif %}{{ a }}{{ b }}", a=1, b=2) == {
        "a": 1,
        "b": 2,
    }
    assert refusal("{% set a = 1 %}{{ a }}", a=2) == "the chat template does not read a; it reads none at all"
    assert refusal("{{ c }}{{ bos_token }}{{ messages }}", d=1) == "the chat template does not read d; it reads c"
    assert refusal("x", documents=[], chat_template="default") == {"documents": [], "chat_template": "default"}
    with pytest.raises(DamagedModel, match="line 1"):
        template_of("{% if").template_arguments({"a": 1})
    qwen = (data / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
    assert refusal(qwen, enable_thinking=False) == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("source", "is_read"),
    [
        ("{% set depth = depth or 1 %}{{ depth }}", True),
        ("{% if not depth %}{% set depth = 1 %}{% endif %}{{ depth }}", True),
        ("{% set depth = depth | default(1) %}", True),
        ("{% set depth = 1 %}{{ depth }}", False),
        ("{% if a %}{% set depth = 1 %}{% endif %}{% if depth %}{% set depth = 2 %}{% endif %}", False),
        ("{% for depth in (1, 2) %}{{ depth }}{% endfor %}", False),
    ],
)
def test_a_name_that_a_template_sets_is_an_argument_where_it_is_read_before(
    template_of: Any, source: str, is_read: bool
):
    template = template_of(source)
    if is_read:
        assert template.template_arguments({"depth": 3}) == {"depth": 3}
    else:
        with pytest.raises(UsageError, match="does not read depth"):
            template.template_arguments({"depth": 3})


def test_tools_that_a_template_does_not_read_are_refused(data: Path, template_of: Any):
    template = template_of((data / "templates/google-gemma-2-2b-it.jinja").read_text())
    with pytest.raises(UsageError, match="does not read tools; describe them in the system prompt"):
        template.template_arguments({}, with_tools=True)
    assert template.template_arguments({}) == {}
    own = template_of((data / "templates/ibm-granite-granite-4.0.jinja").read_text())
    assert own.template_arguments({}, with_tools=True) == {}


@pytest.mark.parametrize("name", [3, True, ["default"], {"default": ""}])
def test_a_name_of_a_template_is_text(template_of: Any, name: Any):
    with pytest.raises(UsageError, match="only templates for default; name one"):
        template_of("x").render([], arguments={"chat_template": name})


def test_the_process_is_replaced_when_it_dies_and_when_it_was_closed(template_of: Any):
    template = template_of("x")
    template.warm_up()
    first = template._sandbox._process
    assert template.render([]).text == "x"
    assert template._sandbox._process is first
    first.kill()
    first.wait()
    assert template.render([]).text == "x"
    template.close()
    template.close()
    assert template.render([]).text == "x"


def test_threads_share_the_process(template_of: Any):
    from concurrent.futures import ThreadPoolExecutor

    template = template_of("{{ messages[0].content }}")
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda n: template.render([{"content": str(n)}]).text, range(200)))
    assert texts == list(map(str, range(200)))


def test_an_interrupt_in_the_middle_leaves_no_answer_behind(template_of: Any, monkeypatch: pytest.MonkeyPatch):
    def interrupt(file: int, count: int) -> bytes:
        raise KeyboardInterrupt

    template = template_of("{{ messages[0].content }}")
    template.render([{"content": "old"}])
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("localllm.text.template.os.read", interrupt)
        template.render([{"content": "interrupted"}])
    assert template.render([{"content": "new"}]).text == "new"


def test_ctrl_c_does_not_end_the_process(template_of: Any):
    template = template_of("x")
    template.render([])
    process = template._sandbox._process
    process.send_signal(signal.SIGINT)
    assert template.render([]).text == "x"
    assert template._sandbox._process is process


def test_the_process_dies_with_its_parent():
    program = (
        "import os, signal\n"
        "from localllm.text.template import ChatTemplate\n"
        "template = ChatTemplate({'default': 'x'})\n"
        "template.render([])\n"
        "print(template._sandbox._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    process = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(100):
        if not process.exists() or process.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the process for templates outlived its parent")


def test_neither_torch_nor_transformers_is_loaded():
    program = (
        "import sys, localllm.text.template, localllm.text.detokenizer, localllm.text.detokenizer\n"
        "sys.exit(bool({'torch', 'transformers', 'jinja2'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True)
