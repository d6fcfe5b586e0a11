"""How a model is spoken to by another chat template than its own. Knows nothing of requests and of the engine."""

from dataclasses import dataclass

from localllm.text.ends import find_turn_end_tokens
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.output.formats import OutputFormat
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

MAX_CACHED_FORMATS = 8  # templates beside the model's own


@dataclass(frozen=True)
class ChatFormat:
    """What a chat template decides: how conversations are rendered, and how answers are parsed and ended."""

    template: ChatTemplate | None
    output: OutputFormat
    grammars: GrammarCompiler
    eos_ids: frozenset[int]


class ChatFormats:
    """Of one model, by template: made once, as long as there are not too many."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int], renderer: ChatTemplate):
        """eos_ids: those of the model itself; renderer: whose process renders all templates."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.renderer = renderer
        self.cached: dict[str, ChatFormat] = {}

    def get(self, source: str) -> ChatFormat:
        """source: Jinja."""
        if found := self.cached.get(source):
            return found
        templates = {"default": source}
        output = OutputFormat.detect(templates, self.tokenizer.added_tokens)
        ends = self.eos_ids | self.tokenizer.added_token_ids(
            find_turn_end_tokens(templates.values(), self.tokenizer.added_tokens)
        )
        grammars = GrammarCompiler(self.tokenizer, self.vocab_size, ends, output)
        voice = ChatFormat(self.renderer.with_templates(templates), output, grammars, ends)
        while len(self.cached) >= MAX_CACHED_FORMATS:
            self.cached.pop(next(iter(self.cached)), None)
        self.cached[source] = voice
        return voice
