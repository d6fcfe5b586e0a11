"""`localllm chats`: list, search, export and delete saved conversations."""

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
        choices=("md", "json"),
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
        raise UsageError("WORDs, --export and --rm cannot be combined", "leave out all but one")
    if not export and (form or output or everything):
        raise UsageError("--format, --output and --all apply only to --export", "add --export ID")
    if export:
        if as_json:
            raise UsageError("--json does not apply to --export", "use --export ID --format json")
        _export(sessions, export, form, output, everything)
        return
    out = StdoutWriter()
    if remove:
        ids = dict.fromkeys(map(sessions.resolve, remove))  # all are resolved before the first is deleted
        for session_id in ids:
            sessions.delete(session_id)
        lines = "".join(f"removed {session_id}\n" for session_id in ids)
        out.write(json.dumps([{"id": session_id} for session_id in ids], indent=1) + "\n" if as_json else lines)
    elif word:
        hits = list(sessions.search(" ".join(word)))
        content = json.dumps([_hit_json(hit) for hit in hits], indent=1, ensure_ascii=False) + "\n"
        out.write(content if as_json else "".join(f"{format_hit(hit)}\n" for hit in hits))
        if not hits and not as_json:
            note("no conversation contains all of these words")
    else:
        summaries = sessions.list()
        out.write(
            json.dumps([_summary_json(summary) for summary in summaries], indent=1) + "\n"
            if as_json
            else f"{format_summaries(summaries)}\n"
        )
        for summary in summaries:
            if summary.error:
                note(f"note: {summary.error}")


def _export(sessions: SessionStore, name: str, form: str | None, output: str | None, everything: bool) -> None:
    conversation, _ = sessions.read(sessions.resolve(name))
    path = expand_path(output) if output else None
    default = "json" if path and path.suffix == ".json" else "md"
    text = export_text(conversation, form or default, all_branches=everything)
    if path is None:
        StdoutWriter().write(text)
    else:
        write_user_file(path, text, overwrite=True)


def _summary_json(summary: SessionSummary) -> dict[str, Any]:
    """Object that `--json` prints; docs/cli.md describes its fields."""
    header = summary.header
    return {
        "id": summary.id,
        "title": header.title if header else None,
        "model": header.model if header else None,
        "began": format_utc(header.began) if header else None,
        "changed": format_utc(header.changed) if header else None,
        "questions": header.questions if header else None,
        "bytes": summary.nbytes,
        "fault": summary.error or None,
    }


def _hit_json(hit: SearchHit) -> dict[str, Any]:
    position = {
        "question": hit.question,
        "part": hit.part,
        "before": hit.before,
        "match": hit.match,
        "after": hit.after,
    }
    return _summary_json(hit.summary) | {"place": position}
