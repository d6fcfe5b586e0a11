"""What `localllm doctor` finds out about this machine. Judges nothing, and never touches the network."""

import math
import os
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from localllm.cli.io import is_terminal, status
from localllm.cli.loading import load_model
from localllm.errors import LocalLLMError
from localllm.hardware.device import (
    Gpu,
    container_memory,
    count_nvidia_devices,
    cpu_features,
    dtype_name,
    free_host_bytes,
    list_gpus,
    nvidia_driver,
    processor_name,
    resolve_dtype,
    usable_cores,
)
from localllm.hardware.measure import Rates, device_rates
from localllm.hardware.processor import kernel_instructions, library_versions
from localllm.hub.hf_cache import CacheState, cache_state, is_writable
from localllm.hub.http import HubAccess, hub_access
from localllm.request import ChatRequest, SamplingParams
from localllm.settings import Settings

LIBRARIES = ("torch", "triton", "huggingface_hub", "tokenizers", "gguf")
BUNDLED_MODEL, CHECK_PROMPT, CHECK_TOKENS = "demo", "Once upon a time", 32


@dataclass(frozen=True)
class Processor:
    name: str
    cores: float  # that may be used
    cores_here: int
    threads: int | None  # that torch uses; None where torch cannot be imported, as below
    instructions: list[str] | None  # what torch makes use of
    kernels: (
        str | None
    )  # instructions that products of packed weights use, and better ones that LOCALLLM_CPU denies
    memory_bytes: int
    free_bytes: int
    container_bytes: int | None  # the limit of the container, None without one


@dataclass(frozen=True)
class Nvidia:
    plugged_in: int  # GPUs, as far as the system says
    driver: str | None  # its version
    torch_cuda: str | None  # the version of CUDA that torch was built with
    hidden: bool  # CUDA_VISIBLE_DEVICES shows none
    fault: str | None  # where torch finds a GPU that does not answer


@dataclass(frozen=True)
class Measured:
    device: str
    dtype: str
    rates: Rates | None
    fault: str | None


@dataclass(frozen=True)
class Home:
    path: Path
    because: str
    writable: bool


@dataclass(frozen=True)
class BoxedModel:
    device: str | None = None
    dtype: str | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    fault: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class Terminal:
    here: bool  # stdout is one
    type: str
    encoding: str


@dataclass(frozen=True)
class Examination:
    versions: dict[str, str | None]
    torch_fault: str | None
    processor: Processor
    gpus: list[Gpu]
    nvidia: Nvidia
    measured: list[Measured]
    boxed: BoxedModel
    cache: CacheState
    home: Home
    hub: HubAccess
    terminal: Terminal


def examine_machine(settings: Settings) -> Examination:
    """Takes a second or two: it measures, and lets the boxed model say something."""
    with status("examining this machine"):
        torch_fault = _torch_fault()
        found, gpu_fault = ([], None) if torch_fault else _gpus()
        places = [] if torch_fault else ["cpu", *(f"cuda:{gpu.index}" for gpu in found)]
        measured = [_measure_rates(place, settings) for place in places]
    return Examination(
        versions=library_versions(LIBRARIES),
        torch_fault=torch_fault,
        processor=_processor(torch_fault is None),
        gpus=found,
        nvidia=_nvidia(torch_fault is None, gpu_fault),
        measured=measured,
        boxed=BoxedModel(fault="torch cannot be imported") if torch_fault else _run_bundled_model(),
        cache=cache_state(),
        home=_home(settings),
        hub=hub_access(),
        terminal=Terminal(is_terminal(sys.stdout), os.environ.get("TERM", ""), sys.getfilesystemencoding()),
    )


def _torch_fault() -> str | None:
    """A library of the system that is missing raises OSError, a broken installation anything."""
    try:
        import torch  # noqa: F401
    except Exception as error:
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _processor(with_torch: bool) -> Processor:
    import psutil

    container = container_memory()
    threads, used = _torch_threads_and_instructions() if with_torch else (None, None)
    return Processor(
        name=processor_name(),
        cores=usable_cores(),
        cores_here=os.cpu_count() or 1,
        threads=threads,
        instructions=used,
        kernels=kernel_instructions() if with_torch else None,
        memory_bytes=psutil.virtual_memory().total,
        free_bytes=free_host_bytes(),
        container_bytes=container[0] if container else None,
    )


def _torch_threads_and_instructions() -> tuple[int, list[str]]:
    import torch

    return torch.get_num_threads(), cpu_features()


def _gpus() -> tuple[list[Gpu], str | None]:
    try:
        return list_gpus(), None
    except RuntimeError as error:
        return [], _first_line(error)


def _nvidia(with_torch: bool, fault: str | None) -> Nvidia:
    cuda = None
    if with_torch:
        import torch

        cuda = torch.version.cuda
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return Nvidia(count_nvidia_devices(), nvidia_driver(), cuda, hidden, fault)


def _measure_rates(device: str, settings: Settings) -> Measured:
    import torch

    place = torch.device(device)
    try:
        dtype = resolve_dtype(settings.dtype, "BF16", place)
        # What would be noted is found out here anyway: a busy machine, a home that cannot be written.
        rates = device_rates(place, dtype, settings, remeasure=True, note=lambda text: None)
    except (LocalLLMError, RuntimeError) as error:  # RuntimeError: how torch says that memory is short
        return Measured(device, settings.dtype, None, str(error).partition("\n")[0])
    return Measured(device, dtype_name(dtype), rates, None)


def _run_bundled_model() -> BoxedModel:
    """A real answer of the model that comes with the program, from loading it to its last token."""
    params = SamplingParams(temperature=0, max_tokens=CHECK_TOKENS)
    try:
        with closing(load_model(BUNDLED_MODEL, device=None, dtype=None, context=None)) as llm:
            events = list(llm.answer(ChatRequest(CHECK_PROMPT, params)))
            metrics = events[-1].metrics
            fault = None if "".join(event.text for event in events).strip() else "it says nothing"
            tokens, rate = (metrics.output_tokens, metrics.tokens_per_s) if metrics else (0, math.nan)
            return BoxedModel(llm.device, llm.dtype, tokens, None if math.isnan(rate) else rate, fault)
    except LocalLLMError as error:
        return BoxedModel(fault=error.message, remedy=error.remedy)
    except Exception as error:  # whatever it is, it is what the doctor was asked for
        return BoxedModel(fault=_first_line(error))


def _home(settings: Settings) -> Home:
    because = "LOCALLLM_HOME" if os.environ.get("LOCALLLM_HOME") else "default"
    return Home(settings.home, because, is_writable(settings.home))
