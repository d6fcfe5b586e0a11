"""Options shared by several commands, and the layout of `--help`: options in panels, as plain text.

The parameters of the commands are the only declaration of arguments and flags. `tools/cli_docs.py` generates from
them `commands.json`, which `fast_start.py` and `complete.py` read, docs/cli.md and the manual.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from localllm.sampling import PARAMETER_HELP, THINK_HELP


class Panel(StrEnum):
    """Headings of option groups, in the order in which help pages show them."""

    OPTIONS = "Options"
    NETWORK = "Network"
    BACKGROUND = "Background"
    LOAD_TEST = "Load test"
    LOAD = "Load"
    ENGINE = "Engine"
    FLEET = "Several devices"
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


def option(*names: str, text: str, metavar: str, panel: Panel | None = None, choices: Sequence[str] = ()) -> Any:
    """Option with a value and no default in its help. choices: values that the Tab key offers."""
    return typer.Option(
        *names,
        help=text,
        metavar=metavar,
        show_default=False,
        rich_help_panel=panel,
        autocompletion=(lambda: list(choices)) if choices else None,
    )


def switch(name: str, *, text: str, panel: Panel | None = None) -> Any:
    """Boolean option without a `--no-` form."""
    return typer.Option(name, help=text, show_default=False, rich_help_panel=panel)


# Arguments are hidden from the list of options, because the text of each command explains them.
ModelName = Annotated[str, typer.Argument(metavar="MODEL", hidden=True)]

Json = Annotated[bool, switch("--json", text="Print one JSON object.", panel=Panel.OUTPUT)]
JsonEvents = Annotated[bool, switch("--json", text="Print progress events as JSON lines.", panel=Panel.OUTPUT)]
JsonList = Annotated[bool, switch("--json", text="Print a JSON array.", panel=Panel.OUTPUT)]

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "int8", "fp8", "k8v4", "int4")
ACTIVATION_BITS = ("auto", "24", "16", "8")
QUANTS = ("int8", "int4")

Device = Annotated[
    str | None,
    option(
        text="Device to run on: auto, cpu, cuda or cuda:N.",
        metavar="DEVICE",
        panel=Panel.LOADING,
        choices=("auto", "cpu", "cuda"),
    ),
]
DType = Annotated[
    str | None,
    option(
        "--dtype",
        text="Data type of the weights: auto, float32, bfloat16 or float16.",
        metavar="DTYPE",
        panel=Panel.LOADING,
        choices=DTYPES,
    ),
]
KVDType = Annotated[
    str | None,
    option(
        "--kv-dtype",
        text="Data type of the KV cache: auto, int8, fp8, k8v4 (keys int8, values int4) or int4.",
        metavar="KV",
        panel=Panel.LOADING,
        choices=KV_DTYPES,
    ),
]
Activations = Annotated[
    str | None,
    option(
        "--activations",
        text="Bits of activations multiplied with packed weights on a CPU: auto, 24, 16 or 8.",
        metavar="BITS",
        panel=Panel.LOADING,
        choices=ACTIVATION_BITS,
    ),
]
Context = Annotated[
    int | None, option(text="Context length: prompt and answer, in tokens.", metavar="TOKENS", panel=Panel.LOADING)
]

TensorParallel = Annotated[
    int | None,
    option(
        "--tensor-parallel",
        text="Divide each layer among N processes, on GPUs or shares of a CPU; with --workers, N per machine.",
        metavar="N",
        panel=Panel.LOADING,
    ),
]
PipelineParallel = Annotated[
    str | None,
    option(
        "--pipeline-parallel",
        text="Divide the layers among N processes, or by shares of the weights such as 24,16.",
        metavar="N",
        panel=Panel.LOADING,
    ),
]
ExpertParallel = Annotated[
    bool,
    switch(
        "--expert-parallel",
        text="With --tensor-parallel, divide MoE layers by whole experts.",
        panel=Panel.LOADING,
    ),
]
Workers = Annotated[
    str | None,
    option(
        "--workers",
        text="Divide the layers among this machine and others, which run `localllm worker`.",
        metavar="HOST:PORT,...",
        panel=Panel.LOADING,
    ),
]
TokenFile = Annotated[
    str | None,
    option(
        "--token-file",
        text="Copy of the token file of workers; default: worker-token in localllm's home.",
        metavar="FILE",
        panel=Panel.LOADING,
    ),
]
Prefill = Annotated[
    str | None,
    option(
        "--prefill",
        text="Compute prompts in N more processes, or on workers at HOST:PORT,..., so as not to delay answers.",
        metavar="N|HOST:PORT",
        panel=Panel.LOADING,
    ),
]
PrefillLink = Annotated[
    str | None,
    option(
        "--link",
        text="With --prefill HOST:PORT: bandwidth and latency to the workers, to check whether they pay off.",
        metavar="B[,L]",
        panel=Panel.LOADING,
    ),
]
Decode = Annotated[
    int | None,
    option(
        "--decode",
        text="With --prefill: number of engines that answer; 2 or more are replicas on Ray.",
        metavar="M",
        panel=Panel.LOADING,
    ),
]
KeepLayout = Annotated[
    bool,
    switch(
        "--keep-layout",
        text="Keep quantized weights on disk in the layout of CPU kernels, for faster loads.",
        panel=Panel.LOADING,
    ),
]
CacheDir = Annotated[
    str | None,
    option(
        "--cache-dir",
        text="Store computed prompts in this folder, and reuse them after a restart.",
        metavar="PATH",
        panel=Panel.LOADING,
    ),
]
CacheSize = Annotated[
    str | None,
    option(
        "--cache-size",
        text="Maximum size of the folder of --cache-dir, such as 50GB; default: 10GB.",
        metavar="SIZE",
        panel=Panel.LOADING,
    ),
]

ForceLoad = Annotated[
    bool, switch("--force", text="Load the model even if it does not fit into free memory.", panel=Panel.LOADING)
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
        choices=QUANTS,
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


def assumed_quant(panel: Panel) -> Any:
    """Return the option for the quantization of a model whose weights are not read."""
    return option(
        "--quant",
        text="Quantization to assume: int8, int4, q8_0 or q4_k_m.",
        metavar="QUANT",
        panel=panel,
        choices=("int8", "int4", "q8_0", "q4_k_m"),
    )


ArtefactQuant = Annotated[
    str | None,
    option(
        "--quant",
        text="Select the cached int8 or int4 quantization of the model.",
        metavar="QUANT",
        panel=Panel.MODEL,
        choices=QUANTS,
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
MinTokens = Annotated[int | None, option(text=PARAMETER_HELP["min_tokens"], metavar="N", panel=Panel.SAMPLING)]
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
