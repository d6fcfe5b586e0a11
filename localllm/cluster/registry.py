"""The fronts of a cluster, in the key-value store of Ray's head: each process that serves the replicas to clients
writes down where it listens, so that the others, and `localllm cluster status`, find it.

A front that was killed cannot remove its entry, which counts only while Ray has a connection to its process.
"""

# pyright: reportMissingImports=false
# Ray is installed with localllm[cluster] only.

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

NAMESPACE = "localllm"
FRONT_PREFIX = "front:"


@dataclass(frozen=True)
class FrontEntry:
    """A front of a cluster."""

    url: str
    models: Sequence[str]  # that the replicas load at the start


def own_job(ray: Any) -> str:
    """Ray's id of this process."""
    return ray.get_runtime_context().get_job_id()


def add_front(ray: Any, entry: FrontEntry) -> None:
    """Write down that this process is a front."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(FRONT_PREFIX + own_job(ray), json.dumps(asdict(entry)), namespace=NAMESPACE)


def remove_front(ray: Any) -> None:
    """Remove the entry of this process, if there is one."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(FRONT_PREFIX + own_job(ray), namespace=NAMESPACE)


def fronts_of(ray: Any) -> list[FrontEntry]:
    """The fronts that run, in the order in which they were started."""
    from ray._private.state import jobs
    from ray.experimental import internal_kv

    fronts = []
    for job in sorted((job for job in jobs() if not job["IsDead"]), key=lambda job: job["StartTime"]):
        if value := internal_kv._internal_kv_get(FRONT_PREFIX + job["JobID"], namespace=NAMESPACE):
            fronts.append(FrontEntry(**json.loads(value)))
    return fronts
