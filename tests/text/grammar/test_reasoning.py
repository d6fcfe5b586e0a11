import json
import re
from pathlib import Path

import pytest
import tokenizers

from localllm.request import Grammar, GrammarKind
from localllm.text.backends import byte_alphabet
from localllm.text.grammar.compiled import GrammarCompiler
from localllm.text.output.formats import OutputFormat
from localllm.text.tokenizer import Tokenizer
from localllm.text.vocabulary import TokenizerDescription

END = "<end>"
THINK = "<think></think>"
HARMONY = "<|channel|><|message|><|start|><|end|><|return|>"
GLIMMER = "<|message|><|start|><|eom|><|eot|><atem:function_calls>"
COHERE = "<|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|END_RESPONSE|>"
GEMMA = "<|channel><channel|>"
APRIEL = "Here are my reasoning steps: [BEGIN FINAL RESPONSE]"
ANSWER = Grammar(GrammarKind.CHOICE, json.dumps(["yes", "no"]))
MARKUP = re.compile(r"<[^<>]+>")


def model(markup: str, *, as_text: bool = False) -> tuple[Tokenizer, GrammarCompiler]:
    """Tokenizer and grammar compiler for a template with this markup. Its tags are control tokens, unless
    `as_text`.
    """
    words = {letter: index for index, letter in enumerate(byte_alphabet().values())}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END, *([] if as_text else MARKUP.findall(markup))])
    tokenizer = Tokenizer(TokenizerDescription(Path("none"), backend, {}, {"default": markup}, (256,)))
    output = OutputFormat.detect(tokenizer.chat_templates, tokenizer.added_tokens)
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size, (256,), output)


def may_say(markup: str, prompt: str | None, said: str, *, as_text: bool = False) -> bool:
    """Whether the grammar accepts the answer and its end. Tags are control tokens if the model has them."""
    tokenizer, grammars = model(markup, as_text=as_text)
    follower = grammars.follow(ANSWER, prompt)
    ids = [*tokenizer.encode(said, special=False), 256]
    return follower.allowed(ids) == ids


@pytest.mark.parametrize(
    ("markup", "prompt", "said"),
    [
        (THINK, "<think>\n", "Hm, {\n</think>yes"),
        (THINK, "<think>\n", "</think>\n\nno"),
        (THINK, "assistant\n", "<think>I think é 💥 </thin</think>\n\nyes"),
        (THINK, "assistant\n", "yes"),
        (THINK, "<think>\n\n</think>\n\n", "no"),
        (HARMONY, "", "<|channel|>final<|message|>yes"),
        (HARMONY, "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>no"),
        (GLIMMER, "", " to=self<|message|>Hm.<|eom|><|start|>assistant<|message|>yes"),
        (GLIMMER, "", "<|message|>yes"),
        (COHERE, "", "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>no<|END_RESPONSE|>"),
        (COHERE, "", "yes"),
        (GEMMA, "", "<|channel>thought\nHm.<channel|>yes"),
        (APRIEL, "Here are my reasoning steps:\n", "Hm. [BEGIN FINAL RESPONSE]\nyes"),
        ("nothing", "", "yes"),
    ],
)
def test_thoughts_are_free_and_the_answer_constrained(markup: str, prompt: str, said: str) -> None:
    assert may_say(markup, prompt, said)


@pytest.mark.parametrize(
    ("markup", "prompt", "said"),
    [
        (THINK, "<think>\n", "yes"),  # nothing but thoughts
        (THINK, "<think>\n", "Hm.</think>maybe"),
        (THINK, "<think>\n", "Hm.<think></think>yes"),
        (THINK, "assistant\n", "Hm.</think>yes"),
        (THINK, "<think>\n\n</think>\n\n", "<think>Hm.</think>yes"),
        (HARMONY, "", "yes"),
        (
            HARMONY,
            "",
            "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>yes",
        ),
        (HARMONY, "", "<|channel|>final<|message|>maybe"),
        (COHERE, "", "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>maybe<|END_RESPONSE|>"),
        ("nothing", "", "<think>Hm.</think>yes"),
    ],
)
def test_nothing_replaces_or_precedes_the_answer(markup: str, prompt: str, said: str) -> None:
    assert not may_say(markup, prompt, said)


def test_textual_markup_ends_thoughts_across_token_borders() -> None:
    assert may_say(THINK, "<think>\n", "Hm </think</think>\nyes", as_text=True)
    assert not may_say(THINK, "<think>\n", "Hm </think>perhaps", as_text=True)


def test_a_token_cannot_be_spelled_out_to_end_thoughts_for_routers_alone() -> None:
    tokenizer, grammars = model(THINK)
    follower = grammars.follow(ANSWER, "<think>\n")
    spelled = tokenizer.encode_continuation("Hm </think>")
    assert follower.allowed(spelled) == spelled[:-1]


def test_completions_have_no_thoughts() -> None:
    assert may_say(THINK, None, "yes")
    assert not may_say(THINK, None, "<think>Hm.</think>yes")
