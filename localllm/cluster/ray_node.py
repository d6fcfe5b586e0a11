"""Ray on this machine: started so that only its owner can use it, and ended completely; its cluster's machines and
fronts.

Whoever reaches Ray's ports and has its token runs code as its user. So Ray listens on loopback alone unless other
machines are to join, always wants a token, which is in a file that only its user can read, and has its own folder.
Settled here (Ray 2.60):

- With `--node-ip-address 127.0.0.1` Ray puts the machine's own address in its place and listens on all interfaces;
  not where RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER is 0, its mode for machines without a cluster.
- Agents whose ports are not given write them to files, for which the raylet waits 15 s and then aborts.
- `ray stop` ends every Ray of the user. `ray start --block` ends its own processes, and does so on SIGTERM.
- The environment is read when Ray is imported, so it is set before.

The fronts of a cluster are in the key-value store of Ray's head: each process that serves the replicas to clients
writes down where it listens, so that the others, and `localllm cluster status`, find it. The entry of a front
that was killed counts only while Ray has a connection to its process.
"""

# pyright: reportMissingImports=false
# Ray is installed with localllm[cluster] only.

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import psutil

import localllm
from localllm.errors import LocalLLMError, UsageError
from localllm.files import write_token

LOOPBACK = "127.0.0.1"
FOLDER_PREFIX = "localllm-ray-"
NODE_FILE = "cluster.json"  # in localllm's home: this machine's node of a cluster; also in the node's folder
TOKEN_FILE = "cluster-token"
DRAIN_S = 600  # for answers of replicas on a machine that is drained
STARTED = "Ray runtime started"
TOO_SLOW = "timed out during startup"  # as Ray says of one of its processes
START_ATTEMPTS = 3
START_TIMEOUT_S = 240.0  # 10 s on an idle machine; Ray's own limits are far below
STOP_TIMEOUT_S = 20.0
WORKER_PORTS = 100  # for processes of replicas, controllers and front ends
OBJECT_STORE_BYTES = 256 * 2**20  # requests and answers are small
PR_SET_PDEATHSIG = 1
PORT_FLAGS = (
    "object-manager-port",
    "node-manager-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
CLIENT_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Otherwise a late thread of Ray Serve starts another Ray, without a token, when this one has ended.
    "RAY_ENABLE_AUTO_CONNECT": "0",
}
NAMESPACE, FRONT_PREFIX = "localllm", "front:"  # of the entries in the key-value store
METRIC_PORTS = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")


def require_ray() -> None:
    """Raise UsageError if Ray is not installed. Does not import it."""
    if find_spec("ray") is None:
        raise UsageError("replicas need Ray, which is not installed", 'run `pip install "localllm[cluster]"`')


@dataclass(frozen=True)
class RayNode:
    """A Ray node on this machine."""

    address: str  # HOST:PORT of the head
    host: str  # of this machine, as the others reach it
    token_file: str
    folder: str
    pid: int  # of `ray start --block`
    created: float  # when that process was created, as a process id may be used again
    is_head: bool
    is_foreign: ClassVar[bool] = False  # started by something else

    @property
    def is_running(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def environment(self) -> dict[str, str]:
        """Variables with which Ray is started and used."""
        return ray_environment(self.host, self.token_file)

    def stop(self) -> None:
        """End the node with all its processes, and remove its folder."""
        if self.is_running:
            process = psutil.Process(self.pid)
            processes = [*process.children(recursive=True), process]
            process.terminate()
            _, left = psutil.wait_procs(processes, STOP_TIMEOUT_S)
            for each in left:
                with suppress(psutil.Error):
                    each.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, file: Path) -> "RayNode | None":
        """The node that a file describes, if it still runs."""
        try:
            saved = json.loads(file.read_text())
            node = cls(**{each.name: saved[each.name] for each in fields(cls)})  # others: of a later version
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return node if node.is_running else None


class ForeignNode(RayNode):
    """A node that something else has started and ends, such as KubeRay, which sets Ray's token too."""

    is_foreign = True

    @property
    def is_running(self) -> bool:
        return True  # as far as this process can see

    def environment(self) -> dict[str, str]:
        return CLIENT_ENVIRONMENT


def own_node(home: Path) -> RayNode:
    """The node that this machine is in a cluster: by `localllm cluster`, otherwise the one of RAY_ADDRESS. home:
    localllm's folder. Raises UsageError."""
    if node := RayNode.load(home / NODE_FILE):
        return node
    if address := os.environ.get("RAY_ADDRESS"):
        return ForeignNode(address, "", "", "", os.getpid(), 0.0, is_head=False)
    remedy = "run `localllm cluster start`, or `localllm cluster join` on a further machine"
    raise UsageError("this machine is in no cluster", remedy)


def ray_environment(host: str, token_file: str) -> dict[str, str]:
    """Variables for Ray on this machine. host, token_file: as of a node"""
    package_folder = str(Path(localllm.__file__).parents[1])
    paths = [package_folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_file,
        **CLIENT_ENVIRONMENT,
        # Workers do not see an editable install through a nested .pth file.
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }
    if host == LOOPBACK:
        environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return environment


class StartTimeout(LocalLLMError):
    """Ray has given up on one of its processes, which a busy machine had not started in Ray's fixed time."""


def start_node(notify: Callable[[str], object] = lambda message: None, **options: Any) -> RayNode:
    """Start Ray as `launch_node` does, again if it was too slow. notify: called with messages for the operator"""
    require_ray()
    for _ in range(START_ATTEMPTS - 1):
        try:
            return launch_node(notify, **options)
        except StartTimeout:
            notify("Ray was not ready in its own time limit, as this machine is busy; starting it again")
    return launch_node(notify, **options)


def launch_node(
    notify: Callable[[str], object],
    *,
    host: str = LOOPBACK,
    port: int = 0,
    head: str | None = None,
    token_file: Path | None = None,
    gpus: int = 0,
    outlives_parent: bool = False,
) -> RayNode:
    """Start Ray on this machine, and wait until it is ready.

    host: address of this machine, for other ones unless it is 127.0.0.1; port: of a head, 0 for a free one; head:
    HOST:PORT of the head to join, None to be one; token_file: None makes a token in the node's folder; gpus: of
    this machine; outlives_parent: whether it outlives this process; notify: called if it takes long.

    Raises LocalLLMError with Ray's last line if it does not start, StartTimeout if it was too slow.
    """
    remove_old_folders()
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))  # short: it contains sockets; readable by its owner
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if token_file is None:
            token_file = folder / "token"
            write_token(token_file)
        ports = free_ports(host, len(PORT_FLAGS) + len(METRIC_PORTS) + 2)
        address = head or f"{host}:{port or ports.pop()}"
        environment = os.environ | ray_environment(host, str(token_file))
        environment |= {name: str(ports.pop()) for name in METRIC_PORTS}
        first = free_range(host, WORKER_PORTS)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"),
            *(f"--{flag}={ports.pop()}" for flag in PORT_FLAGS),
            f"--node-ip-address={host}",
            f"--min-worker-port={first}",
            f"--max-worker-port={first + WORKER_PORTS - 1}",
            f"--num-gpus={gpus}",
            f"--object-store-memory={OBJECT_STORE_BYTES}",
            "--include-log-monitor=false",
        ]
        if head:
            command.append(f"--address={head}")
        else:
            command += ["--head", "--include-dashboard=false", f"--temp-dir={folder}"]
            command += [f"--port={address.rpartition(':')[2]}", f"--ray-client-server-port={ports.pop()}"]
        log = open(folder / "start.log", "wb")  # noqa: SIM115 - Ray continues to write to it
        stack.callback(log.close)
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends Ray when requests have ended
            preexec_fn=None if outlives_parent else end_with_parent(),
        )
        created = psutil.Process(process.pid).create_time()
        node = RayNode(address, host, str(token_file), str(folder), process.pid, created, head is None)
        node.save(folder / NODE_FILE)
        stack.callback(node.stop)
        wait_for_start(process, folder / "start.log", notify)
        stack.pop_all()
        log.close()
        return node


def remove_old_folders() -> None:
    """Remove folders of nodes whose front was killed and left them."""
    for file in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*/{NODE_FILE}"):
        with suppress(OSError):
            if file.stat().st_uid == os.getuid() and RayNode.load(file) is None:
                shutil.rmtree(file.parent, ignore_errors=True)


def wait_for_start(process: "subprocess.Popen[bytes]", log: Path, notify: Callable[[str], object]) -> None:
    """Wait until Ray says that it has started. Raises LocalLLMError and StartTimeout."""
    began, notified = time.monotonic(), False
    while STARTED not in (text := log.read_text(errors="replace")):
        seconds = time.monotonic() - began
        if process.poll() is not None or seconds > START_TIMEOUT_S:
            lines = [line for line in text.splitlines() if line.strip()] or ["no output"]
            state = "has ended" if process.poll() is not None else f"is not ready after {seconds:.0f} s"
            is_slow = process.poll() is None or TOO_SLOW in text
            raise (StartTimeout if is_slow else LocalLLMError)(
                f"Ray {state}: {lines[-1].strip()[:300]}", "try again when the machine is less busy"
            )
        if seconds > 15 and not notified:
            notified = True
            notify("Ray is still starting; this takes up to a minute on a busy machine")
        time.sleep(0.1)


def end_with_parent() -> Callable[[], object] | None:
    """Return a function for a child process to call, so that it gets SIGTERM when this one ends, even by SIGKILL;
    None if the system has no such call, as on macOS."""
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None  # the signal follows the thread that started the process
    call = ctypes.CDLL(None).prctl  # looked up here, as a forked child may not
    return lambda: call(PR_SET_PDEATHSIG, signal.SIGTERM)


def free_ports(host: str, count: int) -> list[int]:
    """Different free ports. Another process may take one before Ray does, which then does not start."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((host, 0))
        return [each.getsockname()[1] for each in sockets]


def free_range(host: str, count: int) -> int:
    """The first of `count` consecutive free ports, below those that the kernel gives to connections."""
    for _ in range(100):
        first = 10_000 + secrets.randbelow(20_000)
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind((host, port))
            return first
    raise LocalLLMError(f"no {count} consecutive ports are free", "stop some of the listening processes")


def connect(node: RayNode) -> Any:
    """Connect this process to Ray, and return the module. Raises LocalLLMError."""
    os.environ.update(node.environment())
    import logging

    import ray

    try:
        ray.init(
            address=node.address,
            _node_ip_address=node.host or None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:300]
        raise LocalLLMError(f"cannot connect to Ray at {node.address}: {reason}", "start it again") from error
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return ray


def count_gpus() -> int:
    """CUDA devices of this machine."""
    import torch

    return torch.cuda.device_count()


def address_towards(host: str, port: int) -> str:
    """Address of this machine from which another one is reached. Raises UsageError for an unreachable one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
            each.connect((host, port))  # sends nothing
            return each.getsockname()[0]
    except OSError as error:
        raise UsageError(f"{host} cannot be reached ({error.strerror})", "give --host ADDRESS") from None


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


def machines_of(node: RayNode) -> tuple[list[dict[str, Any]], list[FrontEntry]]:
    """The machines of a cluster, the head first, and its fronts. Raises LocalLLMError if the head does not
    answer."""
    ray = connect(node)
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    machines = []
    for each in ray.nodes():
        resources = each["Resources"]
        gpus = resources.get("GPU", 0.0)
        machines.append(
            {
                "node": each["NodeID"][:8],
                "id": each["NodeID"],
                "host": each["NodeManagerAddress"],
                "is_head": "node:__internal_head__" in resources,
                "state": "ready" if each["Alive"] else "left",
                "cpus": resources.get("CPU", 0.0),
                "gpus": gpus,
                "gpus_in_use": gpus - free.get(each["NodeID"], {}).get("GPU", 0.0),
            }
        )
    fronts = fronts_of(ray)
    ray.shutdown()
    return sorted(machines, key=lambda each: (not each["is_head"], each["state"], each["host"])), fronts


def drain_machine(node: RayNode, machine: str) -> None:
    """Have Ray move replicas away from a machine, after the requests that they have. machine: its id. Raises
    LocalLLMError if Ray refuses."""
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={node.address}"),
        *("--node-id", machine, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "localllm"),
        *("--deadline-remaining-seconds", str(DRAIN_S)),
    ]
    result = subprocess.run(
        command, env=os.environ | node.environment(), capture_output=True, text=True, check=False
    )
    if result.returncode:
        reason = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()[-1][:300]
        raise LocalLLMError(f"Ray does not drain the machine: {reason}", "see `localllm cluster status`")
