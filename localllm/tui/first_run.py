"""Which model? The list of all, the one for this machine with its reason, and what happens when one is chosen."""

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Static

from localllm.tui.machine import Offer
from localllm.tui.models_screen import ModelsScreen

NOTHING_HERE = (
    "A model is downloaded once, from the Hugging Face Hub, and verified.\n"
    "Then it runs on this machine alone. demo is here and needs no network."
)
SOME_HERE = "Models that are here come first. Another is downloaded once, and verified."
WHY = "the strongest that fits with room to spare and answers faster than one reads"
BOXED = "demo"


class FirstRunScreen(ModelsScreen):
    """Gives the name of the model that was chosen, None to leave."""

    DEFAULT_CSS = "FirstRunScreen #first_run { height: auto; padding: 0 1; }"
    title_text = "Which model?"

    def compose(self) -> ComposeResult:
        yield Static(id="first_run", markup=False)
        yield from super().compose()

    def find(self, query: str) -> Sequence[Offer]:
        return in_order(super().find(query))

    def present(self, rows: Sequence[Offer], fault: Exception | None) -> None:
        said = SOME_HERE if have_some(self.offers or ()) else NOTHING_HERE
        self.query_one("#first_run", Static).update(said)
        super().present(rows, fault)

    def details(self, row: Offer) -> Content:
        told = super().details(row)
        return Content("\n").join([told, Content(WHY)]) if row.recommended else told


def have_some(offers: Sequence[Offer]) -> bool:
    """Is a model here beside the one that comes with the program?"""
    return any(offer.is_here and offer.name != BOXED for offer in offers)


def in_order(offers: Sequence[Offer]) -> Sequence[Offer]:
    """What was fetched by the person first, then the one for this machine, the boxed one, what fits, the rest."""

    def rank(offer: Offer) -> int:
        if offer.is_here and offer.name != BOXED:
            return 0
        if offer.recommended:
            return 1
        if offer.is_here:
            return 2
        return 3 if offer.fits else 4

    return sorted(offers, key=rank)
