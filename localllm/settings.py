"""Settings from the environment: the LOCALLLM_* variables, read once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from localllm.errors import UsageError
from localllm.files import expand_path

CPU_LEVELS = ("avx512", "avxvnni", "avx2", "baseline")


GB = 10**9
DISK_CACHE_FOLDER = "kv-cache"  # in the home folder
DISK_CACHE_BYTES = 10 * GB
CONVERSATIONS_BYTES = 4 * GB  # for conversations of the app, which are stored without a flag


@dataclass(frozen=True)
class DiskCache:
    """The disk tier of the prefix cache."""

    path: Path
    limit: int = DISK_CACHE_BYTES  # bytes of all files
    kept_only: bool = False  # only for conversations that are kept, not for all prompts
    is_shared: bool = False  # by requests with different API keys


@dataclass(frozen=True)
class Settings:
    home: Path
    """LOCALLLM_HOME: folder of saved chats, the prompt history, measured rates and durations of steps, names given
    to models, models made by `create` and `--quant`, uploaded files, address and log of the background server.
    Default: ~/.localllm"""

    device: str
    """LOCALLLM_DEVICE: `auto`, `cpu`, `cuda` or `cuda:N`, unless `--device` is given. Default: auto"""

    dtype: str
    """LOCALLLM_DTYPE: `auto`, `float32`, `bfloat16` or `float16`, unless `--dtype` is given. Default: auto"""

    threads: int | None
    """LOCALLLM_THREADS: CPU threads for matrix products. Default: one for small models, otherwise the
    number of physical cores, without efficiency cores"""

    kv_dtype: str = "auto"
    """LOCALLLM_KV_DTYPE: `auto`, `int8`, `fp8`, `k8v4`, `int4` or the model's dtype, unless `--kv-dtype` is given.
    Default: auto"""

    activations: str = "auto"
    """LOCALLLM_ACTIVATIONS: `auto`, `24`, `16` or `8` bits of activations that meet packed weights on a CPU, where
    `--activations` is not given. Default: auto"""

    cache: Path = field(default_factory=lambda: Path.home() / ".cache" / "localllm")
    """XDG_CACHE_HOME: its folder `localllm` contains compiled kernels, and weights that `--keep-layout` keeps.
    Default: ~/.cache"""

    graphs: bool = True
    """LOCALLLM_GRAPHS: `off` launches each kernel individually on a GPU, in case a captured graph causes problems.
    Default: on"""

    pdl: bool = True
    """LOCALLLM_PDL: `off` starts each kernel on a GPU after the previous one has ended (from sm_90 on it starts
    earlier), in case programmatic dependent launch causes problems. Default: on"""

    cpu: str | None = None
    """LOCALLLM_CPU: `avx512`, `avxvnni`, `avx2` or `baseline`: the highest instruction set used by compiled
    kernels; with `baseline`, torch computes everything. Default: the processor's highest"""

    keep_layout: bool = False
    """LOCALLLM_KEEP_LAYOUT: `on` keeps the weights of every model as `--keep-layout` does. Default: off"""

    draft: str = "lookup"
    """LOCALLLM_DRAFT: `lookup` guesses tokens that occurred before in prompt or answer, so that a step may produce
    several; `off` does not. The resulting tokens are the same. Default: lookup"""

    deterministic: bool = False
    """LOCALLLM_DETERMINISTIC: `on` runs every model as `--deterministic` does. Default: off"""

    strict: bool = False
    """LOCALLLM_STRICT: `on` lets every server refuse unknown fields as `serve --strict` does. Default: off"""

    host: str | None = None
    """LOCALLLM_HOST: address of a running server, `host:port` or `http://host:port`. Default: this user's
    background server, or 127.0.0.1:11434"""

    background: str | None = None
    """LOCALLLM_BACKGROUND: `run` that has no server starts one in the background, which ends after this time
    without requests, such as `5m`; `off` or `0`: it does not. Default: off"""

    cache_conversations: bool = True
    """LOCALLLM_CACHE: `off` stores no keys and values of the app's conversations on the disk, so that a resumed
    one is computed again. Default: on"""

    disk_cache: DiskCache | None = None
    """The folder of `--cache-dir`; no variable sets it."""

    api_key: str | None = field(default=None, repr=False)
    """LOCALLLM_API_KEY: the key sent to a running server, and required by `serve`. Default: none"""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """Raises UsageError if LOCALLLM_THREADS is not a positive number, LOCALLLM_GRAPHS, LOCALLLM_PDL,
        LOCALLLM_KEEP_LAYOUT, LOCALLLM_DETERMINISTIC, LOCALLLM_STRICT or LOCALLLM_CACHE not on or off,
        LOCALLLM_DRAFT not lookup or off, or LOCALLLM_CPU no level."""
        threads = environment.get("LOCALLLM_THREADS")
        if threads is not None and (not threads.isdecimal() or int(threads) == 0):
            raise UsageError(f"LOCALLLM_THREADS is {threads!r}", "set it to a positive whole number")
        draft = environment.get("LOCALLLM_DRAFT") or "lookup"
        if draft not in ("lookup", "off"):
            raise UsageError(f"LOCALLLM_DRAFT is {draft!r}", "set it to lookup or off")
        cpu = environment.get("LOCALLLM_CPU") or None
        if cpu is not None and cpu not in CPU_LEVELS:
            raise UsageError(f"LOCALLLM_CPU is {cpu!r}", "set it to avx512, avxvnni, avx2 or baseline")
        return cls(
            home=expand_path(environment.get("LOCALLLM_HOME") or "~/.localllm"),
            device=environment.get("LOCALLLM_DEVICE") or "auto",
            dtype=environment.get("LOCALLLM_DTYPE") or "auto",
            cache=expand_path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "localllm",
            threads=int(threads) if threads else None,
            kv_dtype=environment.get("LOCALLLM_KV_DTYPE") or "auto",
            activations=environment.get("LOCALLLM_ACTIVATIONS") or "auto",
            cpu=cpu,
            draft=draft,
            graphs=parse_switch(environment, "LOCALLLM_GRAPHS", default="on"),
            keep_layout=parse_switch(environment, "LOCALLLM_KEEP_LAYOUT", default="off"),
            pdl=parse_switch(environment, "LOCALLLM_PDL", default="on"),
            deterministic=parse_switch(environment, "LOCALLLM_DETERMINISTIC", default="off"),
            strict=parse_switch(environment, "LOCALLLM_STRICT", default="off"),
            cache_conversations=parse_switch(environment, "LOCALLLM_CACHE", default="on"),
            host=environment.get("LOCALLLM_HOST") or None,
            background=parse_background(environment.get("LOCALLLM_BACKGROUND")),
            api_key=environment.get("LOCALLLM_API_KEY") or None,
        )


def parse_background(text: str | None) -> str | None:
    """The idle time as text, which the command line parses; None if the setting is off."""
    return None if text in (None, "", "0", "off") else text


def parse_switch(environment: Mapping[str, str], name: str, *, default: str) -> bool:
    value = environment.get(name) or default
    if value not in ("on", "off"):
        raise UsageError(f"{name} is {value!r}", "set it to on or off")
    return value == "on"
