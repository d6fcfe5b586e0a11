"""One turn in the transcript: its question, the model's thoughts, the answer, and a note about how it ended."""

from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.css.styles import RulesMap
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual
from textual.widgets import Static

from localllm.conversation.chat import Turn
from localllm.formatting import one_line, printable
from localllm.tui.editor import folded_size
from localllm.tui.transcript.answer import Answer, Block, prefix_lines

EXCERPT_CHARACTERS = 30  # of the first and of the last line of a folded question


class TurnView(Vertical):
    DEFAULT_CSS = """
    TurnView {
        height: auto; margin-bottom: 1; border-left: blank;
        .asked { height: auto; }
        .branch, .thoughts { link-style: none; link-color: $text-muted; }
        .branch { width: auto; color: $text-muted; margin-left: 1; display: none; }
        .thoughts { height: auto; color: $text-muted; margin: 1 0 0 2; display: none; }
        .note { height: auto; color: $text-muted; margin: 1 0 0 2; display: none; }
        .note.warning { color: $text-warning; }
        .note.error { color: $text-error; }
        Answer { margin: 1 0 0 2; display: none; }
        .shown { display: block; }
    }
    """

    def __init__(self, question: str, turn: Turn | None, note: str = "", severity: str = ""):
        """turn: None before the answer begins"""
        super().__init__()
        self.turn = turn
        self.question = Question(question)
        self.branch = Static(classes="branch")
        self.thoughts = Static(classes="thoughts")
        self.answer = Answer(turn.answer if turn else "")
        self.note = Static(classes="note")
        self.thoughts_open = False
        self.selected_code: int | None = None
        self.answer.set_class(bool(self.answer.source), "shown")
        self.set_note(note, severity)
        self.show_thoughts()
        self.show_siblings()

    def compose(self) -> ComposeResult:
        yield Horizontal(self.question, self.branch, classes="asked")
        yield self.thoughts
        yield self.answer
        yield self.note

    def update_answer(self) -> None:
        """Show the part of the answer that has arrived since the last call."""
        assert self.turn
        if len(self.turn.answer) > len(self.answer.source):
            self.answer.update_source(self.turn.answer)
            self.answer.add_class("shown")
        self.show_thoughts()

    def finish(self, note: str, severity: str) -> None:
        if self.turn:
            self.update_answer()
            self.answer.finish()
        self.set_note(note, severity)

    def set_note(self, note: str, severity: str = "") -> None:
        """Show a remark below the answer. severity: `warning`, `error`, or "" for neither"""
        self.note.set_class(bool(note), "shown")
        self.note.set_class(severity == "warning", "warning")
        self.note.set_class(severity == "error", "error")
        self.note.update(Content(printable(note)))

    def show_siblings(self) -> None:
        """Show the number of this branch and how many there are, if there are several."""
        siblings = self.turn.siblings if self.turn else []
        if not self.turn or len(siblings) < 2 or self.turn not in siblings:
            self.branch.remove_class("shown")
            return
        previous_branch, next_branch = (
            Style.from_meta({"@click": f"screen.go_to_branch({step})"}) for step in (-1, 1)
        )
        position = f" {siblings.index(self.turn) + 1}/{len(siblings)} "
        self.branch.update(Content.assemble(("◂", previous_branch), position, ("▸", next_branch)))
        self.branch.add_class("shown")

    def show_thoughts(self) -> None:
        thoughts = self.turn.thoughts.strip() if self.turn else ""
        self.thoughts.set_class(bool(thoughts), "shown")
        if not thoughts:
            return
        link = Style.from_meta({"@click": "screen.fold_thoughts"})
        if self.thoughts_open:
            self.thoughts.update(Content.assemble(("▾ thoughts", link), f"\n{printable(thoughts)}"))
        else:
            count = len(thoughts.split())
            self.thoughts.update(Content.assemble((f"▸ thoughts, {count} word{'s' * (count != 1)}", link)))

    def fold_thoughts(self) -> None:
        """Open or close the thoughts."""
        self.thoughts_open = not self.thoughts_open
        self.show_thoughts()

    def fold(self) -> None:
        """Open the thoughts and a long question, or close both if one is open."""
        is_open = not (self.thoughts_open or self.question.is_open)
        self.thoughts_open = is_open
        self.show_thoughts()
        self.question.open(is_open)

    def select_code(self, step: int, index: int | None = None) -> Block | None:
        """Select the code block `index`, or the one `step` blocks after the selected one; the last one at first.

        Return None if the answer has no code.
        """
        blocks = self.answer.code_blocks
        if not blocks:
            return None
        if index is None:
            index = len(blocks) - 1 - max(step, 0) if self.selected_code is None else self.selected_code
        self.selected_code = (index + step) % len(blocks)
        self.answer.select_code(self.selected_code)
        return blocks[self.selected_code]


class Question(Static):
    """A question. One as long as a folded paste is folded into one line until the user opens it."""

    DEFAULT_CSS = """
    Question {
        width: 1fr; height: auto; color: $primary; text-style: bold;
        link-style: none; link-color: $text-muted;
    }
    """

    def __init__(self, text: str):
        super().__init__()
        self.text = text
        self.size_text = folded_size(text)  # "" for a question that is never folded
        self.is_open = False
        self.open(False)

    def open(self, is_open: bool) -> None:
        """Show all of a long question, or only its excerpt."""
        self.is_open = is_open and bool(self.size_text)
        link = Style.from_meta({"@click": "fold"})
        if not self.size_text:
            content = Content(printable(self.text))
        elif is_open:
            content = Content.assemble((f"▾ {self.size_text}", link), f"\n{printable(self.text)}")
        else:
            content = Content.assemble(f"{excerpt(self.text)} ", (f"▸ {self.size_text}", link))
        self.update(HangingIndent(content, "> ", "  "))

    def action_fold(self) -> None:
        self.open(not self.is_open)


def excerpt(text: str) -> str:
    """Return the beginning of the first and the end of the last line of a long text, in one line."""
    lines = text.strip().splitlines() or [""]
    first, last = one_line(lines[0].strip()), one_line(lines[-1].strip())
    if len(lines) == 1:
        first, last = first[: len(first) // 2], first[len(first) // 2 :]
    return f"{first[:EXCERPT_CHARACTERS].strip()} … {last[-EXCERPT_CHARACTERS:].strip()}"


class HangingIndent(Visual):
    """Text with `first` before its first line and `rest`, of the same width, before the others."""

    def __init__(self, content: Content, first: str, rest: str):
        self.content, self.first, self.rest = content, first, rest

    def get_optimal_width(self, rules: RulesMap, container_width: int) -> int:
        return self.content.get_optimal_width(rules, container_width) + len(self.rest)

    def get_height(self, rules: RulesMap, width: int) -> int:
        return self.content.get_height(rules, self.text_width(width))

    def text_width(self, width: int) -> int:
        return max(1, width - len(self.rest))

    def render_strips(self, width: int, height: int | None, style: Style, options: RenderOptions) -> list[Strip]:
        strips = self.content.render_strips(self.text_width(width), height, style, options)
        return prefix_lines(strips, self.first, self.rest, style)
