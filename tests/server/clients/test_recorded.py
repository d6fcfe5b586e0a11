"""Request bodies of programs without a client package: Codex CLI, opencode, Claude Code, Open WebUI, Continue.
Written after what these programs publish about their requests.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

import localllm
from localllm.server.logs import IGNORED_HEADER
from tests.scripted import write_scripted
from tests.server.conftest import serving

SAYS = ("Yes", ", I", " will")
PARAMETERS: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "command": {"type": "string", "description": "The command to run"},
        "timeout": {"type": "number"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
LARK = 'start: begin_patch hunk+ end_patch\nbegin_patch: "*** Begin Patch" LF\nend_patch: "*** End Patch" LF?\n'
CODEX: dict[str, Any] = {
    "model": "m",
    "instructions": "You are Codex, a coding agent running in the Codex CLI.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Runs a command in a PTY.", "strict": False,
         "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"],
                        "additionalProperties": False}},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": LARK}},
        {"type": "local_shell"},
        {"type": "namespace", "name": "mcp__files__", "description": "Tools of a server.", "tools": [
            {"type": "function", "name": "read", "description": "Reads a file.", "strict": False,
             "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "auto",
    "prompt_cache_key": "0199-uuid",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "uuid"},
}  # fmt: skip
LATER: list[Any] = [
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}],
     "encrypted_content": None},
    {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}', "call_id": "c1"},
    {"type": "function_call_output", "call_id": "c1", "output": "a.py\n"},
    {"type": "custom_tool_call", "status": "completed", "call_id": "c2", "name": "apply_patch",
     "input": "*** Begin Patch"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": '{"output": "Done"}'},
    {"type": "local_shell_call", "call_id": "c3", "status": "completed",
     "action": {"type": "exec", "command": ["ls"], "timeout_ms": 1000, "working_directory": None, "env": None,
                "user": None}},
    {"type": "function_call_output", "call_id": "c3", "output": [{"type": "input_text", "text": "a.py"}]},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
]  # fmt: skip
OPENCODE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32000,
    "top_p": 1,
    "messages": [
        {"role": "system", "content": "You are opencode, an interactive CLI tool."},
        {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a.py"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "description": "Runs a command",
                                                "parameters": PARAMETERS}}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
CACHED = {"cache_control": {"type": "ephemeral"}}
CLAUDE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 32000,
    "system": [{"type": "text", "text": "You are Claude Code.", **CACHED}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder/>"}, {"type": "text", "text": "Hi",
                                                                                      **CACHED}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"},
                                          {"type": "tool_use", "id": "t1", "name": "Bash",
                                           "input": {"command": "ls"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a.py", **CACHED}]},
    ],
    "tools": [{"name": "Bash", "description": "Runs a command", "input_schema": PARAMETERS},
              {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}  # fmt: skip
OPEN_WEBUI = {
    "model": "m",
    "messages": [{"role": "user", "content": "Hi"}],
    "options": {"temperature": 0, "num_ctx": 256, "num_keep": 2, "use_mmap": True, "think": False},
    "stream": True,
    "keep_alive": "-1",
    "metadata": {"chat_id": "1"},
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server with a model whose template supports tools."""
    folder = write_scripted(tmp_path_factory.mktemp("recorded") / "m", SAYS)
    with localllm.load(folder, device="cpu") as llm, serving(llm) as address:
        yield address


def events(url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[list[Any], str]:
    """Return the streamed events and the names of ignored fields."""
    with httpx2.stream("POST", url + path, json=body, headers=headers or {}) as answer:
        lines = list(answer.iter_lines())
        assert answer.status_code == 200, lines
    data = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    return [json.loads(line) for line in data], answer.headers.get(IGNORED_HEADER, "")


def test_codex(url: str) -> None:
    headers = {"originator": "codex_cli_rs", "session_id": "uuid", "accept": "text/event-stream"}
    told, ignored = events(url, "/v1/responses", CODEX, headers)
    assert told[-1]["type"] == "response.completed"
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == "".join(SAYS)
    assert "response.output_item.done" in [event["type"] for event in told]
    assert sorted(ignored.split(", ")) == [
        "reasoning_effort;changes-answer",
        "text.verbosity;changes-answer",
        "tools[].web_search;changes-answer",
    ]
    told, ignored = events(url, "/v1/responses", CODEX | {"input": [*CODEX["input"], *LATER]})
    assert told[-1]["type"] == "response.completed" and "input[].web_search_call;changes-answer" in ignored


def test_opencode(url: str) -> None:
    told, ignored = events(url, "/v1/chat/completions", OPENCODE)
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in told if one["choices"]) == "".join(
        SAYS
    )
    assert told[-1]["usage"]["completion_tokens"] == len(SAYS) + 1 and not ignored


def test_claude_code(url: str) -> None:
    headers = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14", "anthropic-version": "x"}
    told, ignored = events(url, "/v1/messages?beta=true", CLAUDE, headers)
    assert "".join(
        one["delta"].get("text", "") for one in told if one["type"] == "content_block_delta"
    ) == "".join(SAYS)
    assert told[-1]["type"] == "message_stop"
    assert sorted(ignored.split(", ")) == [
        "context_management;changes-answer",
        "reasoning_effort;changes-answer",
        "tools[].web_search_20250305;changes-answer",
    ]


def test_open_webui(url: str) -> None:
    told, ignored = events(url, "/api/chat", OPEN_WEBUI)
    assert "".join(one["message"]["content"] for one in told) == "".join(SAYS) and told[-1]["done"]
    assert ignored == "metadata, options.think;changes-answer"
