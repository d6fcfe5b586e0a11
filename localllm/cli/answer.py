"""One answer to one prompt: as text while it comes, or as one JSON object at its end."""

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli import io
from localllm.cli.report import metrics_block
from localllm.conversation.chat import length_limit, reached_max_tokens
from localllm.errors import StoppedByLength, UsageError
from localllm.protocol.model import Model
from localllm.request import (
    SEED_BITS,
    ChatRequest,
    EventType,
    FinishReason,
    GenerationEvent,
    SamplingParams,
    TokenLogprob,
    ToolCall,
)
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.receipts.receipt import Receipt
import os
import sys
from contextlib import suppress

from localllm.cli.io import note, supports_redraw

# What `--draft` shows of guesses: a line below the answer while it comes, gone at its end, and one line then.
#
# Terminals differ in where the cursor is kept behind a character in the last column, and some would write the
# next one over it: so nothing is shown while an answer has just filled a line.
# Down a line and up again, in the same column, so that there is one below; the cursor kept; that line, emptied.
CLEAR_LINE_BELOW, RESTORE_CURSOR = "\x1bD\x1bM\x1b7\x1b[1E\x1b[2K", "\x1b8"


class DraftStatusLine:
    def __init__(self) -> None:
        self.redraws = supports_redraw(sys.stderr)
        self.draft_tokens = self.accepted_tokens = self.tokens = 0
        self.shown = False
        self.width = os.get_terminal_size(sys.stderr.fileno()).columns if self.redraws else 0
        self.column = 0  # that the answer's next character comes to; the width: its last one filled the line
        self.event_type = EventType.CONTENT

    def add_event(self, event: GenerationEvent) -> None:
        self.tokens += len(event.token_ids)
        self.draft_tokens += event.drafted
        self.accepted_tokens += event.accepted
        if self.redraws:
            if event.kind is not self.event_type or event.tool_call:
                self.column = 0  # thoughts and calls end their lines
            self.event_type = event.kind
            self.column = cursor_column_after(event.text, self.column, self.width)

    def show(self) -> None:
        if self.redraws and self.column < self.width:
            self._put(f"{CLEAR_LINE_BELOW}{self.text()}{RESTORE_CURSOR}")
            self.shown = True

    def hide(self) -> None:
        """Before anything else is written."""
        if self.shown:
            self._put(CLEAR_LINE_BELOW + RESTORE_CURSOR)
            self.shown = False

    def finish(self) -> None:
        self.hide()
        note(self.text())

    def text(self) -> str:
        steps = self.tokens - self.accepted_tokens
        each = f"{self.tokens / steps:.2f}" if steps else "no"
        return f"draft: {self.draft_tokens} drafted, {self.accepted_tokens} accepted, {each} tokens/step"

    def _put(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


def cursor_column_after(text: str, column: int, width: int) -> int:
    """Where the cursor of a terminal of so many columns stands behind a text that begins at `column`."""
    from rich.cells import get_character_cell_size  # a pipe need not wait for it

    for character in text:
        if character == "\n":
            column = 0
        elif character == "\t":
            column = min(column // 8 * 8 + 8, width - 1)
        else:
            cells = get_character_cell_size(character)
            column = cells if cells and column + cells > width else column + cells
    return column


@dataclass(frozen=True)
class AnswerOptions:
    """What to show of an answer, and what to make of one that was cut."""

    raw: bool
    as_json: bool
    verbose: bool
    fail_on_length: bool
    receipt: Path | None = None  # where to write it
    drafts: bool = False


def print_answer(llm: Model, chat: ChatRequest, options: AnswerOptions, out: io.StdoutWriter) -> None:
    """Write the answer to `out`, and what the model thinks to stderr.

    Raises StoppedByLength where a limit cut it and `options` calls that a failure, OutputInvalid where it does not
    match its grammar, and LocalLLMError where the engine gave up.
    """
    events = []
    params = chat.params or llm.default_params
    if params.seed is None and (options.as_json or options.receipt):
        import secrets

        # Drawn here, so that drafts follow it, too: the receipt's seed would otherwise give another text.
        params = replace(params, seed=secrets.randbits(SEED_BITS))
    request = llm.prepare(replace(chat, params=params))
    with closing(llm.submit(request)) as stream:
        shown, drafts = AnswerPrinter(out), DraftStatusLine() if options.drafts else None
        try:
            for event in stream:
                events.append(event)
                if drafts:
                    drafts.add_event(event)
                    drafts.hide()
                if not options.as_json:
                    shown.write(event)
                if drafts:
                    drafts.show()
        finally:
            if drafts:
                drafts.hide()
            shown.finish()
            if drafts:
                drafts.finish()
    last = events[-1]
    if last.metrics:
        llm.record(last.metrics, Settings.from_environment().home, io.note)
    if options.as_json or options.receipt:
        from localllm.cli.replay import (  # 0.2 s that a text need not wait for
            build_receipt,
            collect_answer,
            write_receipt,
        )

        receipt = build_receipt(llm, chat, request, collect_answer(events), last.seed)
        if options.as_json:
            content = _answer_json(llm, events, receipt, params)
            out.write(json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")
        if options.receipt:
            write_receipt(options.receipt, receipt)
    if options.verbose and last.metrics:
        io.note(metrics_block(last.metrics, last.seed))
    if last.finish_reason == FinishReason.LENGTH:
        tokens = sum(len(event.token_ids) for event in events)
        limit, remedy = length_limit(llm, params, tokens, flag="--max-tokens")
        if options.fail_on_length:
            raise StoppedByLength(f"the answer was cut by {limit}", remedy)
        if options.verbose or out.terminal or params.grammar or not reached_max_tokens(params, tokens):
            io.note(f"note: the answer was cut by {limit}; {remedy}")
    if params.grammar:
        from localllm.text.grammar.result import check_content  # other answers need not wait for its libraries

        check_content(params.grammar, "".join(event.text for event in events if event.kind is EventType.CONTENT))


class AnswerPrinter:
    """Shows the parts of an answer as they come: content on stdout, thoughts and tool calls on stderr."""

    def __init__(self, out: io.StdoutWriter):
        self.out = out
        self.reasoning = io.ReasoningWriter()

    def write(self, event: GenerationEvent) -> None:
        if event.kind is EventType.REASONING:
            self.reasoning.write(event.text)
        elif event.text or event.tool_call:
            self.reasoning.finish()
            self.out.write(event.text)
        if event.tool_call:
            self.out.finish()
            io.note(f"tool call: {event.tool_call.name} {event.tool_call.arguments}")

    def finish(self) -> None:
        self.reasoning.finish()
        self.out.finish()


def text_or_messages(
    llm: Model, text: str, system: str | None, *, raw: bool, with_tools: bool
) -> str | list[dict[str, str]]:
    """The prompt for a model: messages where it has a chat template. Raises UsageError for a system prompt or
    tools that a model without one cannot be given."""
    if raw:
        return text
    if llm.has_chat_template:
        before = [{"role": "system", "content": system}] if system else []
        return [*before, {"role": "user", "content": text}]
    if system:
        raise UsageError(f"{llm.name} has no chat template for a system prompt", "write it into the prompt")
    if with_tools:
        raise UsageError(f"{llm.name} has no chat template for tools", "leave out --tools")
    io.note(f"note: {llm.name} has no chat template, so the prompt is continued as it is (--raw says the same)")
    return text


def _answer_json(
    llm: Model, events: Sequence[GenerationEvent], receipt: "Receipt", params: SamplingParams
) -> dict[str, Any]:
    """The object of `--json`; its fields are described in docs/cli.md."""
    from localllm.receipts.receipt import to_json

    last, answer = events[-1], receipt.answer
    content = {
        "model": llm.name,
        "device": llm.device,
        "dtype": llm.dtype,
        "kv_dtype": llm.kv_dtype,
        "context": llm.context,
        "text": answer.text,
        "reasoning": answer.reasoning,
        "tool_calls": [_tool_call_json(event.tool_call) for event in events if event.tool_call],
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "seed": last.seed,
        "metrics": last.metrics.as_dict() if last.metrics else None,
        "receipt": to_json(receipt),
    }
    if params.logprobs is not None:
        content["logprobs"] = [_logprob_json(llm, entry) for event in events for entry in event.logprobs]
    if params.prompt_logprobs is not None:
        content["prompt_logprobs"] = [
            _logprob_json(llm, entry) for event in events for entry in event.prompt_logprobs
        ]
    return content


def _tool_call_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "name": call.name, "arguments": json.loads(call.arguments)}


def _logprob_json(llm: Model, entry: TokenLogprob) -> dict[str, Any]:
    def fields(token: int, value: float) -> dict[str, Any]:
        # JSON has no infinity: null is the log probability of what cannot be.
        shown = value if math.isfinite(value) else None
        return {"token_id": token, "token": llm.tokenizer.decode([token], skip_special=False), "logprob": shown}

    return fields(entry.token_id, entry.logprob) | {"top": [fields(*candidate) for candidate in entry.top]}
