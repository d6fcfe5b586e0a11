"""The conversations that are kept, newest first: searched by what was said, gone on with, renamed, deleted,
exported.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.worker import get_current_worker

from localllm.conversation.sessions import SearchHit, SessionStore, SessionSummary, normalize_title
from localllm.errors import LocalLLMError
from localllm.formatting import format_bytes, one_line
from localllm.tui.cells import align_left, align_right, truncate
from localllm.tui.dialogs import Confirm, LineInput
from localllm.tui.export_screen import ExportScreen
from localllm.tui.picker import MAX_ROWS, Picker

COLUMN_WIDTHS = (17, 5, 18)  # of the time, the number of questions, the model
COLUMN_ALIGNMENTS = (align_left, align_right, align_left)


@dataclass(frozen=True)
class SessionItem:
    summary: SessionSummary
    hit: SearchHit | None = None  # where the words stand that were looked for


class SessionsScreen(Picker[SessionItem, str]):
    """Gives the id of the conversation to go on with, None where none was chosen."""

    title_text = "Conversations"
    search_hint = "type words that were said …"
    empty_text = "no conversation is kept that has these words"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "rename", "Rename"),
        Binding("ctrl+s", "export", "Export"),
        Binding("ctrl+x", "delete", "Delete", priority=True),
    ]

    def __init__(self, sessions: SessionStore):
        super().__init__()
        self.store = sessions

    def find(self, query: str) -> Sequence[SessionItem]:
        if not query.split():
            return [SessionItem(summary) for summary in self.store.list()]
        worker, found = get_current_worker(), []
        for hit in islice(self.store.search(query), MAX_ROWS + 1):
            found.append(SessionItem(hit.summary, hit))
            if worker.is_cancelled:  # more was typed meanwhile
                break
        return found

    def columns(self, width: int) -> str:
        changed, questions, model = COLUMN_WIDTHS
        return (
            align_left("changed", changed)
            + align_right("asked", questions)
            + "  "
            + align_left("model", model)
            + " title"
        )

    def item_line(self, row: SessionItem, width: int) -> Content:
        head = row.summary.header
        facts = (_format_time(head.changed), str(head.questions), head.model) if head else ("-", "-", "-")
        changed, questions, model = (
            place(text, cells) for place, text, cells in zip(COLUMN_ALIGNMENTS, facts, COLUMN_WIDTHS, strict=True)
        )
        begin = changed + questions + "  " + model + " "
        return Content(begin + truncate(row.summary.title, width - sum(COLUMN_WIDTHS) - 3))

    def details(self, row: SessionItem) -> Content:
        summary, head = row.summary, row.summary.header
        lines = [Content.styled(truncate(summary.title, 400), "bold")]
        if head is None:
            lines.append(Content.styled(truncate(summary.error, 1000), "$error"))
        else:
            lines.append(
                Content(
                    f"{head.questions} questions to {truncate(head.model, 200)}, begun {_format_time(head.began)}"
                )
            )
        if hit := row.hit:
            where = f"question {hit.question}, {hit.part}: " if hit.question else f"{hit.part}: "
            before, match, after = map(one_line, (hit.before, hit.match, hit.after))
            lines.append(Content.assemble((where, "$text-muted"), before, (match, "bold underline"), after))
        lines.append(Content.styled(f"{one_line(summary.id)}, {format_bytes(summary.nbytes)}", "$text-muted"))
        return Content("\n").join(lines)

    def choose(self, row: SessionItem) -> None:
        if row.summary.header is None:
            self.notify(one_line(row.summary.error), severity="error", markup=False)
            return
        self.dismiss(row.summary.id)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A damaged file can be deleted, and no more; None: shown as not to be had now."""
        if action not in ("rename", "export", "delete"):
            return True
        return True if self.selected and (action == "delete" or self.selected.summary.header) else None

    def action_rename(self) -> None:
        if not (row := self.selected):
            return
        name = row.summary.id

        def rename(title: str | None) -> None:
            if title is not None:
                self.run_change(lambda: self.store.rename(name, title))

        self.app.push_screen(
            LineInput("What is it to be called?", one_line(row.summary.title), normalize_title), rename
        )

    def action_delete(self) -> None:
        if not (row := self.selected):
            return
        name = row.summary.id

        def delete(yes: bool | None) -> None:
            if yes:
                self.run_change(lambda: self.store.delete(name))

        question = f"Delete “{truncate(row.summary.title, 120)}”? It cannot be brought back."
        self.app.push_screen(Confirm(question, "Delete", "Keep"), delete)

    def action_export(self) -> None:
        if row := self.selected:
            name = row.summary.id
            self.app.push_screen(ExportScreen(lambda: self.store.read(name)[0], row.summary.title))

    def run_change(self, work: Callable[[], object]) -> None:
        """Do it on a thread, say what went wrong, and look again."""

        def run() -> None:
            try:
                work()
            except LocalLLMError as error:
                self.app.call_from_thread(self.notify, one_line(str(error)), severity="error", markup=False)
            self.app.call_from_thread(self.search)

        self.run_worker(run, thread=True, group="change")


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
