"""The commands that save and find conversations, and the text format of their lists."""

import time
from itertools import islice

from localllm.conversation.export import FORMATS, export_text
from localllm.conversation.session import Session
from localllm.conversation.sessions import SearchHit, SessionSummary, normalize_title
from localllm.errors import UsageError
from localllm.files import expand_path, write_user_file
from localllm.formatting import format_table

MAX_LISTED = 20  # conversations shown in a list


def title(session: Session, rest: str) -> str:
    if rest:
        session.title = normalize_title(rest)
    return session.snapshot.title or "no title yet: the first question will be used"


def save(session: Session, rest: str) -> str:
    session.save_as(rest)
    return f"saved, including future messages; /load {rest} continues it"


def load(session: Session, rest: str) -> str:
    model_name = session.load(rest).model
    notice = f" (it used {model_name})" if model_name != session.llm.name else ""
    return f"loaded {len(session.chat.messages)} messages{notice}"


def sessions(session: Session, rest: str) -> str:
    found = session.store.list()
    if not found:
        return "no conversation is saved yet"
    more = f"\n{len(found) - MAX_LISTED} more: `localllm chats`" if len(found) > MAX_LISTED else ""
    return f"{format_summaries(found[:MAX_LISTED])}{more}\n/load ID continues one"


def format_summaries(summaries: list[SessionSummary]) -> str:
    """Format conversations as a list."""
    rows = [(summary.id, *_summary_columns(summary)) for summary in summaries]
    return format_table([("ID", "CHANGED", "QUESTIONS", "MODEL", "TITLE"), *rows])


def _summary_columns(summary: SessionSummary) -> tuple[str, ...]:
    if summary.header is None:
        return "-", "-", "-", summary.title
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.header.changed))
    return changed, str(summary.header.questions), summary.header.model, summary.title


def search(session: Session, rest: str) -> str:
    if not rest:
        raise UsageError("/search needs words", "/search WORDS")
    found = list(islice(session.store.search(rest), MAX_LISTED))
    return "\n".join(map(format_hit, found)) if found else "no conversation has all of these words"


def format_hit(hit: SearchHit) -> str:
    """Format a found conversation with the match, in two lines."""
    where = f"question {hit.question}, {hit.part}" if hit.question else hit.part
    return f"{hit.summary.id}  {hit.summary.title}\n    {where}: {hit.before}{hit.match}{hit.after}"


def export(session: Session, rest: str) -> str:
    all_branches, name = rest.startswith("all "), rest.removeprefix("all ").strip()
    path = expand_path(name)
    file_format = path.suffix.removeprefix(".")
    if file_format not in FORMATS:
        raise UsageError("/export needs a Markdown or JSON file", "/export [all] FILE.md or FILE.json")
    if not session.chat.turns and not all_branches:
        raise UsageError("there are no messages yet")
    try:
        write_user_file(
            path, export_text(session.snapshot, file_format, all_branches=all_branches), overwrite=False
        )
    except FileExistsError as error:
        raise UsageError(f"{name} already exists", "use another file") from error
    return f"exported to {name}"
