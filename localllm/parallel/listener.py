"""A worker: it listens for the first machine of a pipeline, and computes one stage for it in a process of its own,
so that all memory is free when that machine leaves, and a failure in a stage leaves the worker ready for the next.
"""

import contextlib
import json
import socket
import threading
from collections.abc import Callable

from localllm.errors import Busy, LocalLLMError, UsageError
from localllm.files import reason_of
from localllm.parallel.channel import FACTS, SETUP, VERSIONS, Channel, describe_end, end_process, start_process
from localllm.parallel.handshake import (
    EARLY_BYTES,
    HANDSHAKE_S,
    WrongToken,
    format_address,
    own_versions,
    prepare,
    prove_as_worker,
    why_versions_differ,
)

LEAVE_S = 5.0  # in which the process of a first machine that has left ends
MAX_CONNECTIONS = 8  # that have not proved yet that they have the token; further ones are closed
STAGE_MODULE = "localllm.llm.stage_process"  # imported by its own process alone


class WorkerListener:
    """Accepts connections, and starts a process for one first machine at a time."""

    def __init__(self, host: str, port: int, token: bytes, device: str, report: Callable[[str], object]):
        """port: 0 for a free one; device: as for `resolve_device`; report: called with messages for the operator.
        Raises UsageError if the address cannot be used."""
        self.token = token
        self.device = device
        self.report = report
        self.unproved = threading.Semaphore(MAX_CONNECTIONS)
        self.in_use = threading.Lock()  # while a stage is computed
        self.user = ""  # the machine that it is computed for
        self.control: Channel | None = None  # to the process of the stage, which ends with it
        try:
            self.listener = socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
        except OSError as error:
            raise UsageError(
                f"cannot listen on {format_address((host, port))} ({reason_of(error)})",
                "give another --host or --port",
            ) from None

    @property
    def address(self) -> str:
        return format_address(self.listener.getsockname())

    def serve(self) -> None:
        """Accept connections until the listener is closed."""
        while True:
            try:
                connection, peer = self.listener.accept()
            except OSError:
                return
            if not self.unproved.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(target=self.answer, args=(connection, format_address(peer)), daemon=True)
            thread.start()

    def close(self) -> None:
        """Accept no more connections, and end the stage."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        if self.control:
            self.control.close()

    def answer(self, connection: socket.socket, peer: str) -> None:
        """Handle a connection: the body of a thread."""
        with connection:
            try:
                checked = self.check(connection, peer)
            except OSError as error:  # nothing is known of the other side
                if isinstance(error, WrongToken):
                    self.report(f"refused {peer}, which has another token")
                return
            finally:
                self.unproved.release()
            if checked is None:
                return
            channel, processes = checked
            if not self.in_use.acquire(timeout=LEAVE_S):
                channel.send_failure(Busy(f"it computes for {self.user}", "wait, or stop the server that uses it"))
                return
            try:
                self.user = peer
                self.run_stage(connection, channel, peer, processes)
            except OSError as error:
                channel.send_failure(LocalLLMError(f"its process cannot be started ({reason_of(error)})"))
            finally:
                self.in_use.release()

    def check(self, connection: socket.socket, peer: str) -> tuple[Channel, int] | None:
        """Check that the other side has the token and the same versions, and return the processes that it wants;
        None for others. Raises OSError."""
        prepare(connection)
        prove_as_worker(connection, self.token)
        channel = Channel(connection, EARLY_BYTES)
        connection.settimeout(HANDSHAKE_S)
        message = channel.receive()
        if message is None or message[0] != VERSIONS:
            raise ConnectionError
        channel.send(VERSIONS, json.dumps(own_versions()).encode())
        try:
            if difference := why_versions_differ(json.loads(message[1])):
                self.report(f"refused {peer}: {difference}")
                return None
            message = channel.receive()
            if message is None or message[0] != FACTS:
                raise ConnectionError
            processes = int(json.loads(message[1])["processes"])
        except (ValueError, TypeError, LookupError):
            raise ConnectionError from None
        connection.settimeout(None)  # also of the process that inherits it
        return channel, processes

    def run_stage(self, connection: socket.socket, channel: Channel, peer: str, processes: int) -> None:
        """Run the process of a stage, and report to the first machine how it has ended. processes: of the stage"""
        process, control = start_process(STAGE_MODULE, [connection.fileno()])
        self.control = control
        try:
            fields = {"device_name": self.device, "peer": peer, "processes": processes}
            control.send(SETUP, json.dumps(fields).encode())
            while message := control.receive():
                self.report(message[1].decode())
            end = describe_end(process)
            if process.returncode != 0:  # None: it does not end
                self.report(f"the process for {peer} {end}")
                channel.send_failure(LocalLLMError(f"its process {end}"))
            else:
                self.report(f"{peer} has left; waiting for the next machine")
        finally:
            control.close()
            end_process(process)
            self.control = None
