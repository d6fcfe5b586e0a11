"""Chooses what a catalogue name without a format downloads: the 4-bit edition, or one with more bits where that
costs no speed that a person would notice.

More bits change the answers of small models most, and a decode step reads every weight once, so speed falls as the
bytes grow. An edition with more bits is therefore chosen only if

1. the model is small: the published weights below 2 billion parameters, Q8_0 below 10 billion, the limits of
   `recommended` in models.toml;
2. it fits comfortably: with 8,192 tokens of context it leaves a quarter of the memory free;
3. it decodes at least 30 tokens per second, by the bytes that a step reads and the measured or assumed bandwidth.

With `--quant`, the choice is the published edition, because only that can be quantized. An edition with less than
4 bits is never chosen. If 4 bits do not fit, the error names one that does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Protocol

from localllm.arch.cost import SequenceStep, bytes_read
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.checkpoint.layouts import check_quantization
from localllm.checkpoint.remote import remote_header
from localllm.errors import AccessDenied, ModelNotFound, UnsupportedModel
from localllm.formatting import format_bytes, format_rough_bytes, parse_count
from localllm.hub.catalog import CatalogEntry, catalog_entries, editions_of, find_entry, published_entry
from localllm.hub.gguf import distinct_models, model_tags, quant_tag
from localllm.hub.http import Notify
from localllm.hub.listing import Listing, fetch_listing
from localllm.hub.names import RepoName
from localllm.hub.pull import PullPlan, plan_files, plan_pull, read_small, select_files
from localllm.plan.expected import ASSUMED_BANDWIDTH
from localllm.plan.fit import COMFORTABLE_SHARE, DeviceMemory, Fit, LoadOptions, fit_model
from localllm.quant.packing import ELEMENT_BYTES, kv_element_bytes

PUBLISHED_BELOW, EIGHT_BITS_BELOW = 2e9, 10e9  # parameters
MIN_TOKENS_PER_S = 30.0  # five times reading speed: reasoning and code are skimmed
COMFORTABLE_CONTEXT = 8192  # tokens
BYTES_PER_PARAMETER = {"Q8_0": 1.0, None: 2.0}  # at least, before the files are listed
MAX_HEADERS = 3  # that are read to find a smaller edition that fits
CATALOGUE_OVERHEAD = 1_000_000_000  # bytes besides the weights, for models of which only the size is known


class DecodingDevice(DeviceMemory, Protocol):
    """A device with its bandwidth, like DeviceSpec and FreeMemory."""

    @property
    def bandwidth(self) -> float | None:
        """Bytes read per second; None if it was not measured."""
        ...


@dataclass(frozen=True)
class EditionChoice:
    """The edition of a catalogue name that is to be pulled."""

    entry: CatalogEntry  # of the name, in 4 bits
    edition: CatalogEntry
    plan: PullPlan

    def describe(self, fit: Fit) -> str:
        """Return a line that states what is downloaded, that it fits, and the name of another edition."""
        published = published_entry(self.entry)
        files = [tag for file in self.plan.files if (tag := quant_tag(PurePosixPath(file.path)))]
        edition = f"the {files[0]} GGUF" if files else "the original"
        other = f"; {published.name} for the original" if published and files else ""
        other = other if files else f"; {self.entry.name}-q4_k_m for 4 bits"
        return (
            f"{self.entry.name}: {edition}, {format_bytes(self.plan.total_bytes)}, "
            f"fits with {fit.context:,} tokens of context{other}"
        )


def choose_edition(
    entry: CatalogEntry, device: DecodingDevice, options: LoadOptions, notify: Notify
) -> EditionChoice:
    """Choose an edition of a 4-bit entry for a device. Raises the errors of `plan_pull` for the edition in 4 bits,
    and UsageError for a context longer than the model's."""
    if options.quant and (published := published_entry(entry)):
        return EditionChoice(entry, published, plan_pull(_repo(published), notify))
    listing = fetch_listing(_repo(entry), notify)
    for edition in _larger_editions(entry, device):
        if plan := _plan_if_comfortable(edition, listing, device, options, notify):
            return EditionChoice(entry, edition, plan)
    return EditionChoice(entry, entry, _plan(listing, notify))


def _larger_editions(entry: CatalogEntry, device: DecodingDevice) -> Iterator[CatalogEntry]:
    """Yield the editions with more bits that are worth a look at their files, in descending order of bits."""
    if entry.parameters is None:
        return
    parameters = parse_count(entry.parameters)
    active = parse_count(entry.active) if entry.active else parameters
    for edition in reversed(editions_of(entry)[1:]):
        is_small = parameters < (EIGHT_BITS_BELOW if edition.quant else PUBLISHED_BELOW)
        seconds = active * BYTES_PER_PARAMETER[edition.quant] / _bandwidth(device)
        if is_small and not edition.gated and seconds * MIN_TOKENS_PER_S <= 1:
            yield edition


def _plan_if_comfortable(
    edition: CatalogEntry, listing: Listing, device: DecodingDevice, options: LoadOptions, notify: Notify
) -> PullPlan | None:
    """Return the plan to pull an edition; None if it is not on the Hub, not supported, or too large or slow."""
    repo = _repo(edition)
    try:
        is_same = (repo.repo, repo.revision) == (listing.repo.repo, listing.repo.revision)
        plan = _plan(replace(listing, repo=repo) if is_same else fetch_listing(repo, notify), notify)
        if plan.total_bytes > COMFORTABLE_SHARE * device.memory_bytes:
            return None
        header = remote_header(plan, notify)
        check_quantization(header.config)
        return plan if is_comfortable(header, device, options, edition.name) else None
    except (ModelNotFound, AccessDenied, UnsupportedModel):  # the edition in 4 bits may still be pulled
        return None


def is_comfortable(header: Header, device: DecodingDevice, options: LoadOptions, name: str) -> bool:
    """Whether a model leaves enough memory free and decodes fast enough. Raises the errors of `fit_model`."""
    config = parse_config(header.config)
    context = options.context or min(COMFORTABLE_CONTEXT, config.max_context)
    fit = fit_model(header, config, device, replace(options, context=context), name=name)
    element, kv = ELEMENT_BYTES[fit.dtype], kv_element_bytes(fit.kv_dtype)
    step_bytes = bytes_read(config, fit.weights, (SequenceStep(1, 1),), element, kv)
    return (
        fit.fits
        and fit.required_bytes <= COMFORTABLE_SHARE * device.memory_bytes
        and _bandwidth(device) >= MIN_TOKENS_PER_S * step_bytes
    )


def what_fits(
    choice: EditionChoice, header: Header, device: DeviceMemory, options: LoadOptions, notify: Notify
) -> str | None:
    """Return a remedy if the weights in 4 bits do not fit: a smaller edition, whose header was read, and a smaller
    model by the catalogue's size. Returns None if there is neither, or only the context is too long.

    header: of the choice. Raises the errors of `remote_header`.
    """
    fit = fit_model(header, parse_config(header.config), device, options, name=choice.entry.name)
    if fit.max_context or choice.edition is not choice.entry:
        return None
    smaller = _smaller_edition(choice, device, options, notify)
    model = _smaller_model(choice.entry, device.memory_bytes)
    names = [smaller] if smaller else []
    if model and model.bytes:
        names.append(f"{model.name}, about {format_rough_bytes(model.bytes)}")
    return f"what fits: {'; or '.join(names)}" if names else None


def _smaller_edition(
    choice: EditionChoice, device: DeviceMemory, options: LoadOptions, notify: Notify
) -> str | None:
    """Return the largest edition with fewer bits that fits, with its size."""
    listing = choice.plan.listing
    models = distinct_models(PurePosixPath(file.path) for file in listing.files)
    plans = [
        (tag, plan_files(named, select_files(named, lambda file: read_small(listing, file, notify))))
        for tag in model_tags(models)
        for named in [replace(listing, repo=replace(listing.repo, quant=tag))]
        if find_entry(f"{choice.entry.name}-{tag}")
    ]
    smaller = [(tag, plan) for tag, plan in plans if plan.total_bytes < choice.plan.total_bytes]
    smaller = [(tag, plan) for tag, plan in smaller if plan.total_bytes < device.memory_bytes]
    for tag, plan in sorted(smaller, key=lambda pair: -pair[1].total_bytes)[:MAX_HEADERS]:
        try:
            header = remote_header(plan, notify)
            check_quantization(header.config)
        except UnsupportedModel:
            continue
        name = f"{choice.entry.name}-{tag.lower()}"
        if fit_model(header, parse_config(header.config), device, options, name=name).fits:
            return f"{name}, {format_bytes(plan.total_bytes)}"
    return None


def _smaller_model(entry: CatalogEntry, memory_bytes: int) -> CatalogEntry | None:
    """Return the largest smaller model of the same family whose 4-bit edition should fit."""
    family = f"{entry.name.partition(':')[0]}:"
    smaller = [
        other
        for other in catalog_entries()
        if other.name.startswith(family)
        and other.quant
        and other.bytes
        and other.bytes < (entry.bytes or 0)
        and other.bytes + CATALOGUE_OVERHEAD <= memory_bytes
    ]
    return max(smaller, key=lambda other: other.bytes or 0, default=None)


def _repo(entry: CatalogEntry) -> RepoName:
    assert entry.repo
    return RepoName(entry.repo, entry.revision, entry.quant)


def _plan(listing: Listing, notify: Notify) -> PullPlan:
    return plan_files(listing, select_files(listing, lambda file: read_small(listing, file, notify)))


def _bandwidth(device: DecodingDevice) -> float:
    return device.bandwidth or ASSUMED_BANDWIDTH[device.device_type]
