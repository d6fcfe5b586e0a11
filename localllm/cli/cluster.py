"""`localllm cluster`: the machines on which `localllm serve --cluster` places its replicas."""

import json
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localllm.cli import options
from localllm.cli.io import StdoutWriter, note, status
from localllm.errors import UsageError
from localllm.files import expand_path, write_token
from localllm.formatting import format_table
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.cluster.ray_node import RayNode

ACTIONS = ("start", "join", "status", "drain", "stop")
DEFAULT_PORT, MAX_PORT = 6379, 65535
FLAGS = {"start": ("--host", "--port", "--token-file"), "join": ("--host", "--token-file"), "status": ("--json",)}


def cluster(
    action: Annotated[
        str,
        typer.Argument(metavar="start|join|status|drain|stop", hidden=True, autocompletion=lambda: list(ACTIONS)),
    ],
    target: Annotated[str | None, typer.Argument(metavar="[HOST:PORT|NODE]", hidden=True)] = None,
    host: Annotated[
        str | None,
        options.option(
            "--host",
            text="Address of this machine for the others; default of start: 127.0.0.1, which allows no others.",
            metavar="ADDRESS",
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(help="With start: port at which other machines join.", metavar="N", min=1, max=MAX_PORT),
    ] = DEFAULT_PORT,
    token_file: Annotated[
        str | None,
        options.option(
            "--token-file",
            text="Token file; default of start: cluster-token in localllm's home, created if missing.",
            metavar="FILE",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Form a cluster of machines for `serve --cluster`.

    `localllm serve --replicas N --cluster` places its replicas on them.

    start makes this machine the head, and prints the command for the others. join adds this machine to the cluster
    of the head at HOST:PORT, with a copy of its token file. status lists the machines. drain moves replicas away
    from the machine NODE of that list, when they have answered their requests. stop takes this machine out; on the
    head, it ends the cluster. Anyone with access to the machines and the token can run programs on them as their
    user. Clusters use Ray: install it with `pip install "localllm[cluster]"`.
    """
    from localllm.cluster.ray_node import NODE_FILE, RayNode, own_node, require_ray

    if action not in ACTIONS:
        raise UsageError(f"{action} is no action of `localllm cluster`", f"give {', '.join(ACTIONS)}")
    if (target is not None) != (action in ("join", "drain")):
        needs = {"join": "the HOST:PORT of the head", "drain": "a NODE of `localllm cluster status`"}.get(action)
        raise UsageError(f"{action} takes {needs or 'no argument'}", "see `localllm cluster --help`")
    given = {"--host": host, "--port": port != DEFAULT_PORT, "--token-file": token_file, "--json": as_json}
    for flag, value in given.items():
        if value and flag not in FLAGS.get(action, ()):
            takers = " and ".join(taker for taker, flags in FLAGS.items() if flag in flags)
            raise UsageError(f"{action} takes no {flag}", f"leave it out; it is for {takers}")
    require_ray()
    file = Settings.from_environment().home / NODE_FILE
    node = RayNode.load(file)
    if action in ("start", "join"):
        if node:
            message = f"this machine is in the cluster of {node.address} already"
            raise UsageError(message, "leave it first with `localllm cluster stop`")
        if action == "start":
            start(file, host or "127.0.0.1", port, token_file)
        else:
            join(file, target or "", host, token_file)
        return
    node = node or own_node(file.parent)
    if action == "status":
        print_status(node, as_json=as_json)
    elif action == "drain":
        drain(node, target or "")
    elif node.is_foreign:
        raise UsageError(
            f"Ray at {node.address} was not started by localllm", "stop it with the program that started it"
        )
    else:
        with status("ending Ray"):
            node.stop()
        file.unlink(missing_ok=True)
        note("the cluster has ended" if node.is_head else "this machine has left the cluster")


def start(file: Path, host: str, port: int, token_file: str | None) -> None:
    """Start the head, and print the command with which other machines join."""
    from localllm.cluster.ray_node import LOOPBACK, TOKEN_FILE, count_gpus, start_node

    address = own_address(host)
    token = expand_path(token_file).absolute() if token_file else file.parent / TOKEN_FILE
    write_token(token)
    with status("starting Ray"):
        node = start_node(
            note,
            host=address,
            port=port,
            token_file=token,
            gpus=count_gpus(),
            outlives_parent=True,
        )
    node.save(file)
    if address == LOOPBACK:
        note("this cluster is this machine alone; start it with --host ADDRESS for other machines")
        return
    note(
        "warning: anyone with access to this machine and the token can run programs as you; use a private network"
    )
    note(f"copy {token} to each further machine, and run there:")
    StdoutWriter().write(f"localllm cluster join {node.address} --token-file FILE\n")


def own_address(host: str) -> str:
    """The address of this machine that --host names, 127.0.0.1 for any loopback address. Raises UsageError for one
    that Ray cannot listen on."""
    from localllm.cluster.ray_node import LOOPBACK
    from localllm.server.access import parse_ip_address

    address = parse_ip_address(host)
    if address.is_loopback:
        return LOOPBACK
    try:
        if address.is_unspecified:
            raise OSError
        with socket.socket(socket.AF_INET) as each:
            each.bind((str(address), 0))
    except OSError:
        remedy = "give the one by which the others reach it"
        raise UsageError(f"--host {host} is no IPv4 address of this machine", remedy) from None
    return str(address)


def join(file: Path, head: str, host: str | None, token_file: str | None) -> None:
    """Add this machine to the cluster of a head."""
    from localllm.cluster.ray_node import LOOPBACK, address_towards, count_gpus, start_node
    from localllm.server.access import parse_ip_address

    name, _, number = head.rpartition(":")
    if not (name and number.isdecimal() and 0 < int(number[:6]) <= MAX_PORT):
        raise UsageError(f"{head!r} is not HOST:PORT", "give what `localllm cluster start` printed")
    try:
        address = parse_ip_address(name)
    except UsageError as error:
        remedy = "give the head's address as `localllm cluster start` printed it"
        raise UsageError(error.message, remedy) from None
    if address.is_loopback:
        raise UsageError(f"{name} is this machine", "start the head with --host ADDRESS, and join at that address")
    if token_file is None:
        raise UsageError("joining needs the head's token", "copy its file here, and add --token-file FILE")
    token = expand_path(token_file).absolute()
    if not token.is_file():
        raise UsageError(f"there is no file {token}", "copy the head's token file here")
    own = own_address(host) if host else address_towards(name, int(number))
    if own == LOOPBACK:
        raise UsageError(f"the head cannot reach this machine at {host}", "give --host ADDRESS, or leave it out")
    with status("starting Ray"):
        node = start_node(
            note,
            host=own,
            head=head,
            token_file=token,
            gpus=count_gpus(),
            outlives_parent=True,
        )
    node.save(file)
    note(f"this machine is in the cluster of {head}")


def print_status(node: "RayNode", *, as_json: bool) -> None:
    from localllm.cluster.ray_node import machines_of

    with status("asking Ray"):
        machines, fronts = machines_of(node)
    if as_json:
        content = {"head": node.address, "machines": machines, "fronts": [asdict(front) for front in fronts]}
        StdoutWriter().write(json.dumps(content, indent=1) + "\n")
        return

    def row(machine: dict[str, Any]) -> tuple[str, ...]:
        return (
            machine["node"],
            machine["host"],
            "head" if machine["is_head"] else "",
            machine["state"],
            f"{machine['cpus']:g}",
            f"{machine['gpus']:g}",
            f"{machine['gpus_in_use']:g}",
        )

    header = ("NODE", "HOST", "ROLE", "STATE", "CPUS", "GPUS", "IN USE")
    out = StdoutWriter()
    out.write(format_table([header, *map(row, machines)]) + "\n")
    for front in fronts:
        out.write(f"{', '.join(front.models)} at {front.url}\n")


def drain(node: "RayNode", name: str) -> None:
    from localllm.cluster.ray_node import drain_machine, machines_of

    with status("asking Ray"):
        machines = [
            each for each in machines_of(node)[0] if each["node"].startswith(name) and each["state"] != "left"
        ]
    if len(machines) != 1:
        found = "more than one machine begins so" if machines else "there is no such machine"
        raise UsageError(f"drain {name}: {found}", "give a NODE of `localllm cluster status`")
    [machine] = machines
    if machine["is_head"]:
        raise UsageError("the head cannot be drained", "`localllm cluster stop` ends the cluster")
    drain_machine(node, machine["id"])
    note(f"{machine['host']} gets no further replicas, and those there move away when their requests have ended")
