"""The commands that keep conversations and find them again, and how these are listed as text."""

import time
from itertools import islice

from localllm.conversation.export import FORMATS, export_text
from localllm.conversation.session import Session
from localllm.conversation.sessions import SearchHit, SessionSummary, normalize_title
from localllm.errors import UsageError
from localllm.files import expand_path, write_user_file
from localllm.formatting import format_table

MAX_LISTED = 20  # conversations: a person reads no more of them in passing


def title(session: Session, rest: str) -> str:
    if rest:
        session.title = normalize_title(rest)
    return session.snapshot.title or "no title yet: the first question is one"


def save(session: Session, rest: str) -> str:
    session.save_as(rest)
    return f"saved, also what will be said; /load {rest} brings it back"


def load(session: Session, rest: str) -> str:
    held_with = session.load(rest).model
    other = f" (it was held with {held_with})" if held_with != session.llm.name else ""
    return f"loaded {len(session.chat.messages)} messages{other}"


def sessions(session: Session, rest: str) -> str:
    found = session.store.list()
    if not found:
        return "no conversation is kept yet"
    more = f"\n{len(found) - MAX_LISTED} more: `localllm chats`" if len(found) > MAX_LISTED else ""
    return f"{format_summaries(found[:MAX_LISTED])}{more}\n/load ID goes on with one"


def format_summaries(summaries: list[SessionSummary]) -> str:
    """Conversations as a list shows them."""
    rows = [(one.id, *_summary_columns(one)) for one in summaries]
    return format_table([("ID", "CHANGED", "QUESTIONS", "MODEL", "TITLE"), *rows])


def _summary_columns(one: SessionSummary) -> tuple[str, ...]:
    if one.header is None:
        return "-", "-", "-", one.title
    changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.header.changed))
    return changed, str(one.header.questions), one.header.model, one.title


def search(session: Session, rest: str) -> str:
    if not rest:
        raise UsageError("/search needs to know what", "/search WORDS")
    found = list(islice(session.store.search(rest), MAX_LISTED))
    return "\n".join(map(format_hit, found)) if found else "no conversation has all of these words"


def format_hit(hit: SearchHit) -> str:
    """A conversation that was found, with the place, in two lines."""
    where = f"question {hit.question}, {hit.part}" if hit.question else hit.part
    return f"{hit.summary.id}  {hit.summary.title}\n    {where}: {hit.before}{hit.match}{hit.after}"


def export(session: Session, rest: str) -> str:
    everything, name = rest.startswith("all "), rest.removeprefix("all ").strip()
    path = expand_path(name)
    form = path.suffix.removeprefix(".")
    if form not in FORMATS:
        raise UsageError("/export needs a file of Markdown or JSON", "/export [all] FILE.md or FILE.json")
    if not session.chat.turns and not everything:
        raise UsageError("nothing was said yet")
    try:
        write_user_file(path, export_text(session.snapshot, form, all_branches=everything), overwrite=False)
    except FileExistsError as error:
        raise UsageError(f"{name} is there already", "name another file") from error
    return f"exported to {name}"
