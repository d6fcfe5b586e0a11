"""Models as the app offers them: whether they fit, and about how fast they would be, by what is known without a
download or a measurement."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.arch.cost import parameters
from localllm.arch.describe import describe
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.cli.models import Entry, known_models
from localllm.cli.recommended import Candidate, recommended
from localllm.device import dtype_for, free_bytes, resolve_device
from localllm.errors import LocalLLMError
from localllm.hub.catalog import CatalogEntry, catalog
from localllm.plan.fit import Fit, Space, Wish, fit
from localllm.plan.memory import blocks_for
from localllm.quant.packing import ELEMENT_BYTES
from localllm.settings import Settings
from localllm.tui.machine import Offer
from localllm.units import count, parameters_of

if TYPE_CHECKING:
    import torch

# A usual context, its step and its recurrent states take so much of nearly all models of the catalogue, or less
# (tests/cli/test_offers.py has the plan's own numbers).
BESIDE_WEIGHTS = 1_000_000_000
QUANTIZED_BYTES = {"int8": 1.1, "int4": 0.65}  # a parameter, by `--quant`, which leaves the embedding as it is
STORED_IN_4_BITS = "mxfp4"


@dataclass(frozen=True)
class Place:
    """Where models would run, and how."""

    device: "torch.device"
    space: Space
    wish: Wish
    settings: Settings

    @classmethod
    def of(cls, wish: Wish, device: str, settings: Settings) -> "Place":
        """Raises NoSuchDevice and UsageError as `resolve_device`."""
        found = resolve_device(device)
        return cls(found, Space(found.type, free_bytes(found)), wish, settings)


def offers(wish: Wish, device: str, settings: Settings) -> Sequence[Offer]:
    """Models here first, then those of the catalogue, smaller ones first; embedders are none that one talks to."""
    place = Place.of(wish, device, settings)
    found = [offered for entry in known_models() if (offered := offer_of_entry(entry, place))]
    found.sort(key=lambda pair: (not pair[0].is_here, pair[1].strength if pair[1] else 0.0))
    best = recommended([candidate for _, candidate in found if candidate], place.space.kind)
    return [replace(offer, recommended=offer is best) for offer, _ in found]


def offer_of_entry(entry: Entry, place: Place) -> tuple[Offer, Candidate | None] | None:
    """None for what nobody talks to: an embedder, and what `--quant` keeps for the name that it was made of."""
    known = catalog().get(entry.name)
    if " --quant " in entry.name:
        return None
    if not entry.is_here:
        return stated(entry, known, place)
    about = known.about if known else entry.state.value
    if entry.fault or entry.facts is None:
        return plain(entry, entry.fault.message if entry.fault else about), None
    if entry.facts.dimensions or entry.path is None:
        return None
    if entry.facts.refused:
        return plain(entry, entry.facts.refused.message), None
    offer, found = measured(plain(entry, about), read_header(entry.path), place)
    if found is None:
        return offer, None
    counts = entry.facts.parameters, entry.facts.active_parameters
    return offer, Candidate(offer, *counts, found.weights.total)


def plain(entry: Entry, about: str) -> Offer:
    """One that is here, without what it takes."""
    nbytes = entry.facts.weight_bytes if entry.facts else None
    return Offer(entry.name, about, entry.parameters, nbytes, entry.license, True, None, None, None, None)


def measured(offer: Offer, header: Header, place: Place) -> tuple[Offer, Fit | None]:
    """With what its header tells of memory and speed. None where the plan does not know such a model."""
    from localllm.plan.expected import known_rate

    try:
        check_quantization(header.config)
        wish = replace(place.wish, quant=None) if header.quantization else place.wish
        found = fit(header, describe(header.config), place.space, wish, name=offer.name)
        rate = known_rate(header, found, place.device, place.settings, name=offer.name) if found.fits else None
    except LocalLLMError as error:
        return replace(offer, about=error.message), None
    needs, free = needs_bytes(found), place.space.memory_bytes
    return replace(offer, fits=found.fits, needs_bytes=needs, free_bytes=free, tokens_per_s=rate), found


def needs_bytes(found: Fit) -> int:
    """Of memory, for one conversation that fills its context."""
    memory = found.memory
    states = memory.state_bytes if memory else 2 * found.needs.row_bytes
    cache = blocks_for(found.context) * found.needs.block_bytes
    return found.weights.total + cache + states + found.workspace


def stated(entry: Entry, known: CatalogEntry | None, place: Place) -> tuple[Offer, Candidate | None]:
    """One that is not here, by what the catalogue says of it."""
    about = known.about if known else "a name that was given to it"
    nothing = Offer(
        entry.name, about, entry.parameters, entry.download_bytes, entry.license, False, None, None, None, None
    )
    total = parameters_of(known.parameters) if known and known.parameters else None
    weights = weight_bytes(known, total, place) if known else None
    if known is None or weights is None:
        return nothing, None
    needs, free = weights + BESIDE_WEIGHTS, place.space.memory_bytes
    offer = replace(nothing, fits=needs <= free, needs_bytes=needs, free_bytes=free)
    if total is None:
        return offer, None
    active = parameters_of(known.active) if known.active else total
    if offer.fits and (read := read_rate(place)):
        offer = replace(offer, tokens_per_s=read / (weights * active / total))
    if active < total:
        offer = replace(offer, parameters=f"{known.parameters}, {known.active} active")
    return offer, Candidate(offer, total, active, weights, known.gated)


def weight_bytes(known: CatalogEntry, parameters: float | None, place: Place) -> int | None:
    """In memory, about: files of GGUF and of 4 bits stay as they are."""
    if known.quant or known.recommended == STORED_IN_4_BITS or parameters is None:
        return known.bytes
    element = ELEMENT_BYTES[dtype_for(place.wish.dtype, "BF16", place.space.kind)]
    return round(parameters * QUANTIZED_BYTES.get(place.wish.quant or "", element))


def read_rate(place: Place) -> float | None:
    """Bytes of plain weights a second that steps of decoding get through here, if that was measured."""
    from localllm.device import resolve_dtype
    from localllm.plan.measured import DECODING
    from localllm.rates import kept_rates

    dtype = resolve_dtype(place.wish.dtype, "BF16", place.device)
    kept = kept_rates(place.device, dtype, place.settings)
    return DECODING * kept.read if kept else None


def offer_of(name: str, header: Header, place: Place, *, nbytes: int) -> Offer:
    """One that is about to be downloaded, by its headers. nbytes: of all its files."""
    known = catalog().get(name)
    about, license = (known.about, known.license) if known else ("", None)
    stated = known and known.parameters
    offer = Offer(name, about, stated or "-", nbytes, license, False, None, None, None, None)
    offer, found = measured(offer, header, place)
    return replace(offer, parameters=count(parameters(found.needs.config))) if found and not stated else offer
