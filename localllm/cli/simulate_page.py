"""The page of `simulate --ui`: its options, which are the command's own, its presets, and its server.

The page has a field for each option of the command; a new one appears by itself. CONTROLS lists those that have a
slider, in the order of the page; all others are behind "More options".
"""

import os
import shlex
import sys
import webbrowser
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlencode

import typer
from typer.main import get_command

from localllm.cli.app import LazyCommands, app, format_usage_error
from localllm.cli.io import StdoutWriter, is_terminal
from localllm.errors import UsageError
from localllm.hardware.catalog import device_names

COMMAND = "simulate"
# Files of the server's machine, other servers, other forms of output, and what takes minutes.
LEFT_OUT = {
    "--trace",
    "--prices",
    "--speed",
    "--check",
    "--plot",
    "--gantt",
    "--json",
    "--ui",
    "--port",
    "--quiet",
    "--sensitivity",
    "-h",
}
H100 = {"--device": "H100 SXM"}
MODEL_8B, MODEL_70B = "llama3.1:8b-bf16", "llama3.1:70b-bf16"


@dataclass(frozen=True)
class Control:
    """Presentation of an option on the page."""

    label: str
    low: float | None = None
    high: float | None = None
    step: float = 1
    logarithmic: bool = False
    needs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Options of which one must be given, with one of these values if there are any."""

    excludes: tuple[str, ...] = ()


CONTROLS: Mapping[str, Control] = {
    "--device": Control("Device"),
    "--rate": Control("Requests per second", 0.1, 200, 0.1, logarithmic=True, excludes=("--users",)),
    "--users": Control("Users instead, who wait for answers", 1, 1000, logarithmic=True, excludes=("--rate",)),
    "--think": Control("Thinking between requests", needs=(("--users", ()), ("--turns", ()))),
    "--requests": Control("Number of requests", 50, 5000, logarithmic=True),
    "--prompt": Control("Prompt tokens, median~spread"),
    "--output": Control("Answer tokens, median~spread"),
    "--turns": Control("Turns of a conversation", 1, 20),
    "--system": Control("Shared system prompt, tokens", 0, 8000, 100),
    "--batching": Control("Batching"),
    "--batch-size": Control("Requests of a batch", 1, 128, needs=(("--batching", ("static", "dynamic")),)),
    "--max-wait": Control("Longest wait of a batch", needs=(("--batching", ("dynamic",)),)),
    "--chunk": Control("Chunked prefill: tokens of a step", 64, 131072, logarithmic=True),
    "--replicas": Control("Replicas of the engine"),
    "--no-prefix-cache": Control("Prefix caching"),
    "--drafts": Control("Speculation: draft tokens", 0, 8),
    "--acceptance": Control("Their acceptance", 0, 1, 0.05, needs=(("--drafts", ()),)),
    "--quant": Control("Weight format"),
    "--kv-dtype": Control("Keys and values"),
    "--context": Control("Context, tokens", 1024, 131072, logarithmic=True),
    "--slo": Control("Objectives, for goodput"),
    "--no-admission": Control("Admission control"),
    "--attainment": Control("Share within the objectives", 0.5, 1, 0.01, needs=(("--slo", ()),)),
    "--burstiness": Control("Burstiness of arrivals", needs=(("--rate", ()),)),
}
MAIN_OPTIONS = tuple(CONTROLS)[: tuple(CONTROLS).index("--no-admission")]


@dataclass(frozen=True)
class Preset:
    """An experiment: options, and a sentence on what to see."""

    title: str
    see: str
    model: str
    options: Mapping[str, str | float | bool]


PRESETS = (
    Preset(
        "Static batching collapses",
        "A batch ends with its longest answer, while the slots of shorter ones stay empty: the queue only grows.",
        MODEL_8B,
        H100 | {"--context": 8192, "--rate": 10, "--batching": "static", "--batch-size": 8},
    ),
    Preset(
        "Continuous batching",
        "The same requests, but each one starts as soon as another ends: almost none waits.",
        MODEL_8B,
        H100 | {"--context": 8192, "--rate": 10},
    ),
    Preset(
        "Prefix caching",
        "Every turn repeats its conversation, and most of it is in the cache; switch prefix caching off and TTFT "
        "is several times as long.",
        MODEL_8B,
        H100 | {"--users": 100, "--think": "5s", "--turns": 5, "--system": 2000},
    ),
    Preset(
        "Speculation",
        "Few requests run, so a step has arithmetic to spare for verifying 4 draft tokens, and TPOT is a third of "
        "what it is without; set them to 0 to compare.",
        MODEL_8B,
        H100 | {"--rate": 2, "--drafts": 4},
    ),
    Preset(
        "More GPUs",
        "Two GPUs, each with the whole model, share 60 requests per second that one cannot serve: remove one and "
        "the queue grows.",
        MODEL_8B,
        H100 | {"--rate": 60, "--replicas": "2"},
    ),
    Preset(
        "Breaking point",
        "At 60 requests per second more arrive than are answered: queue and TTFT grow for as long as they arrive. "
        "Below the numbers stands the highest rate that would be served.",
        MODEL_8B,
        H100 | {"--rate": 60, "--requests": 500, "--slo": "ttft=500ms,tpot=50ms"},
    ),
    Preset(
        "The 70B wall",
        "In 16 bits the weights do not fit into 80 GB, and in INT8 they leave so little for keys and values that "
        "requests wait for blocks; INT4 weights or FP8 keys and values make space.",
        MODEL_70B,
        H100 | {"--rate": 2, "--quant": "int8"},
    ),
)


def describe_page() -> dict[str, Any]:
    """Return the options and presets as JSON."""
    described = {entry["flag"]: entry for entry in map(describe_option, page_options())}
    ordered = [described.pop(flag) for flag in CONTROLS if flag in described]
    return {"options": [*ordered, *described.values()], "presets": [asdict(preset) for preset in PRESETS]}


def page_options() -> list[Any]:
    """Return the parameters of the command that the page may set."""
    parameters = LazyCommands()[COMMAND].params
    return [p for p in parameters if p.param_type_name == "option" and not set(p.opts) & LEFT_OUT]


def describe_option(option: Any) -> dict[str, Any]:
    flag = option.opts[0]
    name = flag.removeprefix("--no-").removeprefix("--")
    control = CONTROLS.get(flag, Control(name.replace("-", " ").capitalize()))
    choices = [item.value for item in option.shell_complete(typer.Context(get_command(app)), "")]
    if flag == "--device":
        choices = ["auto", "cpu", "cuda", *device_names()]
    number = getattr(option.type_descriptor, "annotation", None) in (int, float, list[int], list[float])
    return {
        "flag": flag,
        "help": option.help,
        "metavar": None if option.is_flag else option.metavar,
        "type": "switch" if option.is_flag else "choice" if choices else "number" if number else "text",
        "choices": choices,
        "is_main": flag in MAIN_OPTIONS,
        **asdict(control),
    }


def parse_options(model: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the flags of a command line with these options, by the names of the parameters, and its arguments.

    Raises UsageError as the command does, and for an option that the page has not.
    """
    allowed = {flag: option for option in page_options() for flag in option.opts}
    arguments = [model]
    for flag, value in options.items():
        if flag not in allowed:
            raise UsageError(f"{flag} is not an option of the page", "GET /simulate/options lists them")
        if not allowed[flag].is_flag:
            arguments.append(f"{flag}={value}")
        elif value is True:
            arguments.append(flag)
        elif value is not False:
            raise UsageError(f"{flag} is {value!r}", "send true or false")
    if model.startswith("-"):
        raise UsageError(f"{model!r} is not a name of a model", "send one of GET /simulate/options")
    command = LazyCommands()[COMMAND]
    try:
        context = command.make_context(f"localllm {COMMAND}", list(arguments))
    except typer.Exit:
        raise UsageError("these options do not start a simulation", "leave --help out") from None
    except typer.TyperException as error:
        raise UsageError(format_usage_error(error, ["simulate"])) from error
    return dict(context.params), arguments


def shell_line(model: str, options: Mapping[str, Any]) -> str:
    """Return the command line that makes the same simulation."""
    words = ["localllm", COMMAND, model]
    for flag, value in options.items():
        words += [flag] if value is True else [] if value is False else [flag, str(value)]
    return shlex.join(words)


def given_options(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a command line that the page can show, without those at their defaults. Raises
    UsageError for one that it cannot show."""
    command = LazyCommands()[COMMAND]
    context, allowed = typer.Context(command), {option.name: option for option in page_options()}
    shown: dict[str, Any] = {}
    for option in command.params:
        value = flags.get(option.name)
        if option.param_type_name != "option" or option.name in ("ui", "port", "quiet", "help"):
            continue
        if value in (None, False) or value == option.get_default(context):
            continue
        if option.name not in allowed:
            raise UsageError(f"{option.opts[0]} has no effect with --ui", "leave it out")
        shown[option.opts[0]] = value
    return shown


def open_page(model: str | None, flags: Mapping[str, Any], port: int | None, out: StdoutWriter) -> None:
    """Serve the page on this machine alone until Ctrl-C, print its address, and open it in a browser if there is
    one."""
    options = given_options(flags)
    from localllm.server.app import create_simulation_app
    from localllm.server.serve import Server, bind

    fragment = urlencode({**({"model": model} if model else {}), **options})
    with closing(bind("127.0.0.1", port or 0)) as listener:
        application = create_simulation_app({model: model} if model else {})

        def show_address(message: str) -> None:
            url = message.removeprefix("listening on ") + "/simulate" + (f"#{fragment}" if fragment else "")
            out.write(url + "\n")
            if is_terminal(sys.stdout) and has_browser():
                webbrowser.open(url)

        Server(application, listener, show_address, application.state.simulations.close).run()


def has_browser() -> bool:
    """Whether a graphical browser may open; those in a terminal would hide the address."""
    return sys.platform in ("darwin", "win32") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
