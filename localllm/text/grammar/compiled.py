"""Grammars compiled for one model's tokens, cached, and followed by each answer that requests one."""

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import llguidance
from llguidance import LLMatcher, LLTokenizer

from localllm.errors import UsageError
from localllm.request import GRAMMAR_NAMES, Grammar, GrammarKind
from localllm.text.grammar.calls import ToolCallGrammar
from localllm.text.grammar.follow import BACKSLASH, ELSEWHERE, IN_STRING, AnswerCloser, GrammarFollower
from localllm.text.grammar.functions import ToolConstraint
from localllm.text.grammar.reasoning import ReasoningGrammar
from localllm.text.grammar.source import PARSER_LIMITS, compile_source, run_on_deep_stack
from localllm.text.output.channels import ChannelFormat
from localllm.text.output.formats import OutputFormat
from localllm.text.tokenizer import Tokenizer

CLOSING_LETTERS = frozenset((*IN_STRING, *ELSEWHERE, BACKSLASH, b"{", b"["))
JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON)
MAX_CACHED_GRAMMARS = 32  # compiled grammars
MASK_THREADS = 2  # that compute masks; a mask takes a tenth of a millisecond


class GrammarCompiler:
    """Compiles the grammars of one model and caches them. Thread-safe."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_ids: Collection[int], output_format: OutputFormat
    ):
        """`vocab_size`: the model's number of tokens, including those that the tokenizer lacks; `end_ids`: tokens
        that end an answer.
        """
        self._tokenizer = tokenizer
        self._size = vocab_size
        self._ends = end_ids
        self._output = output_format
        self._markup = output_format.markup(with_tools=True)
        self._frame = ReasoningGrammar(output_format, self._token_of)
        self._kept: OrderedDict[tuple[Grammar | ToolConstraint, str | None], LLMatcher] = OrderedDict()
        self._threads = ThreadPoolExecutor(MASK_THREADS, "localllm-masks")
        self._compiling = threading.Lock()
        self._looking = threading.Lock()  # so that a cached grammar need not wait for another one's compilation

    def compile(self, grammar: Grammar | ToolConstraint, prompt_tail: str | None = None) -> None:
        """Prepare to follow a grammar; `prompt_tail`: end of a chat's prompt, after which reasoning may come
        first.

        Raises UsageError for an unsupported grammar, UnsupportedModel if tokens do not map to bytes.
        """
        self._matcher(grammar, prompt_tail)

    def follow(
        self, grammar: Grammar | ToolConstraint, prompt_tail: str | None = None, max_tokens: int | None = None
    ) -> GrammarFollower:
        """Return the follower of one answer. max_tokens: limit before which JSON is closed. Raises the errors of
        `compile`."""
        matcher = self._matcher(grammar, prompt_tail).deep_copy()
        closer = self._closer if isinstance(grammar, ToolConstraint) or grammar.kind in JSON_KINDS else None
        return GrammarFollower(matcher, self._vocabulary.vocab_size, self._size, self._threads, closer, max_tokens)

    def _matcher(self, grammar: Grammar | ToolConstraint, prompt_tail: str | None) -> LLMatcher:
        has_markup = isinstance(grammar, ToolConstraint)
        frame = None if prompt_tail is None else self._frame.for_prompt(prompt_tail, has_markup=has_markup)
        if cached := self._found(grammar, frame):
            return cached
        with self._compiling:
            matcher = self._found(grammar, frame) or self._compiled(grammar, frame)
        with self._looking:
            self._kept[grammar, frame] = matcher
            if len(self._kept) > MAX_CACHED_GRAMMARS:
                self._kept.popitem(last=False)
        return matcher

    def _found(self, grammar: Grammar | ToolConstraint, frame: str | None) -> LLMatcher | None:
        with self._looking:
            if matcher := self._kept.get((grammar, frame)):
                self._kept.move_to_end((grammar, frame))
            return matcher

    def _compiled(self, grammar: Grammar | ToolConstraint, frame: str | None) -> LLMatcher:
        parts = self._parts(grammar)
        if frame is not None:
            parts.insert(0, {"lark_grammar": frame})
        source = json.dumps({"grammars": parts})

        def compiled() -> LLMatcher:
            matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=PARSER_LIMITS)
            matcher.deep_copy().compute_bitmask()  # reports now if the first token is too complex
            return matcher

        matcher = run_on_deep_stack(compiled)
        if reason := matcher.get_error():
            called = "tools" if isinstance(grammar, ToolConstraint) else GRAMMAR_NAMES[grammar.kind]
            raise UsageError(f"the {called} cannot be used: {' '.join(reason.split())[:300]}")
        return matcher

    def _parts(self, grammar: Grammar | ToolConstraint) -> list[dict[str, Any]]:
        if isinstance(grammar, ToolConstraint):
            return ToolCallGrammar(self._output, self._frame, self._token_of, grammar).grammar_parts()
        return [json.loads(compile_source(grammar))]

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return LLGuidanceVocabulary(self._tokenizer, self._size, self._ends, self._markup).to_llguidance()

    @cached_property
    def _closer(self) -> AnswerCloser:
        tokens = self._tokenizer.token_bytes(self._size)
        letters = {text: token for token, text in reversed(list(enumerate(tokens))) if text in CLOSING_LETTERS}
        form = self._output.channels or self._output.reasoning
        end = form.message_ends[0] if isinstance(form, ChannelFormat) else form.end if form else ""
        control = self._token_of(end)
        spelled = [control] if control is not None else self._tokenizer.encode_continuation(end) if end else []
        ends = [end for end in self._ends if end < self._size]
        return AnswerCloser(self._vocabulary.vocab_size, letters, spelled, ends)

    def _token_of(self, literal: str) -> int | None:
        return next(iter(self._tokenizer.added_token_ids((literal,))), None)


class LLGuidanceVocabulary:
    """A model's vocabulary in llguidance's interface, built once: about a second for 150,000 tokens.

    Implements `llguidance.TokenizerWrapper` by duck typing; the original would run the tokenizer as a test.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: Collection[int], markup: Collection[str]
    ):
        """`vocab_size`: rows of the model's embedding, of which those without a token are never allowed;
        `end_token_ids`: tokens that end an answer; `markup`: literals that are treated as control tokens, besides
        the tokenizer's own.
        """
        tokens = tokenizer.token_bytes(vocab_size)
        self.end_ids = sorted(end for end in end_token_ids if end < vocab_size)
        if not self.end_ids:  # a token that no model can generate: an answer ends where nothing may follow
            self.end_ids = [vocab_size]
            tokens.append(b"")
        self.tokens: Sequence[bytes] = tokens
        self.eos_token_id = self.end_ids[0]
        control = {
            *tokenizer.special_ids,
            *tokenizer.added_token_ids(tokenizer.control_tokens | frozenset(markup)),
        }
        self.special_token_ids = sorted(token for token in control if token < vocab_size)
        self._encode = tokenizer.encode_continuation

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)

    def to_llguidance(self) -> LLTokenizer:
        return llguidance.LLTokenizer(self, eos_token=self.end_ids)  # pyright: ignore[reportArgumentType] - by its names
