"""`localllm template`: print the prompt that the chat template renders, and its tokens."""

import json
from contextlib import closing
from typing import Annotated, Any, NamedTuple

import typer

from localllm.checkpoint.gguf.header import read_gguf
from localllm.cli import io, options
from localllm.cli.execute_run import parse_template_args
from localllm.errors import UsageError
from localllm.files import TOKENIZER_FILES, expand_path
from localllm.formatting import format_table
from localllm.hub.gguf import is_gguf, models_in_folder
from localllm.hub.names import is_path
from localllm.hub.resolve import resolve_model
from localllm.text.control import RenderedChat
from localllm.text.detokenizer import Detokenizer
from localllm.text.messages import normalize_message
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer


class Token(NamedTuple):
    """One token of the prompt. The joined texts are the decoded prompt; a character of several tokens is in the
    text of the last."""

    id: int
    text: str
    kind: str  # `control`, `added` (in the tokenizer's list of added tokens) or `text`


def template(
    model: options.ModelName,
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", hidden=True)] = None,
    messages: Annotated[
        str | None,
        options.option(
            "--messages", text="Conversation as JSON; - is stdin.", metavar="FILE", panel=options.Panel.PROMPT
        ),
    ] = None,
    system: Annotated[
        str | None, options.option(text="System prompt.", metavar="TEXT", panel=options.Panel.PROMPT)
    ] = None,
    think: options.Think = None,
    tools: options.Tools = None,
    template_arg: options.TemplateArgs = None,
    no_generation_prompt: Annotated[
        bool,
        options.switch(
            "--no-generation-prompt",
            text="Leave out the header that begins the assistant's answer.",
            panel=options.Panel.PROMPT,
        ),
    ] = False,
    ids: Annotated[
        bool | None,
        typer.Option(
            "--ids/--no-ids",
            help="List the tokens after the prompt; default: only in a terminal.",
            show_default=False,
            rich_help_panel=options.Panel.OUTPUT,
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Print the prompt that the chat template renders.

    MODEL is a name of `localllm list --all`, ORG/REPO, or the path of a folder or a GGUF file. The conversation is
    PROMPT, as in `localllm run`, or the file of --messages: a list of messages, or an object with `messages` and
    optionally `tools`. In a terminal, the tokens follow. Reads no weights.
    """
    functions = io.read_tools(tools) if tools else None
    if messages is None:
        system_message = [{"role": "system", "content": system}] if system else []
        conversation = [
            *system_message,
            {"role": "user", "content": io.read_prompt(prompt or [], raw=False, command="template")},
        ]
    elif prompt or system:
        raise UsageError("--messages cannot be combined with a prompt or --system", "put all into the messages")
    elif messages == tools == "-":
        raise UsageError("--messages and --tools cannot both be stdin", "put one into a file")
    else:
        conversation, file_tools = _read_conversation(messages)
        functions = file_tools if functions is None else functions
    tokenizer = _load_tokenizer(model)
    out = io.StdoutWriter()
    with closing(ChatTemplate.from_tokenizer(tokenizer)) as chat_template:
        arguments = parse_template_args(template_arg or [])
        chat = chat_template.render(
            conversation,
            tools=functions,
            add_generation_prompt=not no_generation_prompt,
            arguments=chat_template.template_arguments(arguments, think=think, with_tools=functions is not None),
        )
    tokens = _tokenize(tokenizer, chat)
    if as_json:
        content = {
            "prompt": chat.text,
            "token_ids": [token.id for token in tokens],
            "tokens": [token._asdict() for token in tokens],
        }
        out.write(json.dumps(content, ensure_ascii=False) + "\n")
        return
    out.write(chat.text)
    if ids or (ids is None and out.terminal):
        out.write("\n\n" if not chat.text.endswith("\n") else "\n")
        out.write(_token_table(tokens) + "\n")
    out.finish()


def _read_conversation(file: str) -> tuple[list[Any], list[dict[str, Any]] | None]:
    """Messages, and tools if the file has any. Raises UsageError if it is not a conversation."""
    content = io.read_json(file)
    tools = content.get("tools") if isinstance(content, dict) else None
    messages = content.get("messages") if isinstance(content, dict) else content
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) for message in messages)
    ):
        raise UsageError(
            f"{io.display_name(file)} is not a list of messages", 'write [{"role": "user", "content": "Hello"}]'
        )
    return [normalize_message(message) for message in messages], None if tools is None else io.check_tools(
        tools, file
    )


def _load_tokenizer(model: str) -> Tokenizer:
    """Tokenizer of a model. A folder or a GGUF file that has a tokenizer but no weights is enough."""
    path = expand_path(model)
    is_tokenizer_folder = any((path / name).is_file() for name in TOKENIZER_FILES) and not models_in_folder(path)
    if not (is_path(model) and path.exists() and (is_gguf(path) or is_tokenizer_folder)):
        path = resolve_model(model).path
    return Tokenizer.from_folder(path) if path.is_dir() else Tokenizer.from_gguf(read_gguf(path).metadata, path)


def _tokenize(tokenizer: Tokenizer, chat: RenderedChat) -> list[Token]:
    detokenizer = Detokenizer(tokenizer, shown_ids=tokenizer.special_ids)
    ids = tokenizer.encode_chat(chat)
    texts = [detokenizer.push([token_id]) for token_id in ids]
    if texts:
        texts[-1] += detokenizer.finish()

    def token_type(text: str) -> str:
        if text in tokenizer.control_tokens:
            return "control"
        return "added" if text in tokenizer.added_tokens else "text"

    return [Token(token_id, text, token_type(text)) for token_id, text in zip(ids, texts, strict=True)]


def _token_table(tokens: list[Token]) -> str:
    rows = [
        (str(index), str(token.id), token.kind, json.dumps(token.text, ensure_ascii=False))
        for index, token in enumerate(tokens)
    ]
    return format_table([("INDEX", "ID", "TYPE", "TEXT"), *rows])
