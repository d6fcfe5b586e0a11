"""Exports a conversation as Markdown or JSON. docs/cli.md describes the fields of the JSON.

Exports one branch, or every turn of the tree. Independent of files and terminals.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from localllm.conversation.attach import LANGUAGE_PATTERN
from localllm.conversation.chat import Turn
from localllm.conversation.session_file import SavedSession
from localllm.errors import UsageError
from localllm.formatting import fence_text, format_utc
from localllm.request import SamplingParams
from localllm.sampling import params_to_json

FORMATS = ("md", "json")
FENCE_PATTERN = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


def export_text(conversation: SavedSession, file_format: str, *, all_branches: bool = False) -> str:
    """Export the current branch, or every turn. Raises UsageError for a format other than `md` and `json`."""
    if file_format not in FORMATS:
        raise UsageError(f"{file_format!r} is not a supported format", f"use {' or '.join(FORMATS)}")
    turns = list(
        conversation.root.descendants if all_branches else (conversation.current or conversation.root).path
    )
    return as_json(conversation, turns) if file_format == "json" else as_markdown(conversation, turns)


def as_json(conversation: SavedSession, turns: list[Turn]) -> str:
    indices = {turn: index for index, turn in enumerate(turns)}
    content = {
        "title": conversation.title,
        "model": conversation.model,
        "began": format_utc(conversation.began),
        "changed": format_utc(conversation.changed),
        "system": conversation.system,
        "params": params_to_json(conversation.params),
        "template_arguments": conversation.template_arguments,
        "turns": [_turn_to_json(turn, indices) for turn in turns],
        "messages": _messages(conversation),
    }
    return json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def as_markdown(conversation: SavedSession, turns: list[Turn]) -> str:
    """Return front matter, then a heading for each speaker."""
    parts = [_front_matter(conversation), f"# {_escape_heading(conversation.title)}"]
    if conversation.system:
        parts += ["## System", _close_fences(conversation.system)]
    exported = set(turns)
    for turn in turns:
        parts += _turn_to_markdown(turn, [sibling for sibling in turn.siblings if sibling in exported])
    return "\n\n".join(parts) + "\n"


def _turn_to_json(turn: Turn, indices: dict[Turn, int]) -> dict[str, Any]:
    assert turn.parent
    metrics = turn.metrics.as_dict() if turn.metrics else None
    return {
        "parent": indices.get(turn.parent),
        "question": turn.question,
        "attached": [{"name": file.name, "text": file.text} for file in turn.attachments],
        "thoughts": turn.thoughts,
        "answer": turn.answer,
        "model": turn.model,
        "asked": None if turn.asked_at is None else format_utc(turn.asked_at),
        "finish_reason": turn.finish_reason,
        "metrics": metrics,
    }


def _messages(conversation: SavedSession) -> list[dict[str, str]]:
    """Return the branch as messages of chat APIs."""
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    return [*system, *(m for turn in (conversation.current or conversation.root).path for m in turn.messages)]


def _front_matter(conversation: SavedSession) -> str:
    neutral = params_to_json(SamplingParams())
    changed = {k: v for k, v in params_to_json(conversation.params).items() if v != neutral[k]}
    values = {
        "title": conversation.title,
        "model": conversation.model,
        "date": format_utc(conversation.began),
        "parameters": changed,
    }
    # JSON is valid YAML, and its strings need no further quoting.
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def _turn_to_markdown(turn: Turn, siblings: list[Turn]) -> Iterator[str]:
    """Yield the parts of a turn. siblings: the exported alternatives, including the turn"""
    branch = f", branch {siblings.index(turn) + 1} of {len(siblings)}" if len(siblings) > 1 else ""
    yield f"## Question {turn.depth}{branch}"
    yield _close_fences(turn.question)
    for file in turn.attachments:
        ending = file.name.rpartition(".")[2].lower()
        language = ending if LANGUAGE_PATTERN.fullmatch(ending) else ""
        yield f"{_escape_heading(file.name)}:\n\n{fence_text(file.text, language)}"
    yield f"## Answer {turn.depth}{branch}"
    if turn.thoughts.strip():
        yield "\n".join(
            ["> (thinking)", ">", *(f"> {line}".rstrip() for line in turn.thoughts.strip().splitlines())]
        )
    yield _close_fences(turn.answer) if turn.answer.strip() else "(empty)"
    if turn.finish_reason is None:
        yield "(stopped)"


def _escape_heading(text: str) -> str:
    """Return the text in one line, with markup escaped."""
    return re.sub(r"([\\`*_\[\]<>#&])", r"\\\1", " ".join(text.split()))


def _close_fences(text: str) -> str:
    """Close open fences, so that a truncated code block does not include the following text."""
    fence = ""
    for line in text.split("\n"):  # Markdown lines end only here
        if not (match := FENCE_PATTERN.match(line)):
            continue
        marks, rest = match.groups()
        if not fence:
            fence = marks if "`" not in rest or marks[0] == "~" else ""
        elif marks.startswith(fence) and not rest.strip():
            fence = ""
    return f"{text.strip(chr(10))}\n{fence}" if fence else text.strip("\n")
