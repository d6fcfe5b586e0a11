"""An answer as Markdown, which may still be growing: of each new text only the end is read again."""

from textual.containers import Vertical

from localllm.tui.transcript.markdown import Piece, pieces_of
from localllm.tui.transcript.pieces import WIDGETS, Code, PieceWidget, widget_for


class Answer(Vertical):
    DEFAULT_CSS = """
    Answer {
        height: auto;
        .apart { margin-top: 1; }
        .apart:first-child { margin-top: 0; }
    }
    """

    def __init__(self, source: str):
        self.source = source
        pieces, self.settled, self.read = pieces_of(source)
        self.shown: list[PieceWidget] = [widget_for(piece) for piece in pieces]
        super().__init__(*self.shown)

    @property
    def codes(self) -> list[Code]:
        return [widget for widget in self.shown if isinstance(widget, Code)]

    def grow(self, source: str) -> None:
        """source: the whole answer as far as it came, which begins with what is shown."""
        self.source = source
        pieces, settled, read = pieces_of(source[self.read :])
        self.show(pieces)
        for widget in self.shown[self.settled : self.settled + settled]:
            if isinstance(widget, Code):
                widget.settle()
        self.settled += settled
        self.read += read

    def finish(self) -> None:
        """No more comes: an address that was given at the end is known to the text before it."""
        if "]:" in self.source:
            self.settled = self.read = 0
            self.grow(self.source)
        for code in self.codes:
            code.settle()

    def show(self, pieces: list[Piece]) -> None:
        """These in place of those that are not settled; what stays the same is left alone."""
        old, new = self.shown[self.settled :], list[PieceWidget]()
        for widget, piece in zip(old, pieces, strict=False):
            if not isinstance(widget, WIDGETS[piece.form]):
                break
            if not widget.piece.same(piece):
                widget.show(piece)
            new.append(widget)
        added = [widget_for(piece) for piece in pieces[len(new) :]]
        self.shown = [*self.shown[: self.settled], *new, *added]
        if stale := old[len(new) :]:
            self.remove_children(stale)
        if added:
            self.mount_all(added)
