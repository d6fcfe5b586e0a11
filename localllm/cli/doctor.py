"""`localllm doctor`: check the hardware and the installation, and suggest remedies. Uses no network."""

import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from localllm.benchmark.gpu.self_test_report import SelfTest, self_test_rows, store
from localllm.cli import options
from localllm.cli.io import StdoutWriter, is_terminal, note, status
from localllm.cli.loading import load_model
from localllm.errors import LocalLLMError, NoSuchDevice
from localllm.formatting import format_bytes, format_columns, format_flops, format_rate
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
    required_arch,
    resolve_device,
    resolve_dtype,
    usable_cores,
)
from localllm.hardware.measure import MIN_CPU_SHARE, Rates, device_rates
from localllm.hardware.processor import kernel_instructions, library_versions
from localllm.hardware.triton_support import triton_fault
from localllm.hub.hf_cache import CacheState, cache_state, is_writable
from localllm.hub.http import HubAccess, hub_access
from localllm.request import ChatRequest, SamplingParams
from localllm.settings import Settings

LIBRARIES = ("torch", "triton", "huggingface_hub", "tokenizers", "gguf")
BUNDLED_MODEL, CHECK_PROMPT, CHECK_TOKENS = "demo", "Once upon a time", 32
INSTALL_TORCH = "https://pytorch.org/get-started/locally has the commands"
LOW_DISK_BYTES = 10_000_000_000  # an 8B model takes 5 GB in 4 bits and 16 GB in 16 bits
DUMB_TERMINALS = ("", "dumb", "unknown")


def doctor(
    gpu_selftest: Annotated[
        bool,
        typer.Option("--gpu-selftest", help="Also test the GPU's kernels and measure its speed, in two minutes."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Check the hardware and installation of this machine.

    Runs a one-second benchmark and generates text with the bundled model. Uses no network. Exits with code 1 if a
    problem prevents `localllm run` from working.

    With --gpu-selftest, kernels are compared with references in torch on generated models of published shapes, and
    the rates of products and decode steps are measured and stored for `localllm plan`. Exits with code 1 if a
    kernel is wrong, and with 3 if there is no GPU that models run on.
    """
    out, settings = StdoutWriter(), Settings.from_environment()
    gpu = _gpu_to_test(settings) if gpu_selftest else None
    examination = examine_machine(settings)
    if gpu:
        examination = replace(examination, self_test=_test_gpu(gpu, settings))
    findings = diagnose(examination)
    broken = any(finding.breaks_run for finding in findings)
    if as_json:
        content = {"fine": not broken, **asdict(examination), "findings": [asdict(f) for f in findings]}
        out.write(json.dumps(content, indent=1, default=str, allow_nan=False) + "\n")
    else:
        out.write(_format_page(examination, findings))
    if broken:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Processor:
    name: str
    cores: float  # usable by this process
    cores_here: int
    threads: int | None  # of torch; None if torch cannot be imported
    instructions: list[str] | None  # that torch uses; None if torch cannot be imported
    kernels: str | None  # instructions of kernels for packed weights, and better ones that LOCALLLM_CPU disables
    memory_bytes: int
    free_bytes: int
    container_bytes: int | None  # memory limit of the container, None without one


@dataclass(frozen=True)
class Nvidia:
    plugged_in: int  # GPUs that the operating system reports
    driver: str | None  # version
    torch_cuda: str | None  # CUDA version that torch was built with
    hidden: bool  # CUDA_VISIBLE_DEVICES hides all GPUs
    fault: str | None  # error of a GPU that does not respond


@dataclass(frozen=True)
class Measurement:
    device: str
    dtype: str
    rates: Rates | None
    packed: float | None  # bytes per second of INT4 weights in products of one row; None: not measured
    fault: str | None


@dataclass(frozen=True)
class HomeFolder:
    path: Path
    because: str
    writable: bool


@dataclass(frozen=True)
class BundledModel:
    device: str | None = None
    dtype: str | None = None
    tokens: int = 0
    tokens_per_s: float | None = None
    fault: str | None = None
    remedy: str | None = None


@dataclass(frozen=True)
class Terminal:
    here: bool  # stdout is a terminal
    type: str
    encoding: str


@dataclass(frozen=True)
class Examination:
    """State of the machine, as `--json` prints it."""

    versions: dict[str, str | None]
    torch_fault: str | None
    triton_fault: str | None  # why Triton cannot compile kernels for the GPUs that are here
    triton_remedy: str | None
    processor: Processor
    gpus: list[Gpu]
    nvidia: Nvidia
    measured: list[Measurement]
    boxed: BundledModel
    cache: CacheState
    home: HomeFolder
    hub: HubAccess
    terminal: Terminal
    self_test: SelfTest | None = None  # with --gpu-selftest


def _gpu_to_test(settings: Settings) -> str:
    """Return the name of the GPU that models run on. Raises NoSuchDevice if there is none."""
    name = "cuda" if settings.device in ("auto", "cpu") else settings.device
    try:
        return str(resolve_device(name))
    except NoSuchDevice as error:
        remedy = "the self-test needs an NVIDIA GPU of sm_80 or newer, or an AMD GPU with a ROCm build of torch"
        raise NoSuchDevice(error.message, remedy) from error


def _test_gpu(gpu: str, settings: Settings) -> SelfTest:
    import torch

    from localllm.benchmark.gpu.self_test import run_self_test

    with status(f"testing {gpu}, which takes up to two minutes"):
        result = run_self_test(torch.device(gpu))
    store(result, settings.home, note)
    return result


def examine_machine(settings: Settings) -> Examination:
    """Examine hardware and installation, measure speed and run the bundled model, which takes a second or two."""
    with status("examining this machine"):
        torch_fault = _torch_fault()
        gpus, gpu_fault = ([], None) if torch_fault else _gpus()
        devices = [] if torch_fault else ["cpu", *(f"cuda:{gpu.index}" for gpu in gpus)]
        measured = [_measure_rates(device, settings) for device in devices]
        triton_problem, triton_remedy = (triton_fault() if gpus else None) or (None, None)
    return Examination(
        versions=library_versions(LIBRARIES),
        torch_fault=torch_fault,
        triton_fault=triton_problem,
        triton_remedy=triton_remedy,
        processor=_processor(torch_fault is None),
        gpus=gpus,
        nvidia=_nvidia(torch_fault is None, gpu_fault),
        measured=measured,
        boxed=BundledModel(fault="torch cannot be imported") if torch_fault else _run_bundled_model(),
        cache=cache_state(),
        home=_home(settings),
        hub=hub_access(),
        terminal=Terminal(is_terminal(sys.stdout), os.environ.get("TERM", ""), sys.getfilesystemencoding()),
    )


def _torch_fault() -> str | None:
    """Error of importing torch, or None: OSError for a missing system library, anything for a broken
    installation."""
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
    threads, instructions = _torch_threads_and_instructions() if with_torch else (None, None)
    return Processor(
        name=processor_name(),
        cores=usable_cores(),
        cores_here=os.cpu_count() or 1,
        threads=threads,
        instructions=instructions,
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


def _measure_rates(device: str, settings: Settings) -> Measurement:
    import torch

    from localllm.benchmark.roofline import measure_packed_rate

    torch_device = torch.device(device)
    try:
        dtype = resolve_dtype(settings.dtype, "BF16", torch_device)
        # Notes on a busy machine and a read-only home are among the findings anyway.
        rates = device_rates(torch_device, dtype, settings, remeasure=True, note=lambda text: None)
    except (LocalLLMError, RuntimeError) as error:  # torch raises RuntimeError when memory is short
        return Measurement(device, settings.dtype, None, None, str(error).partition("\n")[0])
    packed = measure_packed_rate(dtype) if device == "cpu" else None
    return Measurement(device, dtype_name(dtype), rates, packed, None)


def _run_bundled_model() -> BundledModel:
    """Load the bundled model and compute an answer."""
    params = SamplingParams(temperature=0, max_tokens=CHECK_TOKENS)
    try:
        with closing(load_model(BUNDLED_MODEL, device=None, dtype=None, context=None)) as llm:
            events = list(llm.answer(ChatRequest(CHECK_PROMPT, params)))
            metrics = events[-1].metrics
            fault = None if "".join(event.text for event in events).strip() else "its answer is empty"
            tokens, rate = (metrics.output_tokens, metrics.tokens_per_s) if metrics else (0, math.nan)
            return BundledModel(llm.device, llm.dtype, tokens, None if math.isnan(rate) else rate, fault)
    except LocalLLMError as error:
        return BundledModel(fault=error.message, remedy=error.remedy)
    except Exception as error:  # any error is a finding
        return BundledModel(fault=_first_line(error))


def _home(settings: Settings) -> HomeFolder:
    because = "LOCALLLM_HOME" if os.environ.get("LOCALLLM_HOME") else "default"
    return HomeFolder(settings.home, because, is_writable(settings.home))


@dataclass(frozen=True)
class Finding:
    what: str
    remedy: str
    breaks_run: bool = False  # `localllm run` does not work


def diagnose(examination: Examination) -> list[Finding]:
    """Findings, first those that break `localllm run`."""
    findings = [
        *_torch_findings(examination),
        *_gpu_findings(examination),
        *_self_test_findings(examination),
        *_bundled_model_findings(examination),
        *_folder_findings(examination),
        *_terminal_findings(examination),
    ]
    return sorted(findings, key=lambda finding: not finding.breaks_run)


def _torch_findings(examination: Examination) -> Iterator[Finding]:
    if examination.torch_fault:
        remedy = f"reinstall it; {INSTALL_TORCH}"
        yield Finding(f"torch cannot be imported ({examination.torch_fault})", remedy, breaks_run=True)


def _gpu_findings(examination: Examination) -> Iterator[Finding]:
    nvidia = examination.nvidia
    if nvidia.fault:
        what = f"a GPU does not respond ({nvidia.fault})"
        yield Finding(what, "run `nvidia-smi` for details, or use --device cpu", breaks_run=True)
    elif (nvidia.plugged_in or nvidia.driver) and not examination.gpus and not examination.torch_fault:
        gpu_found = "there is an NVIDIA GPU, but "
        if nvidia.torch_cuda is None:
            yield Finding(f"{gpu_found}this torch build is CPU-only", f"install one with CUDA; {INSTALL_TORCH}")
        elif nvidia.hidden:
            yield Finding(f"{gpu_found}CUDA_VISIBLE_DEVICES hides it", "unset that variable")
        elif nvidia.driver is None:
            remedy = "install NVIDIA's driver; for a container, on its host"
            yield Finding(f"{gpu_found}no driver is loaded", remedy)
        else:
            remedy = f"update the driver, or install torch for an older CUDA; {INSTALL_TORCH}"
            pair = f"torch for CUDA {nvidia.torch_cuda} cannot use it with driver {nvidia.driver}"
            yield Finding(gpu_found + pair, remedy)
    if examination.triton_fault:
        what = f"GPUs have to run without Triton, which compiles their kernels: {examination.triton_fault}"
        yield Finding(what, examination.triton_remedy or "reinstall triton")
    for gpu in examination.gpus:
        if not gpu.runs:
            what = f"this torch build has no kernels for the {gpu.name} ({gpu.arch})"
            remedy = f"install a build that has, or use --device cpu; {INSTALL_TORCH}"
            yield Finding(what, remedy, breaks_run=True)
        elif required := required_arch(gpu.arch):
            yield Finding(
                f"the {gpu.name} is {gpu.arch}: kernels need {required}", "use the CPU, as --device auto does"
            )
    for measured in examination.measured:
        if measured.rates and measured.rates.share < MIN_CPU_SHARE:
            busy = f"other programs used {1 - measured.rates.share:.0%} of the cores while speed was measured"
            yield Finding(busy, "run `localllm doctor` again when they are idle")
        if measured.fault:
            what = f"{measured.device} could not be measured ({measured.fault})"
            yield Finding(what, "free some of its memory, or choose another device")


def _self_test_findings(examination: Examination) -> Iterator[Finding]:
    if test := examination.self_test:
        remedy = "use --device cpu, and report the output of `localllm doctor --gpu-selftest --json` as a bug"
        for fault in test.faults:
            yield Finding(f"a kernel is wrong on the {test.device} ({fault})", remedy, breaks_run=True)
        for part in test.left_out:
            yield Finding(
                f"the self-test left out {part}", "run it again: compiled kernels are kept, or free memory"
            )


def _bundled_model_findings(examination: Examination) -> Iterator[Finding]:
    if examination.boxed.fault and not examination.torch_fault:
        what = f"the bundled model does not run ({examination.boxed.fault})"
        remedy = examination.boxed.remedy or "reinstall localllm, and report a bug if that does not help"
        yield Finding(what, remedy, breaks_run=True)


def _folder_findings(examination: Examination) -> Iterator[Finding]:
    cache, home = examination.cache, examination.home
    if not cache.writable:
        what = f"the cache {cache.path} is not writable, so no model can be downloaded"
        yield Finding(what, "change its permissions, or set HF_HUB_CACHE to another folder")
    elif cache.free_bytes < LOW_DISK_BYTES:
        what = (
            f"only {format_bytes(cache.free_bytes)} of disk are free for models; an 8B model in 4 bits takes 5 GB"
        )
        yield Finding(what, "free some disk space, or set HF_HUB_CACHE to a folder on another disk")
    if cache.unfinished:
        plural = "download is" if cache.unfinished == 1 else "downloads are"
        what = f"{cache.unfinished} {plural} incomplete ({format_bytes(cache.unfinished_bytes)})"
        yield Finding(what, "resume with `localllm pull NAME`")
    if not home.writable:
        what = f"{home.path} is not writable, so conversations, history and measurements are not saved"
        yield Finding(what, "change its permissions, or set LOCALLLM_HOME to another folder")


def _terminal_findings(examination: Examination) -> Iterator[Finding]:
    terminal = examination.terminal
    if terminal.here and terminal.type in DUMB_TERMINALS:
        what = f"TERM is {terminal.type or 'not set'}, so there are no colors and no line editing"
        yield Finding(what, "set TERM to the type of the terminal, mostly xterm-256color")
    if terminal.here and terminal.encoding.lower() not in ("utf-8", "utf8"):
        what = f"the encoding of the locale is {terminal.encoding}, and models write UTF-8"
        yield Finding(what, "set a UTF-8 locale: `export LANG=C.UTF-8`")


Rows = list[tuple[str, str]]


def _format_page(examination: Examination, findings: list[Finding]) -> str:
    sections = [
        ("VERSIONS", [(name, version or "not installed") for name, version in examination.versions.items()]),
        ("DEVICES", [*_processor_rows(examination.processor), *_gpu_rows(examination)]),
        ("SPEED", [*_speed_rows(examination)]),
        *([("SELF-TEST", [*self_test_rows(examination.self_test)])] if examination.self_test else []),
        ("MODELS", [*_model_rows(examination)]),
        ("HUB", [*_hub_rows(examination)]),
    ]
    width = max(len(name) for _, rows in sections for name, _ in rows)
    blocks = [
        title + "\n" + format_columns([(name.ljust(width), text) for name, text in rows])
        for title, rows in sections
    ]
    return "\n\n".join([*blocks, _verdict(findings)]) + "\n"


def _processor_rows(cpu: Processor) -> Rows:
    cores = f"{cpu.cores:g}" if cpu.cores == cpu.cores_here else f"{cpu.cores:g} of {cpu.cores_here}"
    memory = f"{format_bytes(cpu.memory_bytes)}, {format_bytes(cpu.free_bytes)} free"
    limit = [("container", f"limited to {format_bytes(cpu.container_bytes)}")] if cpu.container_bytes else []
    threads = "1 thread" if cpu.threads == 1 else f"{cpu.threads} threads"
    torch_uses = f"{' '.join(cpu.instructions)}, {threads}" if cpu.instructions else "-"
    uses = [("torch uses", torch_uses), ("kernels use", cpu.kernels or "-")]
    return [("processor", cpu.name), ("cores", cores), *uses, ("memory", memory), *limit]


def _gpu_rows(examination: Examination) -> Iterator[tuple[str, str]]:
    for gpu in examination.gpus:
        memory = f"{format_bytes(gpu.memory_bytes)}, {format_bytes(gpu.free_bytes)} free"
        unmeasured = (
            ", kernels compile for it and were never measured on AMD" if gpu.arch.startswith("gfx") else ""
        )
        yield f"cuda:{gpu.index}", f"{gpu.name}, {memory}, {gpu.arch}{unmeasured}"
    if not examination.gpus:
        yield "GPU", "none that torch can use"
    if examination.nvidia.driver:
        yield (
            "driver",
            f"{examination.nvidia.driver}, torch is built for CUDA {examination.nvidia.torch_cuda or '-'}",
        )


def _speed_rows(examination: Examination) -> Iterator[tuple[str, str]]:
    for measured in examination.measured:
        if rates := measured.rates:
            yield f"{measured.device} copy", f"{format_bytes(rates.copy)}/s, reads and writes"
            yield (
                f"{measured.device} read",
                f"{format_bytes(rates.read)}/s of weights in {measured.dtype}",
            )
            if measured.packed:
                share = f"{measured.packed / max(rates.copy, rates.read):.0%} of memory bandwidth"
                yield f"{measured.device} read INT4", f"{format_bytes(measured.packed)}/s of weights, {share}"
            yield f"{measured.device} matmul", format_flops(rates.flops)
    boxed = examination.boxed
    where = f" on {boxed.device} in {boxed.dtype}"
    yield (
        "bundled model",
        "does not run" if boxed.fault else format_rate(boxed.tokens_per_s or math.nan) + where,
    )


def _model_rows(examination: Examination) -> Rows:
    cache, home = examination.cache, examination.home
    state = "" if cache.exists else ", does not exist yet"
    unfinished = f"{cache.unfinished}, {format_bytes(cache.unfinished_bytes)}" if cache.unfinished else "none"
    return [
        ("cache", f"{cache.path} ({cache.because}{state}{'' if cache.writable else ', not writable'})"),
        (
            "models",
            f"{cache.models}, {format_bytes(cache.model_bytes)}" if cache.models else "none",
        ),
        ("incomplete", unfinished),
        ("free disk", format_bytes(cache.free_bytes)),
        ("home", f"{home.path} ({home.because}{'' if home.writable else ', not writable'})"),
    ]


def _hub_rows(examination: Examination) -> Rows:
    hub = examination.hub
    proxies = "  ".join(f"{scheme}: {address}" for scheme, address in hub.proxies.items())
    return [
        ("address", hub.endpoint),
        ("token", f"from {hub.token}" if hub.token else "none; gated models need one"),
        ("offline", "yes, HF_HUB_OFFLINE is set" if hub.offline else "no"),
        ("proxies", proxies or "none"),
    ]


def _verdict(findings: list[Finding]) -> str:
    if not findings:
        return "No problems found."
    return "\n".join(f"{'broken' if f.breaks_run else 'note'}: {f.what}; {f.remedy}" for f in findings)
