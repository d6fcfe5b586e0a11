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

from localllm.conversation.sessions import Hit, Sessions, Summary, as_title
from localllm.errors import LocalLLMError
from localllm.tui.cells import cut, left, right
from localllm.tui.dialogs import Ask, Confirm
from localllm.tui.export_screen import ExportScreen
from localllm.tui.picker import MOST_ROWS, Picker
from localllm.units import size
from localllm.visible import one_line

WIDTHS = (17, 5, 18)  # of the time, the number of questions, the model
PLACES = (left, right, left)


@dataclass(frozen=True)
class Found:
    summary: Summary
    hit: Hit | None = None  # where the words stand that were looked for


class SessionsScreen(Picker[Found, str]):
    """Gives the id of the conversation to go on with, None where none was chosen."""

    title_text = "Conversations"
    search_hint = "type words that were said …"
    nothing = "no conversation is kept that has these words"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "rename", "Rename"),
        Binding("ctrl+s", "export", "Export"),
        Binding("ctrl+x", "delete", "Delete", priority=True),
    ]

    def __init__(self, sessions: Sessions):
        super().__init__()
        self.sessions = sessions

    def find(self, query: str) -> Sequence[Found]:
        if not query.split():
            return [Found(summary) for summary in self.sessions.list()]
        worker, found = get_current_worker(), []
        for hit in islice(self.sessions.search(query), MOST_ROWS + 1):
            found.append(Found(hit.summary, hit))
            if worker.is_cancelled:  # more was typed meanwhile
                break
        return found

    def columns(self, width: int) -> str:
        changed, questions, model = WIDTHS
        return left("changed", changed) + right("asked", questions) + "  " + left("model", model) + " title"

    def line(self, row: Found, width: int) -> Content:
        head = row.summary.head
        facts = (_moment(head.changed), str(head.questions), head.model) if head else ("-", "-", "-")
        changed, questions, model = (
            place(text, cells) for place, text, cells in zip(PLACES, facts, WIDTHS, strict=True)
        )
        begin = changed + questions + "  " + model + " "
        return Content(begin + cut(row.summary.title, width - sum(WIDTHS) - 3))

    def details(self, row: Found) -> Content:
        summary, head = row.summary, row.summary.head
        lines = [Content.styled(cut(summary.title, 400), "bold")]
        if head is None:
            lines.append(Content.styled(cut(summary.fault, 1000), "$error"))
        else:
            lines.append(
                Content(f"{head.questions} questions to {cut(head.model, 200)}, begun {_moment(head.began)}")
            )
        if hit := row.hit:
            where = f"question {hit.question}, {hit.part}: " if hit.question else f"{hit.part}: "
            before, match, after = map(one_line, (hit.before, hit.match, hit.after))
            lines.append(Content.assemble((where, "$text-muted"), before, (match, "bold underline"), after))
        lines.append(Content.styled(f"{one_line(summary.id)}, {size(summary.nbytes)}", "$text-muted"))
        return Content("\n").join(lines)

    def choose(self, row: Found) -> None:
        if row.summary.head is None:
            self.notify(one_line(row.summary.fault), severity="error", markup=False)
            return
        self.dismiss(row.summary.id)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A damaged file can be deleted, and no more; None: shown as not to be had now."""
        if action not in ("rename", "export", "delete"):
            return True
        return True if self.chosen and (action == "delete" or self.chosen.summary.head) else None

    def action_rename(self) -> None:
        if not (row := self.chosen):
            return
        name = row.summary.id

        def rename(title: str | None) -> None:
            if title is not None:
                self.change(lambda: self.sessions.rename(name, title))

        self.app.push_screen(Ask("What is it to be called?", one_line(row.summary.title), as_title), rename)

    def action_delete(self) -> None:
        if not (row := self.chosen):
            return
        name = row.summary.id

        def delete(yes: bool | None) -> None:
            if yes:
                self.change(lambda: self.sessions.delete(name))

        question = f"Delete “{cut(row.summary.title, 120)}”? It cannot be brought back."
        self.app.push_screen(Confirm(question, "Delete", "Keep"), delete)

    def action_export(self) -> None:
        if row := self.chosen:
            name = row.summary.id
            self.app.push_screen(ExportScreen(lambda: self.sessions.read(name)[0], row.summary.title))

    def change(self, work: Callable[[], object]) -> None:
        """Do it on a thread, say what went wrong, and look again."""

        def run() -> None:
            try:
                work()
            except LocalLLMError as error:
                self.app.call_from_thread(self.notify, one_line(str(error)), severity="error", markup=False)
            self.app.call_from_thread(self.search)

        self.run_worker(run, thread=True, group="change")


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
