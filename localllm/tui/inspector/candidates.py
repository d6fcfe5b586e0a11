"""What could have come in a token's place: the model's own probabilities, what sampling left of them, and what cut
the others.
"""

import math
from collections.abc import Callable

from rich.cells import cell_len, set_cell_size
from textual.content import Content
from textual.widget import Widget

from localllm.inspection import Candidate
from localllm.tui.inspector.flow import signs
from localllm.tui.inspector.record import Guess, Token
from localllm.tui.sparkline import bar

DIM, OWN, LEFT = "$foreground-muted", "$primary", "$success"
SAID = {Guess.NONE: "", Guess.RIGHT: ", a draft that was right", Guess.WRONG: ", a draft that was rejected"}
NUMBER, TEXT = 6, 14  # columns of a percentage and of a token


def share(value: float) -> str:
    """In percent, with digits where they say something."""
    return f"{value:.1%}" if value >= 0.0995 or value == 0 else f"{value:.2%}" if value >= 1e-4 else "<0.01%"


def quoted(text: str, width: int) -> str:
    """Visible, and cut where it is longer."""
    seen = signs(text)
    return seen if cell_len(seen) <= width else set_cell_size(seen, width - 1) + "…"


def lines_for(token: Token | None) -> int:
    return len(token.candidates) + 3 if token and token.candidates else 1


class Candidates(Widget):
    DEFAULT_CSS = """
    Candidates { width: 1fr; height: auto; max-height: 60%; text-wrap: nowrap; text-overflow: clip; }
    """

    def __init__(self, text_of: Callable[[int], str]):
        super().__init__()
        self.text_of = text_of
        self.token: Token | None = None

    def show(self, token: Token | None) -> None:
        if token is not self.token:
            before, self.token = self.token, token
            self.refresh(layout=lines_for(before) != lines_for(token))

    def render(self) -> Content:
        token, width = self.token, self.size.width
        if token is None:
            return Content.styled("No token yet.", DIM)
        head = Content.assemble(
            (f"token {token.number + 1:,} ", DIM),
            Content.styled(quoted(token.text, TEXT), "bold"),
            (f"  id {token.id}{SAID[token.guess]}", DIM),
        )
        if not token.candidates:
            return Content.assemble(head, Content.styled("  (asked for before the inspector was open)", DIM))
        room = max((width - TEXT - 2 * NUMBER - 7) // 2, 4)
        names = f"{'':{TEXT + 2}}{'the model':<{room + NUMBER + 3}}{'after sampling':<{room}}"
        lines = [head, Content.styled(names, DIM), *(self.line(one, token, room) for one in token.candidates)]
        rest = 1 - sum(math.exp(one.logprob) for one in token.candidates)
        lines.append(Content.styled(f"{'  all others':{TEXT + 2}}{share(max(rest, 0.0)):>{NUMBER}}", DIM))
        return Content("\n").join(lines)

    def line(self, one: Candidate, token: Token, room: int) -> Content:
        own = math.exp(one.logprob)
        drawn = one.token_id == token.id
        mark = ("✗ " if token.guess is Guess.WRONG else "▶ ") if drawn else "  "
        name = set_cell_size(quoted(self.text_of(one.token_id), TEXT), TEXT)
        left = Content.styled(f" cut by {one.cut_by}" if one.cut_by else f"{share(0):>{NUMBER}}", DIM)
        if one.chance > 0:
            left = Content.assemble(f"{share(one.chance):>{NUMBER}} ", Content.styled(bar(one.chance, room), LEFT))
        return Content.assemble(
            Content.styled(mark + name, "bold" if drawn else "" if one.chance > 0 else DIM),
            f"{share(own):>{NUMBER}} ",
            Content.styled(bar(own, room), OWN if one.chance > 0 else DIM),
            "  ",
            left,
        )
