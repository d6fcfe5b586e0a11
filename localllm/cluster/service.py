"""Replicas of a server on Ray Serve: started, restarted one after the other, scaled and ended."""

# pyright: reportMissingImports=false
# Ray is installed with localllm[cluster] only.

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm import errors
from localllm.cluster.ray_node import (
    FrontEntry,
    RayNode,
    add_front,
    connect,
    count_gpus,
    fronts_of,
    own_node,
    remove_front,
    require_ray,
    start_node,
)
from localllm.cluster.replica import Replica
from localllm.disaggregation.supervisor import PrefillSupervisor
from localllm.errors import DoesNotFit, LocalLLMError, UsageError
from localllm.hardware.device import resolve_device
from localllm.server.app import ServerSetup
from localllm.server.serve import DRAIN_TIMEOUT_S

DEPLOYMENT = "replica"
APPLICATION = "localllm"
MAX_ONGOING = 10_000  # more than any server accepts: the application itself refuses what is too much
SCALE_TARGET = 8.0  # ongoing requests per replica that autoscaling aims at
SCALE_UP_S, SCALE_DOWN_S = 5.0, 120.0  # for which more or fewer replicas must be wanted
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 60.0  # a check waits for the process, which may be loading another model
CONSTRUCTOR_TRIES = 2
CLUSTER_REMEDY = "run `localllm cluster start` or `join`, and start this server again"
WATCH_S = 0.1  # between looks at Ray's process, which ends this one a moment after its own end
FRONT_TRIES = 5  # a second apart, until a front that was killed is taken for dead
RAISED = re.compile(r"localllm\.errors\.(?P<name>\w+): (?P<text>.+)")


@dataclass(frozen=True)
class ReplicaOptions:
    """Number and location of replicas."""

    least: int
    most: int  # more than `least`: as many as the requests need
    route: str = "prefix"
    cluster: bool = False  # on all machines that joined, instead of this one
    device: str | None = None
    gpus: int = 1  # of each replica
    prefill: int = 0  # processes that compute the replicas' prompts, for each model


@contextmanager
def running_replicas(
    setup: ServerSetup, options: ReplicaOptions, home: Path, url: str, notify: Callable[[str], object]
) -> Iterator["ReplicaService"]:
    """Start replicas, and end them afterwards.

    home: localllm's folder; url: of this front; notify: called with messages for the operator. Raises UsageError
    without Ray, without a cluster, for a cluster with another front, or with fewer GPUs than replicas,
    LocalLLMError if Ray does not start, and the error of a replica that cannot load the models.
    """
    require_ray()
    device = resolve_device(options.device or "auto")
    with ExitStack() as stack:
        gpus = count_gpus() if device.type == "cuda" else 0
        if options.cluster:
            node = own_node(home)
        else:
            check_gpus(options, gpus)
            notify(f"starting Ray for {options.most} replicas")
            node = start_node(notify, gpus=max(0, gpus - options.prefill))  # the last ones compute prompts
            stack.callback(node.stop)
        ray = connect(node)
        stack.callback(ray.shutdown)
        remedy = CLUSTER_REMEDY if options.cluster else "start this server again"
        stack.callback(watch(node, notify, remedy).set)
        if options.cluster:
            check_alone(ray)
            gpus = int(ray.cluster_resources().get("GPU", 0)) if options.device != "cpu" else 0
            check_gpus(options, gpus)
        has_gpu = gpus > 0
        if not has_gpu and not options.cluster:
            notify("the replicas share this machine's cores: one engine batches better; use them for a test")
        service = ReplicaService(ray, setup, options, has_gpu=has_gpu)
        stack.callback(service.stop, notify)
        if options.cluster:
            add_front(ray, FrontEntry(reachable_url(ray, url), setup.models))
        service.deploy()
        yield service


@contextmanager
def attached_front(home: Path, url: str, notify: Callable[[str], object]) -> Iterator["AttachedFront"]:
    """Use the replicas that another front has started in this machine's cluster.

    home, url, notify: as in `running_replicas`. Raises UsageError without Ray, without a cluster, or if nothing is
    served in it, and LocalLLMError if Ray does not answer.
    """
    require_ray()
    node = own_node(home)
    with ExitStack() as stack:
        ray = connect(node)
        stack.callback(ray.shutdown)
        stack.callback(watch(node, notify, CLUSTER_REMEDY).set)
        fronts = fronts_of(ray)
        if not fronts:
            remedy = "start the first server with MODEL and --replicas N"
            raise UsageError("no server is running in this cluster", remedy)
        front = AttachedFront(ray, fronts[0].models)
        stack.callback(front.stop, notify)
        add_front(ray, FrontEntry(reachable_url(ray, url), front.models))
        yield front


def watch(node: RayNode, notify: Callable[[str], object], remedy: str) -> threading.Event:
    """End this process with a message when its Ray node ends, as Ray would do without one. Returns the event that
    ends the watch."""
    is_over = threading.Event()

    def work() -> None:
        while node.is_running:
            if is_over.wait(WATCH_S):
                return
        notify(f"error: Ray has ended on this machine; {remedy}")
        os._exit(LocalLLMError.exit_code)

    threading.Thread(target=work, name="localllm-watch", daemon=True).start()
    return is_over


def reachable_url(ray: Any, url: str) -> str:
    """The URL at which other machines reach a server of this one, if they do."""
    host = ray.util.get_node_ip_address()
    return url.replace("//0.0.0.0:", f"//{host}:").replace("//[::]:", f"//{host}:")


def check_alone(ray: Any) -> None:
    """Raise UsageError if another front runs in the cluster. One that was killed counts for a moment."""
    fronts = fronts_of(ray)
    for _ in range(FRONT_TRIES):
        if not fronts:
            return
        time.sleep(1)
        fronts = fronts_of(ray)
    raise UsageError(
        f"this cluster is served at {fronts[0].url} already",
        "leave out MODEL and --replicas to add a front for its replicas, or stop that server first",
    )


@contextmanager
def running_prefill(models: Sequence[str], options: ReplicaOptions) -> Iterator[dict[str, list[Path]]]:
    """Start the processes that compute the replicas' prompts, and end them afterwards. Returns their sockets by
    the names of the models. Raises UsageError without Ray, or with fewer GPUs than engines."""
    require_ray()
    devices = ["cpu"] * options.prefill
    if resolve_device(options.device or "auto").type == "cuda":
        gpus = count_gpus()
        check_gpus(options, gpus)
        devices = [f"cuda:{index}" for index in range(gpus - options.prefill, gpus)]
    with ExitStack() as stack:
        sockets = dict[str, list[Path]]()
        for model in models:
            supervisor = stack.enter_context(closing(PrefillSupervisor(devices)))
            sockets[model] = supervisor.sockets
        yield sockets


def check_gpus(options: ReplicaOptions, gpus: int) -> None:
    """Raise UsageError if there are GPUs, and too few. gpus: of all machines"""
    if gpus and (needed := options.most * options.gpus + options.prefill) > gpus:
        engines, flags = f"{options.most} replicas", "--replicas"
        if options.prefill:
            engines, flags = f"{options.most} engines and {options.prefill} for prompts", "--prefill or --decode"
        raise UsageError(f"{engines} need {needed} GPUs, and there are {gpus}", f"use fewer {flags}")


class AttachedFront:
    """The replicas of a cluster, as a front that has not started them uses them."""

    def __init__(self, ray: Any, models: Sequence[str]):
        from ray import serve

        self.ray, self.serve, self.models = ray, serve, models
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # importing it has set another one
        self.handle: Any = serve.get_deployment_handle(DEPLOYMENT, APPLICATION)

    def fleet(self) -> Any:
        """The replicas, as `front.Fleet`."""
        return fleet_of(self.handle)

    def restart(self, notify: Callable[[str], object]) -> None:
        notify("the replicas are restarted by SIGHUP to the server that has started them")

    def stop(self, notify: Callable[[str], object]) -> None:
        self.handle.shutdown()
        leave_cluster(self.ray, self.serve, notify)


def fleet_of(handle: Any) -> Any:
    from localllm.cluster.request_router import RayFleet

    return RayFleet(handle)


def leave_cluster(ray: Any, serve: Any, notify: Callable[[str], object]) -> None:
    """End the replicas of a cluster, unless another front uses them."""
    remove_front(ray)
    if fronts := fronts_of(ray):
        notify(f"the replicas continue, as they are served at {fronts[0].url} too")
    else:
        serve.delete(APPLICATION)


class ReplicaService:
    """The replicas of one server as a Ray Serve application."""

    def __init__(self, ray: Any, setup: ServerSetup, options: ReplicaOptions, *, has_gpu: bool):
        from ray import serve

        self.ray, self.serve = ray, serve
        self.setup, self.options, self.has_gpu = setup, options, has_gpu
        self.models = setup.models
        self.generation = 0
        self.restarting = threading.Lock()
        self.handle: Any = None

    def deploy(self) -> None:
        """Start the replicas, or replace all by new ones, and return when they are ready.

        A replica that is replaced gets no further requests, and ends when it has answered those that it has.
        """
        from ray.serve.config import ProxyLocation

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self.serve.start(proxy_location=ProxyLocation.Disabled)
        self.generation += 1
        try:
            self.handle = self.serve.run(self.application(), name=APPLICATION, route_prefix=None)
        except Exception as error:
            raise self.cause_of(error) from error

    def application(self) -> Any:
        from ray.serve.config import AutoscalingConfig, RequestRouterConfig

        options, machines = self.options, self.machines()
        router_class: Any = "localllm.cluster.request_router.LocalRequestRouter"  # imported where it runs
        router = RequestRouterConfig(
            request_router_class=router_class, request_router_kwargs={"route": options.route}
        )
        settings: dict[str, Any] = {
            "name": DEPLOYMENT,
            "max_ongoing_requests": MAX_ONGOING,
            "request_router_config": router,
            "graceful_shutdown_timeout_s": DRAIN_TIMEOUT_S,
            "graceful_shutdown_wait_loop_s": 0.5,
            "health_check_period_s": HEALTH_PERIOD_S,
            "health_check_timeout_s": HEALTH_TIMEOUT_S,
            "max_constructor_retry_count": CONSTRUCTOR_TRIES,
            "ray_actor_options": {"num_cpus": 0, "num_gpus": options.gpus if self.has_gpu else 0},
        }
        if options.most > options.least:
            settings["autoscaling_config"] = AutoscalingConfig(
                min_replicas=options.least,
                initial_replicas=options.least,
                max_replicas=options.most,
                target_ongoing_requests=SCALE_TARGET,
                upscale_delay_s=SCALE_UP_S,
                downscale_delay_s=SCALE_DOWN_S,
            )
        else:
            settings["num_replicas"] = options.least
        if options.cluster and not self.has_gpu:  # spread, as Ray would see no reason to
            settings["max_replicas_per_node"] = math.ceil(options.most / machines) + 1
        shares = math.ceil(options.most / machines) + options.prefill * len(self.setup.models)
        deployment = self.serve.deployment(Replica, **settings)
        return deployment.bind(self.setup.behind_front(self.environment(shares)), self.generation)

    def machines(self) -> int:
        """Machines that run replicas."""
        return sum(node["Alive"] for node in self.ray.nodes()) if self.options.cluster else 1

    def environment(self, shares: int) -> dict[str, str]:
        """Variables of a replica that shares the cores of a machine with others. shares: how many"""
        if self.has_gpu or shares == 1 or "LOCALLLM_THREADS" in os.environ:
            return {}
        return {"LOCALLLM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // shares))}

    def cause_of(self, error: Exception) -> LocalLLMError:
        """The error with which a replica could not start, which Ray has as text."""
        text = str(error)
        status: Any = self.serve.status().applications.get(APPLICATION)
        if status:
            text += "".join(each.message for each in status.deployments.values())
        if matches := list(RAISED.finditer(text)):
            message, _, remedy = matches[-1]["text"].partition("; ")
            kind = getattr(errors, matches[-1]["name"], None)
            if kind is DoesNotFit and not self.has_gpu:
                remedy = f"{remedy}; or use fewer --replicas" if remedy else "use fewer --replicas"
            cause = LocalLLMError(message, remedy or None)
            if isinstance(kind, type) and issubclass(kind, LocalLLMError):
                cause.exit_code, cause.http_status = kind.exit_code, kind.http_status
            return cause
        lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
        return LocalLLMError(f"the replicas did not start: {lines[-1].strip()[:300]}", "see Ray's log")

    def fleet(self) -> Any:
        """The replicas, as `front.Fleet`."""
        return fleet_of(self.handle)

    def restart(self, notify: Callable[[str], object]) -> None:
        """Replace all replicas with new ones while requests continue, unless a restart is in progress."""

        def work() -> None:
            if not self.restarting.acquire(blocking=False):
                notify("the replicas are being restarted already")
                return
            with ExitStack() as stack:
                stack.callback(self.restarting.release)
                notify("restarting the replicas, one after the other")
                try:
                    self.deploy()
                    notify("all replicas are restarted")
                except LocalLLMError as error:
                    notify(f"error: the replicas are not restarted: {error}")

        threading.Thread(target=work, name="localllm-restart", daemon=True).start()

    def stop(self, notify: Callable[[str], object]) -> None:
        """End the replicas of a cluster if this is its last front; those on this process's own Ray end with it."""
        if self.handle:
            self.handle.shutdown()  # with its thread, which reports to Ray
        if self.options.cluster:
            leave_cluster(self.ray, self.serve, notify)
