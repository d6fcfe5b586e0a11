"""One turn on the screen: the question, what the model thought, its answer, and what is to be said about it."""

from rich.segment import Segment
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.css.styles import RulesMap
from textual.strip import Strip
from textual.style import Style
from textual.visual import RenderOptions, Visual
from textual.widgets import Static

from localllm.conversation.turn import Turn
from localllm.formatting import printable
from localllm.tui.transcript.answer import Answer, Block


# Text whose first line has something before it that its other lines are indented by.
class HangingIndent(Visual):
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
        before = [Segment(text, style.rich_style) for text in (self.first, self.rest)]
        return [Strip([before[y > 0], *strip]) for y, strip in enumerate(strips)]


class TurnView(Vertical):
    """turn: None of a question whose answer has not begun."""

    DEFAULT_CSS = """
    TurnView {
        height: auto; margin-bottom: 1; border-left: blank;
        .asked { height: auto; }
        .question { width: 1fr; height: auto; color: $primary; text-style: bold; }
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
        super().__init__()
        self.turn = turn
        self.question = Static(HangingIndent(Content(printable(question)), "> ", "  "), classes="question")
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
        """Show what of the answer has come since."""
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
        """A remark below the answer; severity: `warning`, `error`, or nothing of both."""
        self.note.set_class(bool(note), "shown")
        self.note.set_class(severity == "warning", "warning")
        self.note.set_class(severity == "error", "error")
        self.note.update(Content(printable(note)))

    def show_siblings(self) -> None:
        """Which of the branches that part here this is."""
        ways = self.turn.siblings if self.turn else []
        if not self.turn or len(ways) < 2 or self.turn not in ways:
            self.branch.remove_class("shown")
            return
        earlier, later = (Style.from_meta({"@click": f"screen.go_to_branch({step})"}) for step in (-1, 1))
        place = f" {ways.index(self.turn) + 1}/{len(ways)} "
        self.branch.update(Content.assemble(("◂", earlier), place, ("▸", later)))
        self.branch.add_class("shown")

    def show_thoughts(self) -> None:
        thoughts = self.turn.thoughts.strip() if self.turn else ""
        self.thoughts.set_class(bool(thoughts), "shown")
        if not thoughts:
            return
        fold = Style.from_meta({"@click": "screen.fold_thoughts"})
        if self.thoughts_open:
            self.thoughts.update(Content.assemble(("▾ thoughts", fold), f"\n{printable(thoughts)}"))
        else:
            count = len(thoughts.split())
            self.thoughts.update(Content.assemble((f"▸ thoughts, {count} word{'s' * (count != 1)}", fold)))

    def fold_thoughts(self) -> None:
        self.thoughts_open = not self.thoughts_open
        self.show_thoughts()

    def select_code(self, step: int, index: int | None = None) -> Block | None:
        """Go on to the next block of code or the one before; 0: the one that is chosen, else the last; index: this
        one."""
        codes = self.answer.code_blocks
        if not codes:
            return None
        if index is None:
            index = len(codes) - 1 - max(step, 0) if self.selected_code is None else self.selected_code
        self.selected_code = (index + step) % len(codes)
        self.answer.select_code(self.selected_code)
        return codes[self.selected_code]
