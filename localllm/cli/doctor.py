"""`localllm doctor`: what this machine has, what is missing, and how to get it."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict

import typer

from localllm.cli import options
from localllm.cli.doctor_checks import Examination, Processor, examine_machine
from localllm.cli.doctor_findings import Finding, diagnose
from localllm.cli.io import StdoutWriter
from localllm.formatting import format_bytes, format_columns, format_flops, format_rate
from localllm.settings import Settings

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
