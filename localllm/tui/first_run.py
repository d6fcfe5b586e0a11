"""Which model? Those that are here and those of the catalogue, with what this machine makes of each.

Gives the name of the chosen one, or None to leave.
"""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from localllm.errors import LocalLLMError
from localllm.tui.machine import Machine, Offer
from localllm.tui.offered import fit_of, kind_of
from localllm.units import size
from localllm.visible import one_line

LOOKING = "looking at this machine …"
NOTHING_HERE = (
    "No model is downloaded yet. The one you choose comes from the Hugging Face Hub, once, and is\n"
    "verified; then it runs on this machine alone. `demo` is here already and needs no network."
)
SOME_HERE = "Models on this machine come first; any other is downloaded from the Hugging Face Hub, once."
WHY = "recommended: the strongest that fits with memory to spare and answers faster than one reads"
KEYS = "↑↓ choose   Enter run   type to filter   Esc leave"
BOXED = "demo"
NAME, PARAMETERS, DOWNLOAD, FIT = 30, 9, 11, 11  # characters of a row; the licence has what is left


class FirstRunScreen(Screen[str | None]):
    DEFAULT_CSS = """
    FirstRunScreen { layout: vertical; padding: 0 1; }
    FirstRunScreen #first_title { text-style: bold; }
    FirstRunScreen #first_said { height: auto; margin-bottom: 1; }
    FirstRunScreen #first_models { height: 1fr; border: none; padding: 0; background: transparent; }
    FirstRunScreen #first_about { height: 4; margin-top: 1; }
    FirstRunScreen #first_keys { height: 1; color: $text-muted; }
    """
    BINDINGS: ClassVar = [Binding("escape", "leave", "leave", show=False)]

    def __init__(self, machine: Machine):
        super().__init__()
        self.machine = machine
        self.offers: Sequence[Offer] = ()
        self.shown: list[Offer] = []
        self.filter = ""

    def compose(self) -> ComposeResult:
        yield Static("Which model?", id="first_title", markup=False)
        yield Static(LOOKING, id="first_said", markup=False)
        yield OptionList(id="first_models")
        yield Static(id="first_about", markup=False)
        yield Static(KEYS, id="first_keys", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self.run_worker(self.look, thread=True)

    def look(self) -> None:
        """By a thread: headers are read."""
        try:
            found = in_order(self.machine.offers())
        except (LocalLLMError, OSError) as error:
            self.app.call_from_thread(self.say, str(error))
            return
        self.app.call_from_thread(self.offer, found)

    def say(self, text: str) -> None:
        self.query_one("#first_said", Static).update(Text(text))

    def offer(self, offers: Sequence[Offer]) -> None:
        self.offers = offers
        others_here = any(offer.is_here and offer.name != BOXED for offer in offers)
        self.say(SOME_HERE if others_here else NOTHING_HERE)
        self.fill()

    def fill(self) -> None:
        """The list, of those that are meant by what was typed."""
        self.shown = [offer for offer in self.offers if self.filter in offer.name.lower()]
        models = self.query_one(OptionList)
        models.clear_options()
        models.add_options([Option(row(offer)) for offer in self.shown])
        models.highlighted = 0 if self.shown else None
        self.query_one("#first_keys", Static).update(Text(f"filter: {self.filter}" if self.filter else KEYS))
        if not self.shown:
            self.query_one("#first_about", Static).update(Text("no model has that in its name"))

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_index < len(self.shown):
            self.query_one("#first_about", Static).update(about(self.shown[event.option_index]))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self.shown[event.option_index].name)

    def on_key(self, event: events.Key) -> None:
        typed = self.filter[:-1] if event.key == "backspace" else self.filter
        if event.character and event.is_printable and not event.character.isspace():
            typed += event.character.lower()
        if typed != self.filter:
            self.filter = typed
            self.fill()
            event.stop()

    def action_leave(self) -> None:
        """First out of the filter."""
        if self.filter:
            self.filter = ""
            self.fill()
        else:
            self.dismiss(None)


def in_order(offers: Sequence[Offer]) -> list[Offer]:
    """Those that are here, where there are others than the boxed one, then the recommended one, then what fits,
    then what does not."""
    some_here = any(offer.is_here and offer.name != BOXED for offer in offers)

    def rank(offer: Offer) -> int:
        if offer.is_here and some_here and offer.name != BOXED:
            return 0
        if offer.recommended:
            return 1
        if offer.is_here:
            return 2
        return 3 if offer.fits else 4

    return sorted(offers, key=rank)


def row(offer: Offer) -> Text:
    style = "dim" if offer.fits is False else ""
    name = ("★ " if offer.recommended else "  ") + one_line(offer.name)
    nbytes = "here" if offer.is_here else f"{size(offer.bytes)}" if offer.bytes else "-"
    fits = "" if offer.fits is None else "fits" if offer.fits else "too large"
    parameters = offer.parameters.partition(",")[0]
    told = f"{name:{NAME}} {parameters:>{PARAMETERS}} {nbytes:>{DOWNLOAD}}  {fits:{FIT}}"
    return Text(f"{told}{one_line(offer.license or '-')}", style, no_wrap=True, overflow="ellipsis")


def about(offer: Offer) -> Text:
    said = Text(one_line(offer.about), no_wrap=True, overflow="ellipsis")
    said.append(f"\n{kind_of(offer)}")
    if fit := fit_of(offer):
        said.append(f"\n{fit}", "red" if offer.fits is False else "")
    if offer.recommended:
        said.append(f"\n{WHY}", "bold")
    return said
