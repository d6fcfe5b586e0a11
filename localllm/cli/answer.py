"""One answer to one prompt: printed as text while it streams, or as one JSON object at its end."""

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli import io
from localllm.conversation.chat import length_limit, reached_max_tokens
from localllm.conversation.model import Model, Stream
from localllm.errors import StoppedByLength, UsageError
from localllm.files import explain_disk_errors, write_atomic
from localllm.formatting import format_bytes, format_columns, format_rate, format_seconds
from localllm.metrics import Metrics
from localllm.request import (
    SEED_BITS,
    ChatRequest,
    EventType,
    FinishReason,
    GenerationEvent,
    Request,
    SamplingParams,
    TokenLogprob,
    ToolCall,
)
from localllm.sampling import params_to_json
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.receipts.receipt import Receipt  # imports the Hub's library, which a text answer does not need

FLUSH_INTERVAL_S = 0.001  # seconds: tokens that arrive faster are flushed together, as each flush switches threads


@dataclass(frozen=True)
class AnswerOptions:
    """Options for printing an answer: the flags of `run` with these names."""

    raw: bool
    as_json: bool
    verbose: bool
    fail_on_length: bool
    receipt: Path | None = None  # file to write the receipt to
    draft: bool = False


def print_answer(llm: Model, chat: ChatRequest, options: AnswerOptions, out: io.StdoutWriter) -> None:
    """Write the answer to `out`, and reasoning to stderr.

    Raises StoppedByLength if a limit truncated the answer and `options.fail_on_length` is set, OutputInvalid if
    the answer does not match its grammar, and LocalLLMError if the engine failed.
    """
    params = chat.params or llm.default_params
    if params.seed is None and (options.as_json or options.receipt):
        import secrets

        # Drawn here and not by the engine, so that the sampler of draft tokens uses the seed of the receipt too.
        params = replace(params, seed=secrets.randbits(SEED_BITS))
    request = llm.prepare(replace(chat, params=params))
    events = _print_events(llm, request, options, out)
    last = events[-1]
    if last.metrics:
        llm.record(last.metrics, Settings.from_environment().home, io.note)
    if options.as_json or options.receipt:
        receipt = _build_receipt(llm, chat, request, events)
        if options.as_json:
            content = _answer_json(llm, events, receipt, params)
            out.write(json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")
        if options.receipt:
            _write_receipt(options.receipt, receipt)
    if options.verbose and last.metrics:
        io.note(format_metrics(last.metrics, last.seed))
    if last.finish_reason == FinishReason.LENGTH and last.metrics:
        limit, remedy = length_limit(llm, params, last.metrics, flag="--max-tokens")
        if options.fail_on_length:
            raise StoppedByLength(f"the answer was cut by {limit}", remedy)
        if options.verbose or out.terminal or params.grammar or not reached_max_tokens(llm, params, last.metrics):
            io.note(f"note: the answer was cut by {limit}; {remedy}")
    if params.grammar:
        from localllm.text.grammar.result import check_content  # only constrained answers need its libraries

        check_content(params.grammar, _text_of(events, EventType.CONTENT))


def _print_events(
    llm: Model, request: Request, options: AnswerOptions, out: io.StdoutWriter
) -> list[GenerationEvent]:
    """Print an answer while it streams, unless it is to be JSON, and return its events."""
    events = []
    with closing(llm.submit(request)) as stream:
        printer, drafts = AnswerPrinter(out), DraftStatusLine() if options.draft else None
        flushed_at = 0.0
        try:
            for event in stream:
                events.append(event)
                if drafts:
                    drafts.add_event(event)
                    drafts.hide()
                if not options.as_json:
                    flush = drafts is not None or not has_more_soon(stream, flushed_at)
                    printer.write(event, flush=flush)
                    flushed_at = time.perf_counter() if flush else flushed_at
                if drafts:
                    drafts.show()
        finally:
            if drafts:
                drafts.hide()
            printer.finish()
            if drafts:
                drafts.finish()
    return events


def has_more_soon(stream: Stream, flushed_at: float) -> bool:
    """Whether the next event arrives within FLUSH_INTERVAL_S after the last flush."""
    if stream.has_more:
        return True
    if (left_s := flushed_at + FLUSH_INTERVAL_S - time.perf_counter()) <= 0:
        return False
    time.sleep(left_s)
    return stream.has_more


def _text_of(events: Sequence[GenerationEvent], event_type: EventType) -> str:
    return "".join(event.text for event in events if event.kind is event_type)


class AnswerPrinter:
    """Prints an answer as it streams: content to stdout, reasoning and tool calls to stderr."""

    def __init__(self, out: io.StdoutWriter):
        self.out = out
        self.reasoning = io.ReasoningWriter()

    def write(self, event: GenerationEvent, *, flush: bool = True) -> None:
        """flush: as in `StdoutWriter.write`."""
        if event.kind is EventType.REASONING:
            self.out.flush()
            self.reasoning.write(event.text)
        else:
            if event.text or event.tool_call:
                self.reasoning.finish()
            self.out.write(event.text, flush=flush)
        if event.tool_call:
            self.out.finish()
            io.note(f"tool call: {event.tool_call.name} {event.tool_call.arguments}")

    def finish(self) -> None:
        self.reasoning.finish()
        self.out.finish()


# Moves the cursor down and up again, so that there is a line below; saves the cursor, and clears that line.
CLEAR_LINE_BELOW, RESTORE_CURSOR = "\x1bD\x1bM\x1b7\x1b[1E\x1b[2K", "\x1b8"


class DraftStatusLine:
    """Counts of draft tokens that `--draft` prints: a line below the answer while it streams, and a note at its
    end.

    It is not drawn when the answer has just filled a line: terminals differ in the column that they save for a
    cursor behind the last one, and some would overwrite the last character.
    """

    def __init__(self) -> None:
        self.redraws = io.supports_redraw(sys.stderr)
        self.draft_tokens = self.accepted_tokens = self.tokens = 0
        self.visible = False
        self.width = os.get_terminal_size(sys.stderr.fileno()).columns if self.redraws else 0
        self.column = 0  # of the answer's next character; equal to the width if the last one filled the line
        self.event_type = EventType.CONTENT

    def add_event(self, event: GenerationEvent) -> None:
        self.tokens += len(event.token_ids)
        self.draft_tokens += event.drafted
        self.accepted_tokens += event.accepted
        if self.redraws:
            if event.kind is not self.event_type or event.tool_call:
                self.column = 0  # reasoning and tool calls end their lines
            self.event_type = event.kind
            self.column = cursor_column_after(event.text, self.column, self.width)

    def show(self) -> None:
        if self.redraws and self.column < self.width:
            self._put(f"{CLEAR_LINE_BELOW}{self.text()}{RESTORE_CURSOR}")
            self.visible = True

    def hide(self) -> None:
        """Erase the line, before anything else is printed."""
        if self.visible:
            self._put(CLEAR_LINE_BELOW + RESTORE_CURSOR)
            self.visible = False

    def finish(self) -> None:
        self.hide()
        io.note(self.text())

    def text(self) -> str:
        steps = self.tokens - self.accepted_tokens
        per_step = f"{self.tokens / steps:.2f}" if steps else "no"
        return f"draft: {self.draft_tokens} drafted, {self.accepted_tokens} accepted, {per_step} tokens/step"

    def _put(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


def cursor_column_after(text: str, column: int, width: int) -> int:
    """Cursor column after printing `text` from `column` in a terminal of `width` columns."""
    from rich.cells import get_character_cell_size  # only needed on a terminal

    for character in text:
        if character == "\n":
            column = 0
        elif character == "\t":
            column = min(column // 8 * 8 + 8, width - 1)
        else:
            cells = get_character_cell_size(character)
            column = cells if cells and column + cells > width else column + cells
    return column


def format_cached(metrics: Metrics) -> str:
    """The cached tokens of a prompt, and from where."""
    disk = f", {metrics.disk_tokens} of them from disk" if metrics.disk_tokens else ""
    return f"{metrics.cached_tokens} cached{disk}"


def format_metrics(metrics: Metrics, seed: int | None) -> str:
    """Every measurement of one answer, as `--verbose` prints it; `metrics.py` defines the terms."""
    itl = "  ".join(f"p{percent} {format_seconds(metrics.itl_percentile(percent))}" for percent in (50, 95, 99))
    return format_columns(
        [
            ("load", format_seconds(metrics.load_s)),
            ("queue", format_seconds(metrics.queue_s)),
            ("prompt", f"{metrics.prompt_tokens} tokens ({format_cached(metrics)})"),
            ("prefill", f"{format_seconds(metrics.prefill_s)}  {format_rate(metrics.prefill_tokens_per_s)}"),
            ("TTFT", format_seconds(metrics.ttft_s)),
            ("output", f"{metrics.output_tokens} tokens"),
            ("ITL", itl),
            ("TPOT", format_seconds(metrics.tpot_s)),
            ("TPS", format_rate(metrics.tokens_per_s)),
            ("drafts", f"{metrics.draft_tokens} tokens ({metrics.accepted_tokens} accepted)"),
            ("tokens/step", "-" if math.isnan(metrics.tokens_per_step) else f"{metrics.tokens_per_step:.2f}"),
            ("E2E", format_seconds(metrics.e2e_s)),
            ("peak memory", format_bytes(metrics.peak_bytes)),
            ("seed", "-" if seed is None else str(seed)),
        ]
    )


def text_or_messages(
    llm: Model, text: str, system: str | None, *, raw: bool, with_tools: bool
) -> str | list[dict[str, str]]:
    """Prompt for a model: messages if it has a chat template, otherwise text. Raises UsageError for a system
    prompt or tools if it has none."""
    if raw:
        return text
    if llm.has_chat_template:
        before = [{"role": "system", "content": system}] if system else []
        return [*before, {"role": "user", "content": text}]
    if system:
        raise UsageError(f"{llm.name} has no chat template for a system prompt", "put it into the prompt")
    if with_tools:
        raise UsageError(f"{llm.name} has no chat template for tools", "leave out --tools")
    io.note(f"note: {llm.name} has no chat template, so it continues the prompt as plain text, as with --raw")
    return text


def _answer_json(
    llm: Model, events: Sequence[GenerationEvent], receipt: "Receipt", params: SamplingParams
) -> dict[str, Any]:
    """Object that `--json` prints; docs/cli.md describes its fields."""
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
        logprob = value if math.isfinite(value) else None  # JSON has no infinity
        return {"token_id": token, "token": llm.tokenizer.decode([token], skip_special=False), "logprob": logprob}

    return fields(entry.token_id, entry.logprob) | {"top": [fields(*candidate) for candidate in entry.top]}


def _build_receipt(
    llm: Model, chat: ChatRequest, request: Request, events: Sequence[GenerationEvent]
) -> "Receipt":
    """Receipt of a finished answer, from which `localllm replay` recomputes it."""
    from localllm.receipts.receipt import Answer, Question, Receipt

    last = events[-1]
    prompt: Any = chat.prompt
    question = Question(
        prompt if isinstance(prompt, str) else tuple(prompt),
        tuple(dict(tool) for tool in request.tools) or None,
        dict(chat.template_arguments),
        request.prompt_ids,
        params_to_json(replace(request.params, seed=last.seed)),
    )
    answer = Answer(
        token_ids=tuple(token for event in events for token in event.token_ids),
        text=_text_of(events, EventType.CONTENT),
        reasoning=_text_of(events, EventType.REASONING),
        finish_reason=str(last.finish_reason),
    )
    return Receipt(*llm.provenance(), llm.kernels(), question, answer)


def _write_receipt(path: Path, receipt: "Receipt") -> None:
    """Write a receipt, atomically unless `path` is a pipe or a device. Only this user can read the file, because
    it contains the prompt. Raises the errors of `explain_disk_errors`."""
    from localllm.receipts.receipt import to_text

    with explain_disk_errors(path.parent):
        if path.exists() and not path.is_file():
            path.write_text(to_text(receipt), encoding="utf-8")
        else:
            write_atomic(path, to_text(receipt))
