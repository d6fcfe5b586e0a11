"""Wraps the grammar of an answer's content in the grammar of the whole answer, so that a model can reason first.

The structure follows from the model's markup (`text/output`) and the end of its prompt:

    the prompt opened reasoning           reasoning, its end, the content
    the prompt closed it                  the content
    neither                               the content, with optional reasoning first
    the model writes messages             any messages to itself, then one to the user: the content

Reasoning contains no control tokens, and no end token ends it. Up to two spaces or line breaks may separate it
from the content; parsers drop those.
"""

import json
from collections.abc import Callable

from localllm.text.grammar.source import BODY_RULE
from localllm.text.output.channels import CHANNEL, MESSAGE, START, ChannelFormat
from localllm.text.output.formats import HARMONY, OutputFormat
from localllm.text.output.tagged import ReasoningFormat

RULES = f"""
body: @{BODY_RULE}
gap: /[ \\n]{{0,2}}/
ANY: /(?s:.*)/
"""
REASONING_HEADERS = ((CHANNEL, "analysis", MESSAGE), (" to=self", MESSAGE))  # of HARMONY, and of the others
ANSWER_HEADERS = ((CHANNEL, "final", MESSAGE), (MESSAGE,))


class ReasoningGrammar:
    """Builds the Lark for one model. `token_of`: returns the control token with this text, if there is one."""

    def __init__(self, output: OutputFormat, token_of: Callable[[str], int | None]):
        self._output = output
        self._token_of = token_of

    def for_prompt(self, prompt: str, *, has_markup: bool = False) -> str | None:
        """Return the rules for the answer to a chat prompt that ends like this; None if they are the content
        alone.

        has_markup: the content has its own leading markup, which must not be skipped.
        """
        if self._output.channels:
            return self._messages(self._output.channels, has_markup=has_markup)
        if self._output.reasoning is None:
            return None
        return self._tagged(
            self._output.reasoning, prompt.rstrip(), "body" if has_markup else self.content_rule("body")
        )

    def content_rule(self, rule: str) -> str:
        """Return the content with control tokens that may surround it."""
        markup = self._output.reasoning.content_markup if self._output.reasoning else ()
        *before, after = (self._spelled(token) for token in markup) if markup else ("",)
        parts = [*(f"{token}? " for token in before), rule, f" {after}?"]
        return "".join(parts) if after.startswith("<") else rule

    def _messages(self, form: ChannelFormat, *, has_markup: bool) -> str:
        kind = int(form != HARMONY)
        end, start = self._spelled(form.message_ends[0]), self._spelled(START)
        again = f'{self._spelled(*REASONING_HEADERS[kind])} thought {start} "assistant"'
        head = "" if has_markup else self._spelled(*ANSWER_HEADERS[kind])
        return f"start: ({again})* {head} body\n{self._thought(form.message_ends[0], end)}"

    def _tagged(self, form: ReasoningFormat, prompt: str, answer: str) -> str | None:
        begin, end = self._spelled(*self._parts(form)), self._spelled(form.end)
        if prompt.endswith(form.begin):
            answer = f"thought gap {answer}"
        elif not prompt.endswith(form.end) and begin.startswith("<"):  # plain text could also begin the content
            answer = f"({begin} thought gap)? {answer}"
        return None if answer == "body" else f"start: {answer}\n{self._thought(form.end, end)}"

    def _parts(self, form: ReasoningFormat) -> tuple[str, ...]:
        """Return the parts of the opening markup: a leading control token, then the rest."""
        first = next((token for token in form.inner_markup if form.begin.startswith(token)), form.begin)
        return tuple(filter(None, (first, form.begin.removeprefix(first))))

    def _thought(self, end: str, spelled: str) -> str:
        """Return the rules for reasoning and its end, a control token or a text. The text of that token also ends
        reasoning for parsers, so it must not occur before it.
        """
        if spelled.startswith("<"):
            rule = f"thought: THOUGHT {spelled}\nTHOUGHT: ANY & ~(ANY END ANY)"
        else:
            rule = "thought[suffix=END]: ANY"
        return f"{rule}\nEND: {json.dumps(end)}{RULES}"

    def _spelled(self, *literals: str) -> str:
        """Return literals as control tokens if they exist, otherwise as text."""
        tokens = ((self._token_of(literal), literal) for literal in literals)
        return " ".join(json.dumps(text) if token is None else f"<[{token}]>" for token, text in tokens)
