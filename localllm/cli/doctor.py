"""`localllm doctor`: what this machine has, what is missing, and how to get it."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import typer

from localllm.cli import options
from localllm.cli.doctor_checks import Examination, Processor, examine_machine
from localllm.cli.io import StdoutWriter
from localllm.formatting import format_bytes, format_columns, format_flops, format_rate
from localllm.hardware.measure import MIN_CPU_SHARE
from localllm.settings import Settings

# What is wrong with a machine as `localllm doctor` found it, each with the way out. Prints nothing.

INSTALL_TORCH = "https://pytorch.org/get-started/locally says which to install"
LOW_DISK_BYTES = 10_000_000_000  # bytes: an 8B model in 4 bits takes 5 GB, in 16 bits 16 GB
DUMB_TERMINALS = ("", "dumb", "unknown")


@dataclass(frozen=True)
class Finding:
    what: str
    remedy: str
    breaks_run: bool = False


def diagnose(examination: Examination) -> list[Finding]:
    """What is broken first, then what could be better."""
    found = [
        *_torch_findings(examination),
        *_gpu_findings(examination),
        *_bundled_model_findings(examination),
        *_folder_findings(examination),
        *_terminal_findings(examination),
    ]
    return sorted(found, key=lambda finding: not finding.breaks_run)


def _torch_findings(seen: Examination) -> Iterator[Finding]:
    if seen.torch_fault:
        remedy = f"install it again; {INSTALL_TORCH}"
        yield Finding(f"torch cannot be imported ({seen.torch_fault})", remedy, breaks_run=True)


def _gpu_findings(seen: Examination) -> Iterator[Finding]:
    here, nvidia = seen.nvidia.plugged_in, seen.nvidia
    if nvidia.fault:
        what = f"there is a GPU that does not answer ({nvidia.fault})"
        yield Finding(what, "`nvidia-smi` may say more; --device cpu does without it", breaks_run=True)
    elif (here or nvidia.driver) and not seen.gpus and not seen.torch_fault:
        machine = "there is an NVIDIA GPU, and "
        if nvidia.torch_cuda is None:
            yield Finding(f"{machine}this torch is for the CPU alone", f"install one with CUDA; {INSTALL_TORCH}")
        elif nvidia.hidden:
            yield Finding(f"{machine}CUDA_VISIBLE_DEVICES hides it", "unset that variable")
        elif nvidia.driver is None:
            yield Finding(f"{machine}no driver is loaded", "install NVIDIA's driver, in a container on its host")
        else:
            remedy = f"update the driver, or install a torch for an older CUDA; {INSTALL_TORCH}"
            pair = f"torch, made for CUDA {nvidia.torch_cuda}, cannot use it with driver {nvidia.driver}"
            yield Finding(machine + pair, remedy)
    if seen.gpus and seen.versions["triton"] is None:
        yield Finding("triton is not installed, which compiles kernels for GPUs", "`pip install triton`")
    for gpu in seen.gpus:
        if not gpu.runs:
            what = f"this torch has no kernels for the {gpu.name} (capability {gpu.capability})"
            yield Finding(what, f"install one that has, or add --device cpu; {INSTALL_TORCH}", breaks_run=True)
    for measured in seen.measured:
        if measured.rates and measured.rates.share < MIN_CPU_SHARE:
            busy = f"other programs kept {1 - measured.rates.share:.0%} of the cores busy while speed was measured"
            yield Finding(busy, "run `localllm doctor` again when they rest")
        if measured.fault:
            what = f"{measured.device} could not be measured ({measured.fault})"
            yield Finding(what, "free some of its memory, or choose another device")


def _bundled_model_findings(seen: Examination) -> Iterator[Finding]:
    if seen.boxed.fault and not seen.torch_fault:
        what = f"the model that comes with localllm does not run ({seen.boxed.fault})"
        remedy = seen.boxed.remedy or "install localllm again, and report it if that does not help"
        yield Finding(what, remedy, breaks_run=True)


def _folder_findings(seen: Examination) -> Iterator[Finding]:
    cache, home = seen.cache, seen.home
    if not cache.writable:
        what = f"the cache {cache.path} cannot be written, so no model can be pulled"
        yield Finding(what, "change its rights, or set HF_HUB_CACHE to another folder")
    elif cache.free_bytes < LOW_DISK_BYTES:
        what = f"{format_bytes(cache.free_bytes)} are free for models, and one of 8B in 4 bits takes 5 GB"
        yield Finding(what, "free some, or set HF_HUB_CACHE to a folder of another disk")
    if cache.unfinished:
        plural = "download is" if cache.unfinished == 1 else "downloads are"
        what = f"{cache.unfinished} {plural} unfinished ({format_bytes(cache.unfinished_bytes)})"
        yield Finding(what, "`localllm pull NAME` goes on with the model's")
    if not home.writable:
        what = f"{home.path} cannot be written, so no chat, history or measurement is kept"
        yield Finding(what, "change its rights, or set LOCALLLM_HOME to another folder")


def _terminal_findings(seen: Examination) -> Iterator[Finding]:
    terminal = seen.terminal
    if terminal.here and terminal.type in DUMB_TERMINALS:
        called = terminal.type or "nothing"
        what = f"the terminal calls itself {called}, so there are no colours and no editing"
        yield Finding(what, "set TERM to what it is, xterm-256color for most")
    if terminal.here and terminal.encoding.lower() not in ("utf-8", "utf8"):
        what = f"the locale says {terminal.encoding}, and models write UTF-8"
        yield Finding(what, "set LANG to one of UTF-8: `export LANG=C.UTF-8`")


Rows = list[tuple[str, str]]


def doctor(as_json: options.Json = False) -> None:
    """Check the hardware and installation of this machine.

    Runs a one-second benchmark and generates text with the bundled model. Uses no network. Exits with code 1 if a
    problem prevents `localllm run` from working.
    """
    out = StdoutWriter()
    seen = examine_machine(Settings.from_environment())
    found = diagnose(seen)
    broken = any(finding.breaks_run for finding in found)
    if as_json:
        content = {"fine": not broken, **asdict(seen), "findings": [asdict(finding) for finding in found]}
        out.write(json.dumps(content, indent=1, default=str, allow_nan=False) + "\n")
    else:
        out.write(_format_page(seen, found))
    if broken:
        raise typer.Exit(1)


def _format_page(seen: Examination, found: list[Finding]) -> str:
    sections = [
        ("VERSIONS", [(name, version or "not installed") for name, version in seen.versions.items()]),
        ("DEVICES", [*_processor_rows(seen.processor), *_gpu_rows(seen)]),
        ("SPEED", [*_speed_rows(seen)]),
        ("MODELS", [*_model_rows(seen)]),
        ("HUB", [*_hub_rows(seen)]),
    ]
    width = max(len(name) for _, rows in sections for name, _ in rows)
    blocks = [
        title + "\n" + format_columns([(name.ljust(width), text) for name, text in rows])
        for title, rows in sections
    ]
    return "\n\n".join([*blocks, _verdict(found)]) + "\n"


def _processor_rows(cpu: Processor) -> Rows:
    cores = f"{cpu.cores:g}" if cpu.cores == cpu.cores_here else f"{cpu.cores:g} of {cpu.cores_here}"
    memory = f"{format_bytes(cpu.memory_bytes)}, {format_bytes(cpu.free_bytes)} free"
    limit = [("container", f"limited to {format_bytes(cpu.container_bytes)}")] if cpu.container_bytes else []
    threads = "1 thread" if cpu.threads == 1 else f"{cpu.threads} threads"
    used = f"{' '.join(cpu.instructions)}, {threads}" if cpu.instructions else "-"
    uses = [("torch uses", used), ("kernels use", cpu.kernels or "-")]
    return [("processor", cpu.name), ("cores", cores), *uses, ("memory", memory), *limit]


def _gpu_rows(seen: Examination) -> Iterator[tuple[str, str]]:
    for gpu in seen.gpus:
        memory = f"{format_bytes(gpu.memory_bytes)}, {format_bytes(gpu.free_bytes)} free"
        yield f"cuda:{gpu.index}", f"{gpu.name}, {memory}, capability {gpu.capability}"
    if not seen.gpus:
        yield "GPU", "none that torch can use"
    if seen.nvidia.driver:
        yield "driver", f"{seen.nvidia.driver}, torch is made for CUDA {seen.nvidia.torch_cuda or '-'}"


def _speed_rows(seen: Examination) -> Iterator[tuple[str, str]]:
    for measured in seen.measured:
        if rates := measured.rates:
            yield f"{measured.device} copies", f"{format_bytes(rates.copy)}/s, read and written"
            yield (
                f"{measured.device} reads",
                f"{format_bytes(rates.read)}/s of weights in {measured.dtype}",
            )
            if measured.packed:
                share = f"{measured.packed / max(rates.copy, rates.read):.0%} of memory bandwidth"
                yield f"{measured.device} reads INT4", f"{format_bytes(measured.packed)}/s of weights, {share}"
            yield f"{measured.device} multiplies", format_flops(rates.flops)
    boxed = seen.boxed
    where = f" on {boxed.device} in {boxed.dtype}"
    yield (
        "boxed model",
        "does not run" if boxed.fault else format_rate(boxed.tokens_per_s or math.nan) + where,
    )


def _model_rows(seen: Examination) -> Rows:
    cache, home = seen.cache, seen.home
    state = "" if cache.exists else ", not made yet"
    unfinished = f"{cache.unfinished}, {format_bytes(cache.unfinished_bytes)}" if cache.unfinished else "none"
    return [
        ("cache", f"{cache.path} ({cache.because}{state}{'' if cache.writable else ', cannot be written'})"),
        (
            "models in it",
            f"{cache.models}, {format_bytes(cache.model_bytes)}" if cache.models else "none",
        ),
        ("unfinished", unfinished),
        ("free disk", format_bytes(cache.free_bytes)),
        ("own folder", f"{home.path} ({home.because}{'' if home.writable else ', cannot be written'})"),
    ]


def _hub_rows(seen: Examination) -> Rows:
    hub = seen.hub
    proxies = "  ".join(f"{scheme}: {address}" for scheme, address in hub.proxies.items())
    return [
        ("address", hub.endpoint),
        ("token", f"one from {hub.token}" if hub.token else "none; gated models need one"),
        ("offline", "yes, HF_HUB_OFFLINE is set" if hub.offline else "no"),
        ("proxies", proxies or "none"),
    ]


def _verdict(found: list[Finding]) -> str:
    if not found:
        return "Nothing is missing."
    return "\n".join(f"{'broken' if f.breaks_run else 'note'}: {f.what}; {f.remedy}" for f in found)
