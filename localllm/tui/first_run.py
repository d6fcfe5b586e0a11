"""Which model? The list of all, the one for this machine with its reason, and what happens when one is chosen."""

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Static

from localllm.tui.machine import ModelOffer
from localllm.tui.models_screen import ModelsScreen

NO_MODELS_TEXT = (
    "A model is downloaded once, from the Hugging Face Hub, and verified.\n"
    "Then it runs on this machine alone. demo is here and needs no network."
)
LOCAL_MODELS_TEXT = "Models that are here come first. Another is downloaded once, and verified."
RECOMMENDATION_REASON = "the strongest that fits with room to spare and answers faster than one reads"
BUNDLED_MODEL = "demo"


class FirstRunScreen(ModelsScreen):
    """Gives the name of the model that was chosen, None to leave."""

    DEFAULT_CSS = "FirstRunScreen #first_run { height: auto; padding: 0 1; }"
    title_text = "Which model?"

    def compose(self) -> ComposeResult:
        yield Static(id="first_run", markup=False)
        yield from super().compose()

    def find(self, query: str) -> Sequence[ModelOffer]:
        return first_run_order(super().find(query))

    def show_items(self, rows: Sequence[ModelOffer], fault: Exception | None) -> None:
        said = LOCAL_MODELS_TEXT if has_local_models(self.offers or ()) else NO_MODELS_TEXT
        self.query_one("#first_run", Static).update(said)
        super().show_items(rows, fault)

    def details(self, row: ModelOffer) -> Content:
        told = super().details(row)
        return Content("\n").join([told, Content(RECOMMENDATION_REASON)]) if row.recommended else told


def has_local_models(offers: Sequence[ModelOffer]) -> bool:
    """Is a model here beside the one that comes with the program?"""
    return any(offer.is_here and offer.name != BUNDLED_MODEL for offer in offers)


def first_run_order(offers: Sequence[ModelOffer]) -> Sequence[ModelOffer]:
    """What was fetched by the person first, then the one for this machine, the boxed one, what fits, the rest."""

    def rank(offer: ModelOffer) -> int:
        if offer.is_here and offer.name != BUNDLED_MODEL:
            return 0
        if offer.recommended:
            return 1
        if offer.is_here:
            return 2
        return 3 if offer.fits else 4

    return sorted(offers, key=rank)
