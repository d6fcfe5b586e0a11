"""Models as the app offers them: whether they fit, and about how fast they would be, by what is known without a
download or a measurement."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.arch.cost import parameter_count
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.cli.models import ModelEntry, list_entries
from localllm.errors import LocalLLMError
from localllm.formatting import format_count, parse_count
from localllm.hardware.device import dtype_for, free_bytes, resolve_device
from localllm.hub.catalog import CatalogEntry, catalog
from localllm.plan.expected import ASSUMED_BANDWIDTH, known_tokens_per_s, measured_bandwidth
from localllm.plan.fit import COMFORTABLE_SHARE, Fit, FreeMemory, LoadOptions, fit_model
from localllm.quant.packing import ELEMENT_BYTES
from localllm.settings import Settings
from localllm.tui.machine import ModelOffer

if TYPE_CHECKING:
    import torch
import math

# Which model is recommended for a machine: the best that fits comfortably and would be fast enough.
#
# Best is the one of most parameters, as that says more of a model's answers than anything else that is known
# before it is tried; a mixture counts as the geometric mean of all of them and those that one token meets, as is
# usual. Comfortably: with a quarter of the free memory to spare, since other programs want some, and
# conversations grow. Fast enough: as fast as people read, 250 words a minute, with something to spare. One whose
# terms have to be accepted first, at the Hub, is not recommended before that is done.
MIN_TOKENS_PER_S = 8.0  # 250 words a minute are 5.5, at four tokens for three words


@dataclass(frozen=True)
class Candidate:
    """A model that answers, of which enough is known."""

    offer: ModelOffer
    parameters: float
    active_parameters: float  # of them, those that one token meets
    weight_bytes: int  # in memory
    gated: bool = False  # and not here

    @property
    def strength(self) -> float:
        return math.sqrt(self.parameters * self.active_parameters)

    def tokens_per_s(self, device_type: str) -> float:
        """device_type: of the device."""
        read = self.weight_bytes * self.active_parameters / self.parameters
        return self.offer.tokens_per_s or ASSUMED_BANDWIDTH[device_type] / read


def recommend(candidates: Sequence[Candidate], device_type: str) -> ModelOffer | None:
    """None where nothing fits that comfortably. Among equals one that is here, then the smaller download."""

    def good(candidate: Candidate) -> bool:
        offer = candidate.offer
        fits = offer.fits and (offer.needs_bytes or 0) <= COMFORTABLE_SHARE * (offer.free_bytes or 0)
        return bool(fits) and not candidate.gated and candidate.tokens_per_s(device_type) >= MIN_TOKENS_PER_S

    def rank(candidate: Candidate) -> tuple[float, bool, float]:
        return candidate.strength, candidate.offer.is_here, -candidate.weight_bytes

    best = max(filter(good, candidates), key=rank, default=None)
    return best.offer if best else None


# A usual context, its step and its recurrent states take so much of nearly all models of the catalogue, or less
# (tests/cli/test_offers.py has the plan's own numbers).
OVERHEAD_BYTES = 1_000_000_000
QUANTIZED_BYTES_PER_PARAMETER = {
    "int8": 1.1,
    "int4": 0.65,
}  # a parameter, by `--quant`, which leaves the embedding as it is
STORED_IN_4_BITS = "mxfp4"


@dataclass(frozen=True)
class TargetDevice:
    """Where models would run, and how."""

    device: "torch.device"
    space: FreeMemory
    wish: LoadOptions
    settings: Settings

    @classmethod
    def resolve(cls, wish: LoadOptions, device: str, settings: Settings) -> "TargetDevice":
        """Raises NoSuchDevice and UsageError as `resolve_device`."""
        found = resolve_device(device)
        return cls(found, FreeMemory(found.type, free_bytes(found)), wish, settings)


def list_offers(wish: LoadOptions, device: str, settings: Settings) -> Sequence[ModelOffer]:
    """Models here first, then those of the catalogue, smaller ones first; embedders are none that one talks to."""
    place = TargetDevice.resolve(wish, device, settings)
    found = [offered for entry in list_entries() if (offered := offer_from_entry(entry, place))]
    found.sort(key=lambda pair: (not pair[0].is_here, pair[1].strength if pair[1] else 0.0))
    best = recommend([candidate for _, candidate in found if candidate], place.space.device_type)
    return [replace(offer, recommended=offer is best) for offer, _ in found]


def offer_from_entry(entry: ModelEntry, target: TargetDevice) -> tuple[ModelOffer, Candidate | None] | None:
    """None for what nobody talks to: an embedder, and what `--quant` keeps for the name that it was made of."""
    known = catalog().get(entry.name)
    if " --quant " in entry.name:
        return None
    if not entry.is_here:
        return None if known and known.embeds else offer_from_catalog(entry, known, target)
    about = known.about if known else entry.state.value
    if entry.fault or entry.facts is None:
        return offer_without_estimate(entry, entry.fault.message if entry.fault else about), None
    if entry.facts.dimensions or entry.path is None:
        return None
    if entry.facts.refused:
        return offer_without_estimate(entry, entry.facts.refused.message), None
    offer, found = offer_with_estimate(offer_without_estimate(entry, about), read_header(entry.path), target)
    if found is None:
        return offer, None
    counts = entry.facts.parameters, entry.facts.active_parameters
    return offer, Candidate(offer, *counts, found.weights.total)


def offer_without_estimate(entry: ModelEntry, about: str) -> ModelOffer:
    """One that is here, without what it takes."""
    nbytes = entry.facts.weight_bytes if entry.facts else None
    return ModelOffer(entry.name, about, entry.parameters, nbytes, entry.license, True, None, None, None, None)


def offer_with_estimate(offer: ModelOffer, header: Header, target: TargetDevice) -> tuple[ModelOffer, Fit | None]:
    """With what its header tells of memory and speed. None where the plan does not know such a model."""
    try:
        check_quantization(header.config)
        wish = replace(target.wish, quant=None) if header.quantization else target.wish
        found = fit_model(header, parse_config(header.config), target.space, wish, name=offer.name)
        rate = (
            known_tokens_per_s(header, found, target.device, target.settings, name=offer.name)
            if found.fits
            else None
        )
    except LocalLLMError as error:
        return replace(offer, description=error.message), None
    needs, free = found.required_bytes, target.space.memory_bytes
    return replace(offer, fits=found.fits, needs_bytes=needs, free_bytes=free, tokens_per_s=rate), found


def offer_from_catalog(
    entry: ModelEntry, known: CatalogEntry | None, target: TargetDevice
) -> tuple[ModelOffer, Candidate | None]:
    """One that is not here, by what the catalogue says of it."""
    about = known.about if known else "a name that was given to it"
    nothing = ModelOffer(
        entry.name, about, entry.parameters, entry.download_bytes, entry.license, False, None, None, None, None
    )
    total = parse_count(known.parameters) if known and known.parameters else None
    weights = estimate_weight_bytes(known, total, target) if known else None
    if known is None or weights is None:
        return nothing, None
    needs, free = weights + OVERHEAD_BYTES, target.space.memory_bytes
    offer = replace(nothing, fits=needs <= free, needs_bytes=needs, free_bytes=free)
    if total is None:
        return offer, None
    active = parse_count(known.active) if known.active else total
    if offer.fits and (read := measured_bandwidth(target.device, target.wish.dtype, target.settings)):
        offer = replace(offer, tokens_per_s=read / (weights * active / total))
    if active < total:
        offer = replace(offer, parameters=f"{known.parameters}, {known.active} active")
    return offer, Candidate(offer, total, active, weights, known.gated)


def estimate_weight_bytes(known: CatalogEntry, parameters: float | None, target: TargetDevice) -> int | None:
    """In memory, about: files of GGUF and of 4 bits stay as they are."""
    if known.quant or known.recommended == STORED_IN_4_BITS or parameters is None:
        return known.bytes
    element = ELEMENT_BYTES[dtype_for(target.wish.dtype, "BF16", target.space.device_type)]
    return round(parameters * QUANTIZED_BYTES_PER_PARAMETER.get(target.wish.quant or "", element))


def offer_from_header(name: str, header: Header, target: TargetDevice, *, nbytes: int) -> ModelOffer:
    """One that is about to be downloaded, by its headers. nbytes: of all its files."""
    known = catalog().get(name)
    about, license = (known.about, known.license) if known else ("", None)
    stated = known and known.parameters
    offer = ModelOffer(name, about, stated or "-", nbytes, license, False, None, None, None, None)
    offer, found = offer_with_estimate(offer, header, target)
    return (
        replace(offer, parameters=format_count(parameter_count(found.needs.config)))
        if found and not stated
        else offer
    )
