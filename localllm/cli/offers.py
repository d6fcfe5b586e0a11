"""Models that the app offers: whether they fit, and about how fast they would be, without downloading or
measuring.

One is recommended for the machine: the strongest model that fits comfortably and is fast enough. Strength is the
number of parameters, which predicts the quality of answers better than anything else known in advance; for a
mixture of experts, it is the usual geometric mean of all and active parameters. Models for code, translation or
moderation are not recommended, nor are those whose license has to be accepted at the Hub first, before they are
downloaded.
"""

import math
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
from localllm.hub.catalog import CatalogEntry, catalog, find_entry
from localllm.plan.expected import ASSUMED_BANDWIDTH, known_tokens_per_s, measured_bandwidth
from localllm.plan.fit import COMFORTABLE_SHARE, Fit, FreeMemory, LoadOptions, fit_model
from localllm.quant.packing import ELEMENT_BYTES
from localllm.settings import Settings
from localllm.tui.machine import ModelOffer

if TYPE_CHECKING:
    import torch

MIN_TOKENS_PER_S = 8.0  # reading speed is 250 words per minute, which are 5.5 tokens per second
# Upper bound of context, workspace and recurrent states for nearly all models of the catalog
# (tests/cli/test_offers.py has the plan's own numbers).
OVERHEAD_BYTES = 1_000_000_000
QUANTIZED_BYTES_PER_PARAMETER = {"int8": 1.1, "int4": 0.65}  # by --quant, which does not quantize the embedding
STORED_IN_4_BITS = "mxfp4"


@dataclass(frozen=True)
class TargetDevice:
    """The device that models would run on, and the options they would be loaded with."""

    device: "torch.device"
    memory: FreeMemory
    options: LoadOptions
    settings: Settings

    @classmethod
    def resolve(cls, options: LoadOptions, device: str, settings: Settings) -> "TargetDevice":
        """Raises NoSuchDevice and UsageError like `resolve_device`."""
        resolved = resolve_device(device)
        return cls(resolved, FreeMemory(resolved.type, free_bytes(resolved)), options, settings)


@dataclass(frozen=True)
class Candidate:
    """A model that may be recommended."""

    offer: ModelOffer
    parameters: float
    active_parameters: float  # used by each token
    weight_bytes: int  # in memory
    gated: bool = False  # and not downloaded
    purpose: str | None = None  # None for conversation

    @property
    def strength(self) -> float:
        return math.sqrt(self.parameters * self.active_parameters)

    def tokens_per_s(self, device_type: str) -> float:
        """Expected decode speed on a device of this type."""
        bytes_per_token = self.weight_bytes * self.active_parameters / self.parameters
        return self.offer.tokens_per_s or ASSUMED_BANDWIDTH[device_type] / bytes_per_token


def list_offers(options: LoadOptions, device: str, settings: Settings) -> Sequence[ModelOffer]:
    """Models to chat with: first local ones, then those of the catalog, each from small to large, with those of
    unknown size last. Raises the errors of `TargetDevice.resolve`."""
    target = TargetDevice.resolve(options, device, settings)
    pairs = [pair for entry in list_entries() if (pair := offer_from_entry(entry, target))]
    pairs.sort(key=lambda pair: (not pair[0].is_here, pair[1].strength if pair[1] else math.inf))
    best = recommend([candidate for _, candidate in pairs if candidate], target.memory.device_type)
    return [replace(offer, recommended=offer is best) for offer, _ in pairs]


def recommend(candidates: Sequence[Candidate], device_type: str) -> ModelOffer | None:
    """The recommended model, or None if no candidate is suitable. Equally strong ones are ranked by whether they
    are downloaded, then by size."""

    def suitable(candidate: Candidate) -> bool:
        offer = candidate.offer
        fits = offer.fits and (offer.needs_bytes or 0) <= COMFORTABLE_SHARE * (offer.free_bytes or 0)
        eligible = not candidate.gated and candidate.purpose is None
        return bool(fits) and eligible and candidate.tokens_per_s(device_type) >= MIN_TOKENS_PER_S

    def rank(candidate: Candidate) -> tuple[float, bool, float]:
        return candidate.strength, candidate.offer.is_here, -candidate.weight_bytes

    best = max(filter(suitable, candidates), key=rank, default=None)
    return best.offer if best else None


def offer_from_entry(entry: ModelEntry, target: TargetDevice) -> tuple[ModelOffer, Candidate | None] | None:
    """Offer of a model, and a candidate if it may be recommended. None for an embedder, and for a cached
    quantization, which is offered under the name of its source."""
    catalog_entry = catalog().get(entry.name)
    if " --quant " in entry.name:
        return None
    if not entry.is_here:
        if catalog_entry and catalog_entry.embeds:
            return None
        return offer_from_catalog(entry, catalog_entry, target)
    about = catalog_entry.about if catalog_entry else entry.state.value
    if entry.fault or entry.facts is None:
        return offer_without_estimate(entry, entry.fault.message if entry.fault else about), None
    if entry.facts.dimensions or entry.path is None:
        return None
    if entry.facts.refused:
        return offer_without_estimate(entry, entry.facts.refused.message), None
    offer, fit = offer_with_estimate(offer_without_estimate(entry, about), read_header(entry.path), target)
    if fit is None:
        return offer, None
    parameters, active = entry.facts.parameters, entry.facts.active_parameters
    known = find_entry(entry.name)
    return offer, Candidate(offer, parameters, active, fit.weights.total, purpose=known.purpose if known else None)


def offer_without_estimate(entry: ModelEntry, about: str) -> ModelOffer:
    """Offer of a local model, without its memory use and speed."""
    nbytes = entry.facts.weight_bytes if entry.facts else None
    return ModelOffer(entry.name, about, entry.parameters, nbytes, entry.license, True, None, None, None, None)


def offer_with_estimate(offer: ModelOffer, header: Header, target: TargetDevice) -> tuple[ModelOffer, Fit | None]:
    """Offer with memory use and speed, which the plan computes from the header; the fit is None if the model is
    not supported."""
    try:
        check_quantization(header.config)
        options = replace(target.options, quant=None) if header.quantization else target.options
        fit = fit_model(header, parse_config(header.config), target.memory, options, name=offer.name)
        rate = None
        if fit.fits:
            rate = known_tokens_per_s(header, fit, target.device, target.settings, name=offer.name)
    except LocalLLMError as error:
        return replace(offer, about=error.message), None
    needs, free = fit.required_bytes, target.memory.memory_bytes
    return replace(offer, fits=fit.fits, needs_bytes=needs, free_bytes=free, tokens_per_s=rate), fit


def offer_from_catalog(
    entry: ModelEntry, catalog_entry: CatalogEntry | None, target: TargetDevice
) -> tuple[ModelOffer, Candidate | None]:
    """Offer of a model that is not downloaded, estimated from the catalog."""
    about = catalog_entry.about if catalog_entry else "an alias"
    offer = ModelOffer(
        entry.name, about, entry.parameters, entry.download_bytes, entry.license, False, None, None, None, None
    )
    if catalog_entry is None:
        return offer, None
    total = parse_count(catalog_entry.parameters) if catalog_entry.parameters else None
    weight_bytes = estimate_weight_bytes(catalog_entry, total, target)
    if weight_bytes is None:
        return offer, None
    needs, free = weight_bytes + OVERHEAD_BYTES, target.memory.memory_bytes
    offer = replace(offer, fits=needs <= free, needs_bytes=needs, free_bytes=free)
    if total is None:
        return offer, None
    active = parse_count(catalog_entry.active) if catalog_entry.active else total
    if offer.fits and (bytes_per_s := measured_bandwidth(target.device, target.options.dtype, target.settings)):
        offer = replace(offer, tokens_per_s=bytes_per_s / (weight_bytes * active / total))
    if active < total:
        offer = replace(offer, parameters=f"{catalog_entry.parameters}, {catalog_entry.active} active")
    return offer, Candidate(offer, total, active, weight_bytes, catalog_entry.gated, catalog_entry.purpose)


def estimate_weight_bytes(entry: CatalogEntry, parameters: float | None, target: TargetDevice) -> int | None:
    """Approximate memory of the weights; GGUF files and 4-bit weights take the size of their files."""
    if entry.quant or entry.recommended == STORED_IN_4_BITS or parameters is None:
        return entry.bytes
    element_bytes = ELEMENT_BYTES[dtype_for(target.options.dtype, "BF16", target.memory.device_type)]
    return round(parameters * QUANTIZED_BYTES_PER_PARAMETER.get(target.options.quant or "", element_bytes))


def offer_from_header(name: str, header: Header, target: TargetDevice, *, nbytes: int) -> ModelOffer:
    """Offer of a model that is about to be downloaded. nbytes: size of all its files."""
    entry = catalog().get(name)
    about, license = (entry.about, entry.license) if entry else ("", None)
    parameters = entry and entry.parameters
    offer = ModelOffer(name, about, parameters or "-", nbytes, license, False, None, None, None, None)
    offer, fit = offer_with_estimate(offer, header, target)
    if fit and not parameters:
        offer = replace(offer, parameters=format_count(parameter_count(fit.needs.config)))
    return offer
