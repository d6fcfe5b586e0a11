"""The list of models, local ones first, with their size, memory and estimated speed on this machine."""

import threading
from collections.abc import Sequence

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Static

from localllm.formatting import format_bytes, three_digits
from localllm.tui.dialogs import Confirm
from localllm.tui.drawing import align_left, align_right, truncate
from localllm.tui.machine import Machine, ModelOffer, memory_and_speed, parameters_and_license
from localllm.tui.picker import Picker

LOCAL_MARK, REMOTE_MARK = "●", "↓"
LICENSE_MIN_WIDTH = 96  # the licence is shown from this width of the list on
COLUMN_WIDTHS = (10, 9, 22, 9)  # of parameters, files, memory, speed
LICENSE_WIDTH = 16

NO_MODELS_TEXT = (
    "A model is downloaded once from the Hugging Face Hub, and verified.\n"
    "Then it runs on this machine only. demo is included and needs no network."
)
LOCAL_MODELS_TEXT = "Local models are listed first. Others are downloaded once, and verified."
RECOMMENDATION_REASON = "the strongest chat model that fits with ease and answers faster than one reads"
BUNDLED_MODEL = "demo"


class ModelsScreen(Picker[ModelOffer, str]):
    """Returns the name of the chosen model, None if none was chosen."""

    title_text = "Models"
    search_hint = "type a name, a size, a licence …"
    empty_text = "no matching models"

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine
        self.offers: Sequence[ModelOffer] | None = None
        self.offers_lock = threading.Lock()  # searches may start before the first has listed them

    def find(self, query: str) -> Sequence[ModelOffer]:
        with self.offers_lock:
            if self.offers is None:
                self.offers = self.machine.offers()
        words = query.casefold().split()
        return [offer for offer in self.offers if all(word in _searchable_text(offer) for word in words)]

    def columns(self, width: int) -> str:
        heads = zip(("parameters", "files", "memory", "tokens/s"), COLUMN_WIDTHS, strict=True)
        head = align_left("  model", _name_width(width)) + "".join(
            align_right(text, cells) for text, cells in heads
        )
        return head + ("  licence" if width >= LICENSE_MIN_WIDTH else "")

    def item_line(self, row: ModelOffer, width: int) -> Content:
        parameters, files, memory, speed = COLUMN_WIDTHS
        license = f"  {truncate(row.license or '-', LICENSE_WIDTH)}" if width >= LICENSE_MIN_WIDTH else ""
        star = " ★" if row.recommended else ""
        name = truncate(row.name, _name_width(width) - 3 - len(star)) + star
        return Content.assemble(
            (LOCAL_MARK if row.is_here else REMOTE_MARK) + " " + align_left(name, _name_width(width) - 2),
            align_right(row.parameters, parameters),
            align_right("-" if row.bytes is None else format_bytes(row.bytes), files),
            align_right(_memory_column(row), memory),
            align_right("-" if row.tokens_per_s is None else f"~{three_digits(row.tokens_per_s)}", speed),
            license,
        )

    def details(self, row: ModelOffer) -> Content:
        best = " · recommended for this machine" if row.recommended else ""
        files = "" if row.bytes is None else f" · {format_bytes(row.bytes)}"
        where = "on this machine" if row.is_here else "not downloaded"
        lines = [Content.assemble((truncate(row.name, 200), "bold"), best), Content(truncate(row.about, 1000))]
        lines.append(Content.styled(fit_summary(row), "$error" if row.fits is False else ""))
        lines.append(Content(truncate(f"{parameters_and_license(row)}{files}, {where}", 1000)))
        return Content("\n").join(line for line in lines if line)

    def choose(self, row: ModelOffer) -> None:
        if row.fits is not False:
            self.dismiss(row.name)
            return
        question = f"{truncate(row.name, 200)} {fit_summary(row)}. Try it anyway?"

        def answered(yes: bool | None) -> None:
            if yes:
                self.dismiss(row.name)

        self.app.push_screen(Confirm(question, "Try", "No"), answered)


class FirstRunScreen(ModelsScreen):
    """The list of models when `localllm run` names none; returns None to exit."""

    DEFAULT_CSS = "FirstRunScreen #first_run { height: auto; padding: 0 1; }"
    title_text = "Which model?"

    def compose(self) -> ComposeResult:
        yield Static(id="first_run", markup=False)
        yield from super().compose()

    def find(self, query: str) -> Sequence[ModelOffer]:
        return first_run_order(super().find(query))

    def show_items(self, rows: Sequence[ModelOffer], error: Exception | None) -> None:
        introduction = LOCAL_MODELS_TEXT if has_local_models(self.offers or ()) else NO_MODELS_TEXT
        self.query_one("#first_run", Static).update(introduction)
        super().show_items(rows, error)

    def details(self, row: ModelOffer) -> Content:
        details = super().details(row)
        return Content("\n").join([details, Content(RECOMMENDATION_REASON)]) if row.recommended else details


def has_local_models(offers: Sequence[ModelOffer]) -> bool:
    """Return whether there are local models besides the bundled one."""
    return any(offer.is_here and offer.name != BUNDLED_MODEL for offer in offers)


def first_run_order(offers: Sequence[ModelOffer]) -> Sequence[ModelOffer]:
    """Return downloaded models first, then the recommended one, the bundled one, others that fit, and the rest."""

    def rank(offer: ModelOffer) -> int:
        if offer.is_here and offer.name != BUNDLED_MODEL:
            return 0
        if offer.recommended:
            return 1
        if offer.is_here:
            return 2
        return 3 if offer.fits else 4

    return sorted(offers, key=rank)


def fit_summary(offer: ModelOffer) -> str:
    """Return whether the model fits, its memory, and its estimated speed."""
    without_size = {True: "fits", False: "does not fit", None: "memory requirement unknown"}
    return memory_and_speed(offer) if offer.needs_bytes is not None else without_size[offer.fits]


def _memory_column(offer: ModelOffer) -> str:
    mark = {True: "✓ ", False: "✗ ", None: "? "}[offer.fits]
    if offer.needs_bytes is None:
        return mark + ("fits" if offer.fits else "too large" if offer.fits is False else "")
    free = "" if offer.free_bytes is None else f" of {format_bytes(offer.free_bytes)}"
    return mark + format_bytes(offer.needs_bytes) + free


def _name_width(width: int) -> int:
    return width - sum(COLUMN_WIDTHS) - (LICENSE_WIDTH + 2 if width >= LICENSE_MIN_WIDTH else 0)


def _searchable_text(offer: ModelOffer) -> str:
    """Return the text to search in, in casefold."""
    return f"{offer.name} {offer.parameters} {offer.license or ''} {offer.about}".casefold()
