"""The flags that several commands share. `flags.py` has what becomes of them."""

from typing import Annotated, Any

import typer

from localllm.sampling import PARAMETER_HELP, THINK_HELP

ModelName = Annotated[str, typer.Argument(metavar="MODEL", hidden=True)]  # the commands' own texts explain it


def option(*names: str, text: str, metavar: str) -> Any:
    """A flag with a value, whose default is the model's own."""
    return typer.Option(*names, help=text, metavar=metavar, show_default=False)


def switch(name: str, *, text: str) -> Any:
    """A flag that is given or not, without a `--no-` twin."""
    return typer.Option(name, help=text, show_default=False)


Json = Annotated[bool, switch("--json", text="Print one JSON object.")]
JsonEvents = Annotated[bool, switch("--json", text="Print what happens as JSON lines.")]
JsonList = Annotated[bool, switch("--json", text="Print a JSON array.")]

Device = Annotated[str | None, option(text="auto, cpu, cuda or cuda:N.", metavar="DEVICE")]
DType = Annotated[str | None, option("--dtype", text="auto, float32, bfloat16 or float16.", metavar="DTYPE")]
KVDType = Annotated[str | None, option("--kv-dtype", text="Of keys and values: auto, int8 or fp8.", metavar="KV")]
Context = Annotated[int | None, option(text="Room for prompt and answer, in tokens.", metavar="TOKENS")]

Server = Annotated[
    str | None,
    option(text="Ask this server, which loads the model if need be: HOST:PORT or a URL.", metavar="URL"),
]

RunningServer = Annotated[str | None, option("--server", text="The server: HOST:PORT or a URL.", metavar="URL")]

Quant = Annotated[
    str | None, option("--quant", text="Run it in int8 or int4, quantized once and kept.", metavar="QUANT")
]
DraftModel = Annotated[
    str | None,
    option("--draft-model", text="A small model of the same family that guesses ahead.", metavar="MODEL"),
]
ArtefactQuant = Annotated[
    str | None, option("--quant", text="What --quant int8 or int4 has made of it.", metavar="QUANT")
]

Draft = Annotated[
    bool | None,
    typer.Option(
        "--draft/--no-draft",
        help="Show what guessed tokens save, on stderr; or guess none.",
        show_default=False,
    ),
]
Deterministic = Annotated[
    bool, switch("--deterministic", text="The same bytes whatever else runs, however prompts are cut.")
]

Think = Annotated[
    bool | None,
    typer.Option(
        "--think/--no-think",
        help=THINK_HELP,
        show_default=False,
    ),
]
Tools = Annotated[
    str | None, option("--tools", text="Functions that the model may call, as JSON; - is stdin.", metavar="FILE")
]
TemplateArgs = Annotated[
    list[str] | None,
    option(
        "--template-arg", text="Argument for the chat template, JSON or text. Repeatable.", metavar="NAME=VALUE"
    ),
]

Schema = Annotated[str | None, option(text="Answer with JSON of this JSON schema; - is stdin.", metavar="FILE")]
JsonObject = Annotated[bool, switch("--json-object", text="Answer with a JSON object.")]
Regex = Annotated[str | None, option(text="Answer with a text that this matches as a whole.", metavar="REGEX")]
GrammarFile = Annotated[
    str | None, option("--grammar", text="Answer with a text of this Lark or GBNF grammar.", metavar="FILE")
]
Choice = Annotated[str | None, option(text="Answer with one of these; or a JSON array of texts.", metavar="A,B,C")]

Temperature = Annotated[float | None, option(text=PARAMETER_HELP["temperature"], metavar="X")]
TopK = Annotated[int | None, option(text=PARAMETER_HELP["top_k"], metavar="K")]
TopP = Annotated[float | None, option(text=PARAMETER_HELP["top_p"], metavar="P")]
MinP = Annotated[float | None, option(text=PARAMETER_HELP["min_p"], metavar="P")]
RepetitionPenalty = Annotated[float | None, option(text=PARAMETER_HELP["repetition_penalty"], metavar="X")]
RepeatLastN = Annotated[int | None, option(text=PARAMETER_HELP["repeat_last_n"], metavar="N")]
PresencePenalty = Annotated[float | None, option(text=PARAMETER_HELP["presence_penalty"], metavar="X")]
FrequencyPenalty = Annotated[float | None, option(text=PARAMETER_HELP["frequency_penalty"], metavar="X")]
LogitBias = Annotated[
    list[str] | None,
    option(text=PARAMETER_HELP["logit_bias"], metavar="ID=BIAS"),
]
Seed = Annotated[int | None, option(text=PARAMETER_HELP["seed"], metavar="N")]

MaxTokens = Annotated[int | None, option(text=PARAMETER_HELP["max_tokens"], metavar="N")]
Stop = Annotated[list[str] | None, option(text=PARAMETER_HELP["stop"], metavar="TEXT")]
StopIds = Annotated[list[int] | None, option("--stop-id", text=PARAMETER_HELP["stop_ids"], metavar="ID")]
IgnoreEos = Annotated[bool | None, switch("--ignore-eos", text=PARAMETER_HELP["ignore_eos"])]

Logprobs = Annotated[
    int | None,
    option(text="With --json: log probability of each token and of N alternatives.", metavar="N"),
]
PromptLogprobs = Annotated[
    int | None, option(text="With --json: the same for the tokens of the prompt.", metavar="N")
]
