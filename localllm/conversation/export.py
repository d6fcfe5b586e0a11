"""A conversation for other programs and people: as Markdown, or as JSON. docs/cli.md has the fields of the JSON.

One branch, or every turn of the tree. Knows nothing of files and terminals.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from localllm.conversation.attach import LANGUAGE
from localllm.conversation.fences import fenced
from localllm.conversation.kept import Kept
from localllm.conversation.turn import Turn
from localllm.errors import UsageError
from localllm.params import params_to_json
from localllm.request import SamplingParams
from localllm.units import utc

FORMATS = ("md", "json")
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")


def exported(conversation: Kept, form: str, *, everything: bool = False) -> str:
    """The branch that was last gone on with, or every turn. Raises UsageError for another format than `md` and
    `json`."""
    if form not in FORMATS:
        raise UsageError(f"{form!r} is no format of conversations", f"give {' or '.join(FORMATS)}")
    turns = list(conversation.root.descendants if everything else (conversation.at or conversation.root).path)
    return as_json(conversation, turns) if form == "json" else as_markdown(conversation, turns)


def as_json(conversation: Kept, turns: list[Turn]) -> str:
    places = {turn: place for place, turn in enumerate(turns)}
    content = {
        "title": conversation.title,
        "model": conversation.model,
        "began": utc(conversation.began),
        "changed": utc(conversation.changed),
        "system": conversation.system,
        "params": params_to_json(conversation.params),
        "template_arguments": conversation.template_arguments,
        "turns": [_turn(turn, places) for turn in turns],
        "messages": _messages(conversation),
    }
    return json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def as_markdown(conversation: Kept, turns: list[Turn]) -> str:
    """Front matter, then a heading for each who speaks."""
    parts = [_front_matter(conversation), f"# {_heading(conversation.title)}"]
    if conversation.system:
        parts += ["## System", _closed(conversation.system)]
    told = set(turns)
    for turn in turns:
        parts += _spoken(turn, [way for way in turn.ways if way in told])
    return "\n\n".join(parts) + "\n"


def _turn(turn: Turn, places: dict[Turn, int]) -> dict[str, Any]:
    assert turn.parent
    metrics = turn.metrics.as_dict() if turn.metrics else None
    return {
        "parent": places.get(turn.parent),
        "question": turn.question,
        "attached": [{"name": file.name, "text": file.text} for file in turn.attached],
        "thoughts": turn.thoughts,
        "answer": turn.answer,
        "model": turn.model,
        "asked": None if turn.asked is None else utc(turn.asked),
        "finish_reason": turn.finish_reason,
        "metrics": metrics,
    }


def _messages(conversation: Kept) -> list[dict[str, str]]:
    """Of the branch, in the words of chat APIs."""
    system = [{"role": "system", "content": conversation.system}] if conversation.system else []
    return [*system, *(m for turn in (conversation.at or conversation.root).path for m in turn.messages)]


def _front_matter(conversation: Kept) -> str:
    neutral = params_to_json(SamplingParams())
    changed = {k: v for k, v in params_to_json(conversation.params).items() if v != neutral[k]}
    values = {
        "title": conversation.title,
        "model": conversation.model,
        "date": utc(conversation.began),
        "parameters": changed,
    }
    # JSON is YAML, and needs no rule of its own for quotes and colons.
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    return "\n".join(["---", *lines, "---"])


def _spoken(turn: Turn, shown: list[Turn]) -> Iterator[str]:
    which = f", way {shown.index(turn) + 1} of {len(shown)}" if len(shown) > 1 else ""
    yield f"## Question {turn.depth}{which}"
    yield _closed(turn.question)
    for file in turn.attached:
        ending = file.name.rpartition(".")[2].lower()
        yield f"{_heading(file.name)}:\n\n{fenced(file.text, ending if LANGUAGE.fullmatch(ending) else '')}"
    yield f"## Answer {turn.depth}{which}"
    if turn.thoughts.strip():
        yield "\n".join(
            ["> (thinking)", ">", *(f"> {line}".rstrip() for line in turn.thoughts.strip().splitlines())]
        )
    yield _closed(turn.answer) if turn.answer.strip() else "(nothing)"
    if turn.finish_reason is None:
        yield "(stopped)"


def _heading(text: str) -> str:
    """As it is, in one line: no character of it is markup."""
    return re.sub(r"([\\`*_\[\]<>#&])", r"\\\1", " ".join(text.split()))


def _closed(text: str) -> str:
    """Markdown whose fences are closed, so that what was cut in a block of code does not swallow what follows."""
    fence = ""
    for line in text.split("\n"):  # no other character ends a line of Markdown
        if not (found := FENCE.match(line)):
            continue
        marks, rest = found.groups()
        if not fence:
            fence = marks if "`" not in rest or marks[0] == "~" else ""
        elif marks.startswith(fence) and not rest.strip():
            fence = ""
    return f"{text.strip(chr(10))}\n{fence}" if fence else text.strip("\n")
