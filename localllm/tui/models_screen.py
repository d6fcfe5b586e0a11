"""The models that could be talked to: those here, then the catalogue's, with what each takes and gives here."""

import threading
from collections.abc import Sequence

from textual.content import Content

from localllm.tui.cells import cut, left, right
from localllm.tui.dialogs import Confirm
from localllm.tui.machine import Machine, Offer
from localllm.tui.offered import fit_of, kind_of
from localllm.tui.picker import Picker
from localllm.units import size, three_digits

HERE, TO_FETCH = "●", "↓"
LICENSE_FROM = 96  # cells of the list from which there is room for the licence
WIDTHS = (10, 9, 22, 9)  # of parameters, files, memory, speed
LICENSE_WIDTH = 16


class ModelsScreen(Picker[Offer, str]):
    """Gives the name of the model that was chosen, None where none was."""

    title_text = "Models"
    search_hint = "type a name, a size, a licence …"
    nothing = "no model is called that"

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine
        self.offers: Sequence[Offer] | None = None
        self.asking = threading.Lock()  # more may be typed before they are there

    def find(self, query: str) -> Sequence[Offer]:
        with self.asking:
            if self.offers is None:
                self.offers = self.machine.offers()
        words = query.casefold().split()
        return [offer for offer in self.offers if all(word in _said(offer) for word in words)]

    def columns(self, width: int) -> str:
        heads = zip(("parameters", "files", "memory", "tokens/s"), WIDTHS, strict=True)
        head = left("  model", _name_width(width)) + "".join(right(text, cells) for text, cells in heads)
        return head + ("  licence" if width >= LICENSE_FROM else "")

    def line(self, row: Offer, width: int) -> Content:
        parameters, files, memory, speed = WIDTHS
        license = f"  {cut(row.license or '-', LICENSE_WIDTH)}" if width >= LICENSE_FROM else ""
        star = " ★" if row.recommended else ""
        name = cut(row.name, _name_width(width) - 3 - len(star)) + star
        return Content.assemble(
            (HERE if row.is_here else TO_FETCH) + " " + left(name, _name_width(width) - 2),
            right(row.parameters, parameters),
            right("-" if row.bytes is None else size(row.bytes), files),
            right(_memory(row), memory),
            right("-" if row.tokens_per_s is None else f"~{three_digits(row.tokens_per_s)}", speed),
            license,
        )

    def details(self, row: Offer) -> Content:
        best = " · recommended for this machine" if row.recommended else ""
        files = "" if row.bytes is None else f" · {size(row.bytes)}"
        where = "on this machine" if row.is_here else "to be downloaded"
        lines = [Content.assemble((cut(row.name, 200), "bold"), best), Content(cut(row.about, 1000))]
        lines.append(Content.styled(fit(row), "$error" if row.fits is False else ""))
        lines.append(Content(cut(f"{kind_of(row)}{files}, {where}", 1000)))
        return Content("\n").join(line for line in lines if line)

    def choose(self, row: Offer) -> None:
        if row.fits is not False:
            self.dismiss(row.name)
            return
        question = f"{cut(row.name, 200)} {fit(row)}. Try it all the same?"

        def answered(yes: bool | None) -> None:
            if yes:
                self.dismiss(row.name)

        self.app.push_screen(Confirm(question, "Try", "No"), answered)


def fit(offer: Offer) -> str:
    """Whether it fits, with how much of how much memory, and how fast it would be."""
    unmeasured = {
        True: "fits",
        False: "does not fit",
        None: "may fit or not: what it takes of memory is not known",
    }
    return fit_of(offer) if offer.needs_bytes is not None else unmeasured[offer.fits]


def _memory(offer: Offer) -> str:
    mark = {True: "✓ ", False: "✗ ", None: "? "}[offer.fits]
    if offer.needs_bytes is None:
        return mark + ("fits" if offer.fits else "too large" if offer.fits is False else "")
    free = "" if offer.free_bytes is None else f" of {size(offer.free_bytes)}"
    return mark + size(offer.needs_bytes) + free


def _name_width(width: int) -> int:
    return width - sum(WIDTHS) - (LICENSE_WIDTH + 2 if width >= LICENSE_FROM else 0)


def _said(offer: Offer) -> str:
    """All words of it that can be searched for."""
    return f"{offer.name} {offer.parameters} {offer.license or ''} {offer.about}".casefold()
