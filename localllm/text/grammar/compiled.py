"""The grammars of one model: compiled against its tokens, kept, and followed by each answer that asks for one."""

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from localllm.errors import UsageError
from localllm.request import CALLED, Grammar
from localllm.text.grammar.calls import CallGrammar
from localllm.text.grammar.follow import GrammarFollower
from localllm.text.grammar.functions import Calling
from localllm.text.grammar.source import LIMITS, checked, on_deep_stack
from localllm.text.grammar.thoughts import Frame
from localllm.text.grammar.vocabulary import Vocabulary
from localllm.text.output.formats import OutputFormat
from localllm.text.tokenizer import Tokenizer

KEPT = 32  # compiled grammars
THREADS = 2  # that find masks; a mask takes a tenth of a millisecond


class Grammars:
    """Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Collection[int], output: OutputFormat):
        """`size`: how many tokens the model has, also such as the tokenizer does not know; `ends`: those that end
        an answer."""
        self._tokenizer = tokenizer
        self._size = size
        self._ends = ends
        self._output = output
        self._markup = output.markup(with_tools=True)
        self._frame = Frame(output, self._token_of)
        self._kept: OrderedDict[tuple[Grammar | Calling, str | None], LLMatcher] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "localllm-masks")
        self._compiling = threading.Lock()
        self._looking = threading.Lock()  # whoever wants one that is there does not wait for another's compilation

    def compile(self, grammar: Grammar | Calling, chat: str | None = None) -> None:
        """Make ready to follow it; `chat`: how the prompt of a chat ends, whose answer may begin with thoughts.

        Raises UsageError for a grammar that cannot be kept to, UnsupportedModel where tokens say no bytes.
        """
        self._matcher(grammar, chat)

    def follow(self, grammar: Grammar | Calling, chat: str | None = None) -> GrammarFollower:
        """For one answer. Raises as `compile`."""
        matcher = self._matcher(grammar, chat).deep_copy()
        return GrammarFollower(matcher, self._vocabulary.vocab_size, self._size, self._threads)

    def _matcher(self, grammar: Grammar | Calling, chat: str | None) -> LLMatcher:
        headed = isinstance(grammar, Calling)
        around = None if chat is None else self._frame.around(chat, headed=headed)
        if kept := self._found(grammar, around):
            return kept
        with self._compiling:
            matcher = self._found(grammar, around) or self._compiled(grammar, around)
        with self._looking:
            self._kept[grammar, around] = matcher
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _found(self, grammar: Grammar | Calling, around: str | None) -> LLMatcher | None:
        with self._looking:
            if matcher := self._kept.get((grammar, around)):
                self._kept.move_to_end((grammar, around))
            return matcher

    def _compiled(self, grammar: Grammar | Calling, around: str | None) -> LLMatcher:
        parts = self._parts(grammar)
        if around is not None:
            parts.insert(0, {"lark_grammar": around})
        text = json.dumps({"grammars": parts})

        def compiled() -> LLMatcher:
            matcher = LLMatcher(self._vocabulary, text, log_level=0, limits=LIMITS)
            matcher.deep_copy().compute_bitmask()  # what is too much for the first token is found out here
            return matcher

        matcher = on_deep_stack(compiled)
        if reason := matcher.get_error():
            called = "tools" if isinstance(grammar, Calling) else CALLED[grammar.kind]
            raise UsageError(f"the {called} cannot be kept to: {' '.join(reason.split())[:300]}")
        return matcher

    def _parts(self, grammar: Grammar | Calling) -> list[dict[str, Any]]:
        if isinstance(grammar, Calling):
            return CallGrammar(self._output, self._frame, self._token_of, grammar).parts()
        return [json.loads(checked(grammar))]

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return Vocabulary(self._tokenizer, self._size, self._ends, self._markup).for_matchers()

    def _token_of(self, literal: str) -> int | None:
        return next(iter(self._tokenizer.ids_of((literal,))), None)
