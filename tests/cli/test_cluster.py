"""`localllm cluster` as a user types it. The processes of Ray's nodes only sleep."""

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from localllm.cluster import ray_node
from localllm.cluster.ray_node import NODE_FILE, FrontEntry, RayNode

HEAD = "10.0.0.1:6379"
OPTIONS = {"gpus": 2, "outlives_parent": True}


def machine(node: str, host: str, **fields: Any) -> dict[str, Any]:
    usual = {"is_head": False, "state": "ready", "cpus": 16.0, "gpus": 2.0, "gpus_in_use": 0.5}
    return {"node": node[:8], "id": node, "host": host, **usual, **fields}


MACHINES = [
    machine("aa11bb22cc", "10.0.0.1", is_head=True, gpus=0.0, gpus_in_use=0.0),
    machine("aa33dd44ee", "10.0.0.2"),
    machine("bb55ff66aa", "10.0.0.3", state="left"),
]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """A Ray with MACHINES; yields the options of the nodes that were started and the ids of drained machines."""
    asked, processes = list[Any](), list[subprocess.Popen[bytes]]()

    def start_node(notify: Any, **options: Any) -> RayNode:
        asked.append(options)
        processes.append(process := subprocess.Popen(["sleep", "600"]))
        (tmp_path / "ray").mkdir()
        address = options.get("head") or f"{options['host']}:{options['port']}"
        created = psutil.Process(process.pid).create_time()
        node = (address, options["host"], str(options["token_file"]), str(tmp_path / "ray"), process.pid, created)
        return RayNode(*node, is_head="head" not in options)

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_node, "require_ray", lambda: None)
    monkeypatch.setattr(ray_node, "start_node", start_node)
    monkeypatch.setattr(ray_node, "count_gpus", lambda: 2)
    monkeypatch.setattr(ray_node, "address_towards", lambda host, port: "10.0.0.2")
    monkeypatch.setattr(
        ray_node, "machines_of", lambda node: (MACHINES, [FrontEntry("http://10.0.0.1:80", ["demo"])])
    )
    monkeypatch.setattr(ray_node, "drain_machine", lambda node, name: asked.append(name))
    yield asked
    for process in processes:
        process.kill()
        process.wait()


def test_a_cluster_of_this_machine_from_start_to_stop(ray, real, tmp_path: Path) -> None:
    token, file = tmp_path / "home" / "cluster-token", tmp_path / "home" / NODE_FILE
    code, out, err = real("cluster", "start", "--host", "localhost", "--port", "7000")
    assert (code, out) == (0, "") and "this machine alone; start it with --host ADDRESS" in err
    assert ray == [{"host": "127.0.0.1", "port": 7000, **OPTIONS, "token_file": token}]
    assert token.stat().st_mode & 0o777 == 0o600
    code, _, err = real("cluster", "start")
    assert code == 2 and "in the cluster of 127.0.0.1:7000 already; leave it first with" in err
    assert real("cluster", "stop") == (0, "", "the cluster has ended\n")
    assert not file.exists() and not (tmp_path / "ray").exists()
    code, _, err = real("cluster", "stop")
    assert code == 2 and err.startswith("error: this machine is in no cluster; run `localllm cluster start`")


def test_a_head_prints_the_command_with_which_a_machine_joins_and_leaves(ray, real, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(socket.socket, "bind", lambda self, address: None)  # as if this machine had the address
    token = tmp_path / "token"
    code, out, err = real("cluster", "start", "--host", "10.0.0.1", "--token-file", str(token))
    assert (code, out) == (0, f"localllm cluster join {HEAD} --token-file FILE\n")
    assert (
        "anyone with access to this machine and the token can run programs as you" in err
        and f"copy {token}" in err
    )
    assert real("cluster", "stop")[0] == 0
    code, out, err = real(*out.replace("FILE", str(token)).split()[1:])
    assert (code, out, err) == (0, "", f"this machine is in the cluster of {HEAD}\n")
    assert ray[1] == {"host": "10.0.0.2", "head": HEAD, **OPTIONS, "token_file": token}
    assert real("cluster", "stop") == (0, "", "this machine has left the cluster\n")


def test_the_ray_of_something_else_is_listed_drained_and_not_ended(ray, real, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", HEAD)
    code, out, err = real("cluster", "status")
    assert (code, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["NODE", "HOST", "ROLE", "STATE", "CPUS", "GPUS", "IN", "USE"],
        ["aa11bb22", "10.0.0.1", "head", "ready", "16", "0", "0"],
        ["aa33dd44", "10.0.0.2", "ready", "16", "2", "0.5"],
        ["bb55ff66", "10.0.0.3", "left", "16", "2", "0.5"],
        ["demo", "at", "http://10.0.0.1:80"],
    ]
    fronts = [{"url": "http://10.0.0.1:80", "models": ["demo"]}]
    found = json.loads(real("cluster", "status", "--json")[1])
    assert found == {"head": HEAD, "machines": MACHINES, "fronts": fronts}
    code, _, err = real("cluster", "drain", "aa33")
    assert code == 0 and err.startswith("10.0.0.2 gets no further replicas") and ray == ["aa33dd44ee"]
    for name, reason in {
        "aa": "more than one machine begins so; give a NODE",
        "bb": "drain bb: there is no such machine",
        "aa11": "the head cannot be drained; `localllm cluster stop` ends the cluster",
    }.items():
        code, _, err = real("cluster", "drain", name)
        assert code == 2 and reason in err and len(ray) == 1
    code, _, err = real("cluster", "stop")
    assert (
        code == 2 and f"Ray at {HEAD} was not started by localllm; stop it with the program that started it" in err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("begin", "begin is no action of `localllm cluster`; give start, join, status, drain, stop"),
        ("join", "join takes the HOST:PORT of the head"),
        ("drain", "drain takes a NODE of `localllm cluster status`"),
        ("stop aa11", "stop takes no argument"),
        ("start --json", "start takes no --json; leave it out; it is for status"),
        ("status --host 10.0.0.1", "status takes no --host; leave it out; it is for start and join"),
        (f"join {HEAD} --port 7000", "join takes no --port; leave it out; it is for start"),
        ("stop --token-file token", "stop takes no --token-file"),
        ("start --host 0.0.0.0", "--host 0.0.0.0 is no IPv4 address of this machine"),
        (
            "start --host 203.0.113.5",
            "--host 203.0.113.5 is no IPv4 address of this machine; give the one by which",
        ),
        ("start --host head", "'head' is not an IP address"),
        ("join 10.0.0.1", "'10.0.0.1' is not HOST:PORT; give what `localllm cluster start` printed"),
        ("join 10.0.0.1:99999", "'10.0.0.1:99999' is not HOST:PORT"),
        ("join head:6379", "'head' is not an IP address; give the head's address as `localllm cluster start`"),
        ("join 127.0.0.1:6379", "127.0.0.1 is this machine; start the head with --host ADDRESS"),
        (f"join {HEAD}", "joining needs the head's token; copy its file here, and add --token-file FILE"),
        (f"join {HEAD} --token-file /no/token", "there is no file /no/token; copy the head's token file here"),
        (f"join {HEAD} --token-file {__file__} --host ::1", "the head cannot reach this machine at ::1"),
    ],
)
def test_refused_arguments_start_nothing(ray, real, arguments: str, message: str) -> None:
    code, out, err = real("cluster", *arguments.split())
    assert (
        (code, out, ray) == (2, "", []) and err.startswith("error: ") and message in err and err.count("\n") == 1
    )
