"""Connections between the machines that compute one model.

Each side proves that it has the same token before anything else that the other has sent is read: both send a fixed
number of bytes with a random nonce, then the SHA-256 HMAC of both nonces, under a name for each role so that no
proof can be sent back. Messages follow as within a machine: JSON, integers and numbers, nothing pickled. They are
not encrypted.
"""

import hmac
import json
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from localllm.errors import (
    AccessDenied,
    LocalLLMError,
    NotLocalLLMServer,
    ServerTooSlow,
    ServerUnreachable,
    UsageError,
)
from localllm.files import expand_path, read_token, reason_of
from localllm.hardware.processor import library_versions
from localllm.parallel.channel import VERSIONS, Channel

PORT = 11435
TOKEN_FILE = "worker-token"  # in localllm's home
MAGIC = b"localllm worker\n"  # begins a connection
NONCE_BYTES, PROOF_BYTES = 32, 32
FIRST, WORKER = b"first machine", b"worker"  # roles
REFUSED = bytes(PROOF_BYTES)  # instead of a proof, for another token
CONNECT_S = 10.0
HANDSHAKE_S = 5.0  # until the other side has proved that it has the token
EARLY_BYTES = 2**20  # of a message before a model is loaded
# A connection without traffic is probed, so that the loss of a machine or of the network shows in half a minute.
PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 10, 5, 4
UNANSWERED_MS = 1000 * (PROBE_AFTER_S + PROBE_EVERY_S * PROBES)  # until data without an answer ends it, too


class WrongToken(ConnectionError):
    """The other side has not proved that it has the token."""


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST or HOST:PORT, of an IPv6 address [HOST]:PORT. Raises UsageError."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or host.endswith(":") or (":" in host and not host.startswith("[")):
        host, port = text.strip(), str(PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(
            f"{text!r} is not the address of a worker", "give HOST:PORT, as `localllm worker` prints it"
        )
    return host.strip("[]"), int(port)


def split_addresses(text: str | None) -> list[str]:
    """Return the addresses in `HOST:PORT,HOST:PORT`; none of None. Raises UsageError."""
    addresses = text.split(",") if text is not None else []
    return [format_address(parse_address(address)) for address in addresses]


def check_distinct(addresses: Sequence[str]) -> None:
    """Raise UsageError if a worker is named twice."""
    if len(set(addresses)) < len(addresses):
        raise UsageError("a worker is named twice", "start one for each device, at a port of its own")


def format_address(address: tuple[Any, ...]) -> str:
    """Return HOST:PORT of a socket's address."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def worker_token(file: str | Path | None, home: Path) -> bytes:
    """Return the token of workers. file: None for that of localllm's home. Raises UsageError."""
    return read_token(home / TOKEN_FILE if file is None else expand_path(str(file)))


def own_versions() -> dict[str, str]:
    """Return the versions that have to be the same on all machines."""
    found = library_versions(("torch",))
    return {name: (found[name] or "").partition("+")[0] for name in ("localllm", "torch")}


def why_versions_differ(other: Any) -> str | None:
    """Return in which versions another machine differs; None if it does not. other: as from `own_versions`"""
    own, other = own_versions(), other if isinstance(other, dict) else {}
    differing = [name for name in own if own[name] != other.get(name)]
    if not differing:
        return None
    there, here = (", ".join(f"{name} {each.get(name)}" for name in differing) for each in (other, own))
    return f"it runs {there}, and this machine {here}"


def open_connection(address: str, token: bytes) -> Channel:
    """Connect to a worker, with a proof on both sides that they have the same token, and the same versions.

    The channel has a time limit for each message, and one for its size. Raises ServerUnreachable, ServerTooSlow,
    NotLocalLLMServer, AccessDenied for another token, UsageError for other versions.
    """
    title = f"the worker at {address}"
    try:
        connection = socket.create_connection(parse_address(address), CONNECT_S)
    except OSError as error:
        remedy = "run `localllm worker` there, with --host for other machines"
        raise ServerUnreachable(f"{title} cannot be reached ({reason_of(error)})", remedy) from None
    try:
        prepare(connection)
        prove_as_first(connection, token)
        channel = Channel(connection, EARLY_BYTES)
        connection.settimeout(CONNECT_S)
        channel.send(VERSIONS, json.dumps(own_versions()).encode())
        check_versions(title, channel.receive())
        return channel
    except LocalLLMError:
        connection.close()
        raise
    except OSError as error:
        connection.close()
        if isinstance(error, WrongToken):
            remedy = "copy its token file here, and name it with --token-file"
            raise AccessDenied(f"{title} has another token", remedy) from None
        if isinstance(error, TimeoutError):
            raise ServerTooSlow(f"{title} does not answer", "see whether it is overloaded") from None
        raise NotLocalLLMServer(
            f"the program at {address} is not a worker",
            "run `localllm worker` there, in the version of this machine",
        ) from None


def check_versions(title: str, message: tuple[int, bytearray] | None) -> None:
    """Check a worker's versions. Raises UsageError if they differ, ServerTooSlow without an answer."""
    if message is None or message[0] != VERSIONS:
        raise ServerTooSlow(f"{title} does not answer", "check what the worker printed")
    if difference := why_versions_differ(json.loads(message[1])):
        raise UsageError(f"{title}: {difference}", "install the same versions on both")


def prepare(connection: socket.socket) -> None:
    """Send small messages at once, and notice when the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": PROBE_AFTER_S,
        "TCP_KEEPALIVE": PROBE_AFTER_S,  # the same on macOS
        "TCP_KEEPINTVL": PROBE_EVERY_S,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": UNANSWERED_MS,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def prove_as_first(connection: socket.socket, token: bytes) -> None:
    """Prove to a worker that this machine has the token, and check that the worker has it. Raises OSError."""
    deadline, own = time.monotonic() + HANDSHAKE_S, secrets.token_bytes(NONCE_BYTES)
    connection.sendall(MAGIC + own)
    nonces = own + read_nonce(connection, deadline)
    connection.sendall(proof(token, FIRST, nonces))
    if not hmac.compare_digest(read_exactly(connection, PROOF_BYTES, deadline), proof(token, WORKER, nonces)):
        raise WrongToken


def prove_as_worker(connection: socket.socket, token: bytes) -> None:
    """The other side of `prove_as_first`, which is told when its token is wrong. Raises OSError."""
    deadline, own = time.monotonic() + HANDSHAKE_S, secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(HANDSHAKE_S)
    connection.sendall(MAGIC + own)
    nonces = read_nonce(connection, deadline) + own
    if not hmac.compare_digest(read_exactly(connection, PROOF_BYTES, deadline), proof(token, FIRST, nonces)):
        connection.sendall(REFUSED)
        raise WrongToken
    connection.sendall(proof(token, WORKER, nonces))


def read_nonce(connection: socket.socket, deadline: float) -> bytes:
    begin = read_exactly(connection, len(MAGIC) + NONCE_BYTES, deadline)
    if not begin.startswith(MAGIC):
        raise ConnectionError("another protocol")
    return begin[len(MAGIC) :]


def proof(token: bytes, role: bytes, nonces: bytes) -> bytes:
    """Return what only the owner of a token can send. nonces: of the first machine and of the worker"""
    return hmac.digest(token, MAGIC + role + nonces, "sha256")


def read_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Return the next bytes. Raises OSError if the other side sends too few until the deadline."""
    content = b""
    while len(content) < count:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        received = connection.recv(count - len(content))
        if not received:
            raise ConnectionError("closed")
        content += received
    return content
