"""What is wrong with a machine as `localllm doctor` found it, each with the way out. Prints nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

from localllm.cli.doctor_checks import Examination
from localllm.formatting import format_bytes
from localllm.hardware.measure import MIN_CPU_SHARE

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
