"""Options shared by several commands. `flags.py` parses their values."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from localllm.sampling import PARAMETER_HELP, THINK_HELP

# Layout of `--help`: options in panels, such as Sampling and Loading, as plain text.


class Panel(StrEnum):
    """Headings of option groups, in the order in which help pages show them."""

    OPTIONS = "Options"
    NETWORK = "Network"
    LOAD_TEST = "Load test"
    MODEL = "Model"
    PROMPT = "Prompt"
    SAMPLING = "Sampling"
    OUTPUT = "Output"
    CONSTRAINED = "Constrained output"
    LOADING = "Loading"
    SPECULATION = "Speculation"
    ADVANCED = "Advanced"


def group_options(params: Iterable[Any]) -> dict[Panel, list[Any]]:
    """Options of a command by panel, without empty panels; options without a panel are under Panel.OPTIONS."""
    groups: dict[Panel, list[Any]] = {panel: [] for panel in Panel}
    for param in params:
        if param.param_type_name == "option" and not param.hidden:
            groups[Panel(getattr(param, "rich_help_panel", None) or Panel.OPTIONS)].append(param)
    return {panel: group for panel, group in groups.items() if group}


class PanelCommand(TyperCommand):
    """Command whose help page groups options by `rich_help_panel`, which Typer ignores without Rich markup."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups = {
            panel: [record for option in group if (record := option.get_help_record(ctx))]
            for panel, group in group_options(self.get_params(ctx)).items()
        }
        width = max(len(name) for records in groups.values() for name, _ in records)
        for panel, records in groups.items():
            with formatter.section(panel.value):
                formatter.write_dl([(name.ljust(width), text) for name, text in records])  # one column for all


ModelName = Annotated[str, typer.Argument(metavar="MODEL", hidden=True)]  # the commands' own texts explain it


def option(*names: str, text: str, metavar: str, panel: Panel | None = None) -> Any:
    """Option with a value, whose default comes from the model or the settings."""
    return typer.Option(*names, help=text, metavar=metavar, show_default=False, rich_help_panel=panel)


def switch(name: str, *, text: str, panel: Panel | None = None) -> Any:
    """Boolean option without a `--no-` form."""
    return typer.Option(name, help=text, show_default=False, rich_help_panel=panel)


Json = Annotated[bool, switch("--json", text="Print one JSON object.", panel=Panel.OUTPUT)]
JsonEvents = Annotated[bool, switch("--json", text="Print progress events as JSON lines.", panel=Panel.OUTPUT)]
JsonList = Annotated[bool, switch("--json", text="Print a JSON array.", panel=Panel.OUTPUT)]

Device = Annotated[
    str | None, option(text="Device to run on: auto, cpu, cuda or cuda:N.", metavar="DEVICE", panel=Panel.LOADING)
]
DType = Annotated[
    str | None,
    option(
        "--dtype",
        text="Data type of the weights: auto, float32, bfloat16 or float16.",
        metavar="DTYPE",
        panel=Panel.LOADING,
    ),
]
KVDType = Annotated[
    str | None,
    option("--kv-dtype", text="Data type of the KV cache: auto, int8 or fp8.", metavar="KV", panel=Panel.LOADING),
]
Activations = Annotated[
    str | None,
    option(
        "--activations",
        text="Bits of activations multiplied with packed weights on a CPU: auto, 24, 16 or 8.",
        metavar="BITS",
        panel=Panel.LOADING,
    ),
]
Context = Annotated[
    int | None, option(text="Context length: prompt and answer, in tokens.", metavar="TOKENS", panel=Panel.LOADING)
]

Server = Annotated[
    str | None,
    option(
        text="Use this server, which loads the model if needed: HOST:PORT or a URL.",
        metavar="URL",
        panel=Panel.MODEL,
    ),
]

RunningServer = Annotated[
    str | None, option("--server", text="Server to connect to: HOST:PORT or a URL.", metavar="URL")
]

Quant = Annotated[
    str | None,
    option(
        "--quant",
        text="Quantize the weights to int8 or int4; cached after the first use.",
        metavar="QUANT",
        panel=Panel.MODEL,
    ),
]
DraftModel = Annotated[
    str | None,
    option(
        "--draft-model",
        text="Draft model for speculative decoding: a small one of the same family.",
        metavar="MODEL",
        panel=Panel.SPECULATION,
    ),
]
ArtefactQuant = Annotated[
    str | None,
    option(
        "--quant",
        text="Select the cached int8 or int4 quantization of the model.",
        metavar="QUANT",
        panel=Panel.MODEL,
    ),
]

Draft = Annotated[
    bool | None,
    typer.Option(
        "--draft/--no-draft",
        help="Report on stderr what speculative decoding saves, or turn it off.",
        show_default=False,
        rich_help_panel=Panel.SPECULATION,
    ),
]
Deterministic = Annotated[
    bool,
    switch(
        "--deterministic", text="Give the same output for any batching and prompt chunking.", panel=Panel.ADVANCED
    ),
]

Think = Annotated[
    bool | None,
    typer.Option("--think/--no-think", help=THINK_HELP, show_default=False, rich_help_panel=Panel.PROMPT),
]
Tools = Annotated[
    str | None,
    option(
        "--tools",
        text="JSON file of functions that the model may call; - is stdin.",
        metavar="FILE",
        panel=Panel.PROMPT,
    ),
]
TemplateArgs = Annotated[
    list[str] | None,
    option(
        "--template-arg",
        text="Chat template variable; VALUE is JSON or text. Repeatable.",
        metavar="NAME=VALUE",
        panel=Panel.PROMPT,
    ),
]

Schema = Annotated[
    str | None,
    option(text="Constrain the answer to a JSON schema; - is stdin.", metavar="FILE", panel=Panel.CONSTRAINED),
]
JsonObject = Annotated[
    bool, switch("--json-object", text="Constrain the answer to a JSON object.", panel=Panel.CONSTRAINED)
]
Regex = Annotated[
    str | None,
    option(
        text="Constrain the answer to a full match of this expression.", metavar="REGEX", panel=Panel.CONSTRAINED
    ),
]
GrammarFile = Annotated[
    str | None,
    option(
        "--grammar",
        text="Constrain the answer to a Lark or GBNF grammar; - is stdin.",
        metavar="FILE",
        panel=Panel.CONSTRAINED,
    ),
]
Choice = Annotated[
    str | None,
    option(
        text="Constrain the answer to one of these; a JSON array works too.",
        metavar="A,B,C",
        panel=Panel.CONSTRAINED,
    ),
]

Temperature = Annotated[
    float | None, option(text=PARAMETER_HELP["temperature"], metavar="X", panel=Panel.SAMPLING)
]
TopK = Annotated[int | None, option(text=PARAMETER_HELP["top_k"], metavar="K", panel=Panel.SAMPLING)]
TopP = Annotated[float | None, option(text=PARAMETER_HELP["top_p"], metavar="P", panel=Panel.SAMPLING)]
MinP = Annotated[float | None, option(text=PARAMETER_HELP["min_p"], metavar="P", panel=Panel.SAMPLING)]
RepetitionPenalty = Annotated[
    float | None, option(text=PARAMETER_HELP["repetition_penalty"], metavar="X", panel=Panel.SAMPLING)
]
RepeatLastN = Annotated[
    int | None, option(text=PARAMETER_HELP["repeat_last_n"], metavar="N", panel=Panel.SAMPLING)
]
PresencePenalty = Annotated[
    float | None, option(text=PARAMETER_HELP["presence_penalty"], metavar="X", panel=Panel.SAMPLING)
]
FrequencyPenalty = Annotated[
    float | None, option(text=PARAMETER_HELP["frequency_penalty"], metavar="X", panel=Panel.SAMPLING)
]
LogitBias = Annotated[
    list[str] | None,
    option(text=PARAMETER_HELP["logit_bias"], metavar="ID=BIAS", panel=Panel.SAMPLING),
]
Seed = Annotated[int | None, option(text=PARAMETER_HELP["seed"], metavar="N", panel=Panel.SAMPLING)]

MaxTokens = Annotated[int | None, option(text=PARAMETER_HELP["max_tokens"], metavar="N", panel=Panel.SAMPLING)]
Stop = Annotated[list[str] | None, option(text=PARAMETER_HELP["stop"], metavar="TEXT", panel=Panel.SAMPLING)]
StopIds = Annotated[
    list[int] | None, option("--stop-id", text=PARAMETER_HELP["stop_ids"], metavar="ID", panel=Panel.SAMPLING)
]
IgnoreEos = Annotated[bool | None, switch("--ignore-eos", text=PARAMETER_HELP["ignore_eos"], panel=Panel.SAMPLING)]

Logprobs = Annotated[
    int | None,
    option(
        text="With --json: log probabilities of each token and its top N alternatives.",
        metavar="N",
        panel=Panel.ADVANCED,
    ),
]
PromptLogprobs = Annotated[
    int | None,
    option(
        text="With --json: log probabilities of prompt tokens and their top N alternatives.",
        metavar="N",
        panel=Panel.ADVANCED,
    ),
]
