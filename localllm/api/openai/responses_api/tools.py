"""Tools of `/v1/responses`, declared to the model as functions, and the items of its calls.

Coding agents such as Codex send tools other than functions: `custom` takes text, `local_shell` a command, and a
`namespace` contains functions. To the model each is a function; the client gets the item type that belongs to the
tool.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localllm.api.body import StrictModel, validate
from localllm.api.openai.bodies import ignore_tool
from localllm.errors import BadField
from localllm.request import ToolCall

JsonObject = dict[str, Any]

LOCAL_SHELL = "local_shell"
LOCAL_SHELL_FUNCTION: JsonObject = {
    "name": LOCAL_SHELL,
    "description": "Runs a command on the user's machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The command, word by word."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
}
TEXT_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}


class FunctionTool(StrictModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomToolFormat(StrictModel):
    type: str
    syntax: str | None = None
    definition: str | None = None


class CustomTool(StrictModel):
    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomToolFormat | None = None


class LocalShellTool(StrictModel):
    type: Literal["local_shell"]


class NamespaceTool(StrictModel):
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[FunctionTool]


@dataclass(frozen=True)
class DeclaredTool:
    """A function as declared to the model, and the tool that it represents."""

    function: JsonObject
    type: str
    name: str
    namespace: str | None = None


def declare_tools(tools: Any) -> list[DeclaredTool]:
    """Functions for the tools; other types are recorded as ignored. Raises BadField for malformed tools."""
    if not isinstance(tools, list):
        raise BadField("tools", "tools is not a list", "send a list of functions")
    return [declared for index, tool in enumerate(tools) for declared in _declare(tool, index)]


def _declare(tool: Any, index: int) -> list[DeclaredTool]:
    path, tool_type = f"tools.{index}", tool.get("type") if isinstance(tool, Mapping) else None
    match tool_type:
        case "custom":
            custom = validate(CustomTool, tool, path)
            texts = [custom.description or ""]
            if custom.format and custom.format.definition:
                syntax = custom.format.syntax or ""
                texts.append(f"The input must match this {syntax} grammar:\n{custom.format.definition}")
            description = "\n\n".join(filter(None, texts))
            function = {"name": custom.name, "description": description, "parameters": TEXT_PARAMETERS}
            return [DeclaredTool(function, tool_type, custom.name)]
        case "local_shell":
            return [DeclaredTool(LOCAL_SHELL_FUNCTION, tool_type, LOCAL_SHELL)]
        case "namespace":
            namespace = validate(NamespaceTool, tool, path)
            return [
                DeclaredTool(
                    _function(member) | {"name": joined_name(namespace.name, member.name)},
                    "function",
                    member.name,
                    namespace.name,
                )
                for member in namespace.tools
            ]
        case str() if tool_type != "function":
            ignore_tool(tool_type, index)
            return []
    function = validate(FunctionTool, tool, path)
    return [DeclaredTool(_function(function), "function", function.name)]


def _function(tool: FunctionTool) -> JsonObject:
    return tool.model_dump(exclude={"type"}, exclude_none=True)


def joined_name(namespace: str | None, name: str) -> str:
    """Name of a function in a namespace, as declared to the model."""
    return name if not namespace else f"{namespace.rstrip('_')}__{name}"


def call_item(call: ToolCall, tools: list[DeclaredTool]) -> JsonObject:
    """Fields of the item for a call, including its type."""
    tool = next((tool for tool in tools if tool.function["name"] == call.name), None)
    if tool is None:
        return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
    if tool.type == "custom":
        text = json.loads(call.arguments).get("input", "")
        text = text if isinstance(text, str) else json.dumps(text)
        return {"type": "custom_tool_call", "call_id": call.id, "name": tool.name, "input": text}
    if tool.type == LOCAL_SHELL:
        arguments = json.loads(call.arguments)
        command = arguments.get("command", [])
        action = {
            "type": "exec",
            "command": command if isinstance(command, list) else [str(command)],
            "env": {},
            "timeout_ms": arguments.get("timeout_ms"),
            "working_directory": arguments.get("working_directory"),
        }
        return {"type": "local_shell_call", "call_id": call.id, "action": action}
    namespace = {"namespace": tool.namespace} if tool.namespace else {}
    fields = {"call_id": call.id, "name": tool.name, **namespace, "arguments": call.arguments}
    return {"type": "function_call", **fields}
