"""The grammar of a whole answer around the one of its content: a model thinks first, and nothing keeps it from it.

What an answer looks like follows from the model's markup (`text/output`) and from how its prompt ends:

    the prompt has opened the thoughts    thoughts, their end, the content
    the prompt has closed them            the content
    neither                               the content, or thoughts before it: the model chooses
    the model writes messages             any messages to itself, then one to the user: the content

Thoughts hold no control token, and no end token ends them. Up to two spaces or line ends may stand between them
and the content; routers leave those out.
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
    """Writes it in Lark for one model. `token_of`: the control token that is written so, if there is one."""

    def __init__(self, output: OutputFormat, token_of: Callable[[str], int | None]):
        self._output = output
        self._token_of = token_of

    def for_prompt(self, prompt: str, *, has_markup: bool = False) -> str | None:
        """For the answer to a chat whose prompt ends like this; None where it is the content alone.

        has_markup: markup of its own stands before the content, which is more than that."""
        if self._output.channels:
            return self._messages(self._output.channels, headed=has_markup)
        if self._output.reasoning is None:
            return None
        return self._tagged(
            self._output.reasoning, prompt.rstrip(), "body" if has_markup else self.content_rule("body")
        )

    def content_rule(self, rule: str) -> str:
        """The content, and control tokens that may stand around it."""
        silent = self._output.reasoning.content_markup if self._output.reasoning else ()
        *before, after = (self._spelled(token) for token in silent) if silent else ("",)
        around = [*(f"{token}? " for token in before), rule, f" {after}?"]
        return "".join(around) if after.startswith("<") else rule

    def _messages(self, form: ChannelFormat, *, headed: bool) -> str:
        kind = int(form != HARMONY)
        end, start = self._spelled(form.message_ends[0]), self._spelled(START)
        again = f'{self._spelled(*REASONING_HEADERS[kind])} thought {start} "assistant"'
        head = "" if headed else self._spelled(*ANSWER_HEADERS[kind])
        return f"start: ({again})* {head} body\n{self._thought(form.message_ends[0], end)}"

    def _tagged(self, form: ReasoningFormat, prompt: str, answer: str) -> str | None:
        begin, end = self._spelled(*self._parts(form)), self._spelled(form.end)
        if prompt.endswith(form.begin):
            answer = f"thought gap {answer}"
        elif not prompt.endswith(form.end) and begin.startswith("<"):  # text could be the content's own beginning
            answer = f"({begin} thought gap)? {answer}"
        return None if answer == "body" else f"start: {answer}\n{self._thought(form.end, end)}"

    def _parts(self, form: ReasoningFormat) -> tuple[str, ...]:
        """What stands before thoughts, cut behind a control token that it begins with."""
        first = next((token for token in form.inner_markup if form.begin.startswith(token)), form.begin)
        return tuple(filter(None, (first, form.begin.removeprefix(first))))

    def _thought(self, end: str, spelled: str) -> str:
        """The rules for thoughts and what ends them, a control token or a text. The token's text ends them for
        routers, too, so it may not be spelled out before it."""
        if spelled.startswith("<"):
            rule = f"thought: THOUGHT {spelled}\nTHOUGHT: ANY & ~(ANY END ANY)"
        else:
            rule = "thought[suffix=END]: ANY"
        return f"{rule}\nEND: {json.dumps(end)}{RULES}"

    def _spelled(self, *literals: str) -> str:
        """As control tokens where they are, else as text."""
        tokens = ((self._token_of(literal), literal) for literal in literals)
        return " ".join(json.dumps(text) if token is None else f"<[{token}]>" for token, text in tokens)
