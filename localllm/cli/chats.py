"""`localllm chats`: kept conversations are listed, searched, exported and deleted."""

import json
from typing import Annotated, Any

import typer

from localllm.cli import options
from localllm.cli.io import StdoutWriter, note
from localllm.conversation.commands import format_hit, format_summaries
from localllm.conversation.export import export_text
from localllm.conversation.sessions import SearchHit, SessionStore, SessionSummary
from localllm.errors import UsageError
from localllm.files import expand_path, write_user_file
from localllm.formatting import format_utc
from localllm.settings import Settings

SearchWords = Annotated[list[str] | None, typer.Argument(metavar="WORD", hidden=True)]
Export = Annotated[str | None, options.option("--export", text="Print a conversation.", metavar="ID")]
ExportFormat = Annotated[
    str | None,
    options.option(
        "--format",
        text="With --export: md or json; default: the extension of FILE, otherwise md.",
        metavar="FORMAT",
    ),
]
Output = Annotated[
    str | None,
    options.option("--output", "-o", text="With --export: write to this file instead of stdout.", metavar="FILE"),
]
AllBranches = Annotated[
    bool, options.switch("--all", text="With --export: include every branch, not only the current one.")
]
Remove = Annotated[
    list[str] | None, options.option("--rm", text="Delete a conversation. Repeatable.", metavar="ID")
]


def chats(
    word: SearchWords = None,
    export: Export = None,
    form: ExportFormat = None,
    output: Output = None,
    everything: AllBranches = False,
    remove: Remove = None,
    as_json: options.JsonList = False,
) -> None:
    """List, search, export or delete saved conversations.

    Without options, list conversations, newest first; with WORDs, only those that contain every WORD. ID is a name
    from the list, the beginning of one, or `last` for the newest. Resume one with `localllm run MODEL --resume
    ID`.
    """
    sessions = SessionStore(Settings.from_environment().home / "chats")
    if sum(map(bool, (word, export, remove))) > 1:
        raise UsageError("WORDs, --export and --rm are each for themselves", "leave out all but one")
    if not export and (form or output or everything):
        raise UsageError("--format, --output and --all are for --export", "add --export ID")
    if export:
        if as_json:
            raise UsageError("--json lists conversations", "write --export ID --format json")
        _export(sessions, export, form, output, everything)
        return
    out = StdoutWriter()
    if remove:
        names = [sessions.resolve(name) for name in remove]  # before anything is removed
        for name in dict.fromkeys(names):
            sessions.delete(name)
        deleted = [{"id": name} for name in dict.fromkeys(names)]
        lines = "".join(f"removed {name['id']}\n" for name in deleted)
        out.write(json.dumps(deleted, indent=1) + "\n" if as_json else lines)
    elif word:
        hits = list(sessions.search(" ".join(word)))
        found = json.dumps([_hit_json(hit) for hit in hits], indent=1, ensure_ascii=False) + "\n"
        out.write(found if as_json else "".join(f"{format_hit(hit)}\n" for hit in hits))
        if not hits and not as_json:
            note("no conversation has all of these words")
    else:
        found = sessions.list()
        out.write(
            json.dumps([_summary_json(one) for one in found], indent=1) + "\n"
            if as_json
            else f"{format_summaries(found)}\n"
        )
        for one in found:
            if one.error:
                note(f"note: {one.error}")


def _export(sessions: SessionStore, name: str, form: str | None, output: str | None, everything: bool) -> None:
    conversation, _ = sessions.read(sessions.resolve(name))
    path = expand_path(output) if output else None
    ending = path.suffix.removeprefix(".") if path else ""
    text = export_text(conversation, form or ("json" if ending == "json" else "md"), all_branches=everything)
    if path is None:
        StdoutWriter().write(text)
        return
    write_user_file(path, text, overwrite=True)


def _summary_json(one: SessionSummary) -> dict[str, Any]:
    """The fields are described in docs/cli.md."""
    head = one.header
    return {
        "id": one.id,
        "title": head.title if head else None,
        "model": head.model if head else None,
        "began": format_utc(head.began) if head else None,
        "changed": format_utc(head.changed) if head else None,
        "questions": head.questions if head else None,
        "bytes": one.nbytes,
        "fault": one.error or None,
    }


def _hit_json(hit: SearchHit) -> dict[str, Any]:
    place = {
        "question": hit.question,
        "part": hit.part,
        "before": hit.before,
        "match": hit.match,
        "after": hit.after,
    }
    return _summary_json(hit.summary) | {"place": place}
