"""The first step of loading: the files of a model, pulled and quantized where they were not."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from localllm.arch.config import ModelConfig
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.errors import UnsupportedModel
from localllm.hardware.device import free_bytes
from localllm.hub.resolve import ModelRef, locate_model, resolve_model
from localllm.llm.draft_model import DraftModelPlan
from localllm.metrics import PhaseTimer
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit
from localllm.quantize.keep import find_or_quantize
from localllm.quantize.source import INSTEAD, check_source
from localllm.request import Grammar
from localllm.settings import Settings


@dataclass(frozen=True)
class LoadRequest:
    """What `load` was asked for, with each `auto` replaced by the setting that it stands for."""

    ref: ModelRef
    draft_ref: ModelRef | None
    device: torch.device
    options: LoadOptions
    drafting: str  # lookup or off
    deterministic: bool | None  # None: where that holds
    grammar: Grammar | None
    force: bool
    max_queue: int
    settings: Settings
    phases: PhaseTimer
    on_part: Callable[[int, int], None]
    started: float = field(default_factory=time.perf_counter)  # seconds of that clock

    @property
    def free_memory(self) -> FreeMemory:
        """What the device has free now."""
        return FreeMemory(self.device.type, free_bytes(self.device))


@dataclass(frozen=True)
class FoundModel:
    """A model on this machine that localllm can run, and what its header says."""

    ref: ModelRef
    source: Path  # what was quantized on request; otherwise the path of `ref`
    header: Header
    config: ModelConfig
    options: LoadOptions  # without what has been done already: to quantize
    draft: DraftModelPlan | None


def resolve_or_fetch(name: str, device: torch.device, options: LoadOptions, *, force: bool) -> ModelRef:
    """Resolve the name, and pull the model where it is not on this machine. Raises what `resolve_model` and
    `llm.fetch.fetch` raise."""
    located = locate_model(name)
    if isinstance(located, ModelRef):
        return located
    from localllm.llm.fetch import LogProgress, fetch  # imports the Hub's library, which takes 0.1 s

    fetch(located, LogProgress(), lambda: FreeMemory(device.type, free_bytes(device)), options, force=force)
    return resolve_model(name)


def find(request: LoadRequest) -> FoundModel:
    """Quantize where that was asked for, and read the header of what will be loaded.

    Raises UnsupportedModel, DamagedModel and DoesNotFit before any weights are read.
    """
    options, phases = request.options, request.phases
    with phases("header"):
        ref = request.ref
        source, header = ref.path, read_header(ref.path)
        draft = request.draft_ref and DraftModelPlan.find(request.draft_ref, request.device.type, options)
        if options.quant is not None:
            check_source(header, INSTEAD)
            check_fit(header, request.free_memory, options, name=ref.name, force=request.force)
    if options.quant is not None:
        with phases("quantize"):
            made = find_or_quantize(
                header,
                options.quant,
                request.settings.home,
                lambda part, done, total: request.on_part(done, total),
            )
        ref = ModelRef(f"{ref.name} in {options.quant.upper()}", made, ref.edition)
        options = replace(options, quant=None)
        with phases("header"):
            header = read_header(ref.path)
    with phases("header"):
        config = parse_config(header.config)
        if config.encoder:
            raise UnsupportedModel(
                f"{ref.name!r} does not support chat", "ask it for vectors: `localllm embed`, load_embedder"
            )
        check_quantization(header.config)
        if ref.edition and ref.edition.context and options.context is None:
            options = replace(options, context=min(ref.edition.context, config.max_context))
    return FoundModel(ref, source, header, config, options, draft or None)
