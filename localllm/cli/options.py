"""The flags that several commands share. `flags.py` has what becomes of them."""

from typing import Annotated, Any

import typer

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

Running = Annotated[str | None, option("--server", text="The server: HOST:PORT or a URL.", metavar="URL")]

Quant = Annotated[
    str | None, option("--quant", text="Run it in int8 or int4, quantized once and kept.", metavar="QUANT")
]
DraftModel = Annotated[
    str | None,
    option("--draft-model", text="A small model of the same family that guesses ahead.", metavar="MODEL"),
]
OfQuant = Annotated[
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
        help="Let the model think first, or not, if its template has a switch.",
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

Temperature = Annotated[float | None, option(text="0 takes the likeliest token; more varies more.", metavar="X")]
TopK = Annotated[int | None, option(text="Keep the K likeliest tokens; 0 keeps all.", metavar="K")]
TopP = Annotated[float | None, option(text="Keep the likeliest tokens that add up to P.", metavar="P")]
MinP = Annotated[
    float | None, option(text="Keep tokens at least P times as likely as the likeliest.", metavar="P")
]
RepetitionPenalty = Annotated[
    float | None, option(text="Make tokens seen before X times less likely; 1 is off.", metavar="X")
]
RepeatLastN = Annotated[int | None, option(text="How many last tokens that looks at; -1 is all.", metavar="N")]
PresencePenalty = Annotated[
    float | None, option(text="Subtract X from tokens already in the answer.", metavar="X")
]
FrequencyPenalty = Annotated[
    float | None, option(text="Subtract X for each time a token is in the answer.", metavar="X")
]
LogitBias = Annotated[
    list[str] | None,
    option(text="Add BIAS to the logit of token ID; -inf forbids it. Repeatable.", metavar="ID=BIAS"),
]
Seed = Annotated[int | None, option(text="Same seed, same text.", metavar="N")]

MaxTokens = Annotated[
    int | None, option(text="Most tokens of the answer; else until the context is full.", metavar="N")
]
Stop = Annotated[list[str] | None, option(text="End before this text. Repeatable.", metavar="TEXT")]
StopIds = Annotated[list[int] | None, option("--stop-id", text="End at this token. Repeatable.", metavar="ID")]
IgnoreEos = Annotated[bool | None, switch("--ignore-eos", text="Go on past the model's end tokens.")]

Logprobs = Annotated[
    int | None,
    option(text="With --json: log probability of each token and of N alternatives.", metavar="N"),
]
PromptLogprobs = Annotated[
    int | None, option(text="With --json: the same for the tokens of the prompt.", metavar="N")
]
