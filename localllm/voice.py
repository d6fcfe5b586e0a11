"""How a model is spoken to by another chat template than its own. Knows nothing of requests and of the engine."""

from dataclasses import dataclass

from localllm.text.ends import ends_of_turn
from localllm.text.grammar.compiled import Grammars
from localllm.text.output.formats import OutputFormat
from localllm.text.template import ChatTemplate
from localllm.text.tokenizer import Tokenizer

MOST_KEPT = 8  # templates beside the model's own


@dataclass(frozen=True)
class Voice:
    """What a chat template decides: how conversations are written, and how answers are read."""

    template: ChatTemplate
    output: OutputFormat
    grammars: Grammars
    eos_ids: frozenset[int]


class Voices:
    """Of one model, by template: made once, as long as there are not too many."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int], renderer: ChatTemplate):
        """eos_ids: those of the model itself; renderer: whose process renders all templates."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.eos_ids = eos_ids
        self.renderer = renderer
        self.kept: dict[str, Voice] = {}

    def of(self, source: str) -> Voice:
        """source: Jinja."""
        if found := self.kept.get(source):
            return found
        templates = {"default": source}
        output = OutputFormat.of(templates, self.tokenizer.added_tokens)
        ends = self.eos_ids | self.tokenizer.ids_of(ends_of_turn(templates.values(), self.tokenizer.added_tokens))
        grammars = Grammars(self.tokenizer, self.vocab_size, ends, output)
        voice = Voice(self.renderer.with_templates(templates), output, grammars, ends)
        while len(self.kept) >= MOST_KEPT:
            self.kept.pop(next(iter(self.kept)), None)
        self.kept[source] = voice
        return voice
