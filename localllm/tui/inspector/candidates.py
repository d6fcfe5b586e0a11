"""What could have come in a token's place: the model's own probabilities, what sampling left of them, and what cut
the others.
"""

import math
from collections.abc import Callable

from rich.cells import cell_len, set_cell_size
from textual.content import Content
from textual.widget import Widget

from localllm.metrics import Candidate
from localllm.tui.inspector.flow import printable
from localllm.tui.inspector.record import AnswerToken, DraftStatus
from localllm.tui.sparkline import bar

DIM_STYLE, MODEL_STYLE, SAMPLED_STYLE = "$foreground-muted", "$primary", "$success"
DRAFT_LABELS = {
    DraftStatus.NONE: "",
    DraftStatus.ACCEPTED: ", a draft that was right",
    DraftStatus.REJECTED: ", a draft that was rejected",
}
PERCENT_CELLS, TOKEN_CELLS = 6, 14  # columns of a percentage and of a token


def format_percent(value: float) -> str:
    """In percent, with digits where they say something."""
    return f"{value:.1%}" if value >= 0.0995 or value == 0 else f"{value:.2%}" if value >= 1e-4 else "<0.01%"


def fit_token_text(text: str, width: int) -> str:
    """Visible, and cut where it is longer."""
    seen = printable(text)
    return seen if cell_len(seen) <= width else set_cell_size(seen, width - 1) + "…"


def line_count(token: AnswerToken | None) -> int:
    return len(token.candidates) + 3 if token and token.candidates else 1


class Candidates(Widget):
    DEFAULT_CSS = """
    Candidates { width: 1fr; height: auto; max-height: 60%; text-wrap: nowrap; text-overflow: clip; }
    """

    def __init__(self, text_of: Callable[[int], str]):
        super().__init__()
        self.text_of = text_of
        self.token: AnswerToken | None = None

    def show(self, token: AnswerToken | None) -> None:
        if token is not self.token:
            before, self.token = self.token, token
            self.refresh(layout=line_count(before) != line_count(token))

    def render(self) -> Content:
        token, width = self.token, self.size.width
        if token is None:
            return Content.styled("No token yet.", DIM_STYLE)
        head = Content.assemble(
            (f"token {token.number + 1:,} ", DIM_STYLE),
            Content.styled(fit_token_text(token.text, TOKEN_CELLS), "bold"),
            (f"  id {token.id}{DRAFT_LABELS[token.draft_status]}", DIM_STYLE),
        )
        if not token.candidates:
            return Content.assemble(head, Content.styled("  (asked for before the inspector was open)", DIM_STYLE))
        room = max((width - TOKEN_CELLS - 2 * PERCENT_CELLS - 7) // 2, 4)
        names = f"{'':{TOKEN_CELLS + 2}}{'the model':<{room + PERCENT_CELLS + 3}}{'after sampling':<{room}}"
        lines = [
            head,
            Content.styled(names, DIM_STYLE),
            *(self.candidate_line(one, token, room) for one in token.candidates),
        ]
        rest = 1 - sum(math.exp(one.logprob) for one in token.candidates)
        lines.append(
            Content.styled(
                f"{'  all others':{TOKEN_CELLS + 2}}{format_percent(max(rest, 0.0)):>{PERCENT_CELLS}}", DIM_STYLE
            )
        )
        return Content("\n").join(lines)

    def candidate_line(self, one: Candidate, token: AnswerToken, room: int) -> Content:
        own = math.exp(one.logprob)
        drawn = one.token_id == token.id
        mark = ("✗ " if token.draft_status is DraftStatus.REJECTED else "▶ ") if drawn else "  "
        name = set_cell_size(fit_token_text(self.text_of(one.token_id), TOKEN_CELLS), TOKEN_CELLS)
        left = Content.styled(
            f" cut by {one.cut_by}" if one.cut_by else f"{format_percent(0):>{PERCENT_CELLS}}", DIM_STYLE
        )
        if one.chance > 0:
            left = Content.assemble(
                f"{format_percent(one.chance):>{PERCENT_CELLS}} ",
                Content.styled(bar(one.chance, room), SAMPLED_STYLE),
            )
        return Content.assemble(
            Content.styled(mark + name, "bold" if drawn else "" if one.chance > 0 else DIM_STYLE),
            f"{format_percent(own):>{PERCENT_CELLS}} ",
            Content.styled(bar(own, room), MODEL_STYLE if one.chance > 0 else DIM_STYLE),
            "  ",
            left,
        )
