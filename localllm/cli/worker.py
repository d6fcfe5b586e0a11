"""`localllm worker`: this machine computes a pipeline stage, or prompts, for another one."""

import signal
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli import options
from localllm.cli.io import StdoutWriter, note
from localllm.errors import UsageError
from localllm.files import expand_path, read_token, write_token
from localllm.parallel.handshake import PORT, TOKEN_FILE, format_address
from localllm.settings import Settings

if TYPE_CHECKING:
    from types import FrameType


def worker(
    host: Annotated[
        str,
        typer.Option(help="Address to listen on, in a private network; 0.0.0.0 is all.", metavar="ADDRESS"),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(help="Port to listen on; 0 picks a free one.", metavar="N", min=0, max=65535),
    ] = PORT,
    token_file: Annotated[
        str | None,
        options.option(
            "--token-file",
            text="Token file of the worker; default: worker-token in localllm's home, created if missing.",
            metavar="FILE",
        ),
    ] = None,
    device: Annotated[
        str | None,
        options.option(
            "--device",
            text="Device to run on: auto, cpu, cuda or cuda:N.",
            metavar="DEVICE",
            choices=("auto", "cpu", "cuda"),
        ),
    ] = None,
) -> None:
    """Compute layers or prompts of a model for another machine.

    A model too large for one machine is divided among several: each runs `localllm worker`, and the first one
    `localllm serve MODEL --workers HOST:PORT,HOST:PORT`. A worker has one device, and a machine with several
    GPUs runs one for each, or divides each layer among them: with `--tensor-parallel N` on the first machine, a
    worker uses N GPUs, beginning with that of --device. With `serve MODEL --prefill HOST:PORT` instead, it has the
    whole model and computes prompts, so that they do not delay answers. It computes for one first machine at a
    time, and waits for the next when that disconnects. It needs the model (`localllm pull`), the same versions of
    localllm and torch, and the token. Anyone with the token can load every model that this user can read. Traffic
    is
    not encrypted: use a private network, or a tunnel of ssh or WireGuard.
    """
    from localllm.parallel.listener import WorkerListener
    from localllm.server.access import parse_ip_address

    address = parse_ip_address(host)
    file = expand_path(token_file).absolute() if token_file else Settings.from_environment().home / TOKEN_FILE
    if token_file is None:
        write_token(file)
    if not (device is None or device.partition(":")[0] in ("auto", "cpu", "cuda")):
        raise UsageError(f"there is no device {device!r}", "give auto, cpu, cuda or cuda:N")
    listener = WorkerListener(str(address), port, read_token(file), device or "auto", note)

    def stop(number: int, frame: "FrameType | None") -> None:
        listener.close()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    if not address.is_loopback:
        note("warning: traffic is not encrypted; use a private network, or listen on 127.0.0.1 behind a tunnel")
    reached = (
        format_address(("HOST", listener.listener.getsockname()[1]))
        if address.is_unspecified
        else listener.address
    )
    note(f"listening on {listener.address}; copy {file} to the first machine, and run there:")
    StdoutWriter().write(f"localllm serve MODEL --workers {reached} --token-file FILE\n")
    listener.serve()
