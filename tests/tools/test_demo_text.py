"""The generator of the bundled model's text: deterministic by seed, and without grammar leftovers."""

import json
import random
import re
from itertools import islice

import pytest

from tools.demo_model.about import ABOUT
from tools.demo_model.grammar import article, expand, join_and
from tools.demo_model.notes import anything, chores, report, shopping
from tools.demo_model.plots import PLOTS
from tools.demo_model.stories import request, tell
from tools.demo_model.text import HELD_OUT_SEED, MIXES, TRAIN_SEED, conversations, noisy
from tools.demo_model.words import ANIMALS

DRAWN = list(islice(conversations(TRAIN_SEED, "everything"), 2000))


def test_a_seed_names_a_text() -> None:
    assert DRAWN[:200] == list(islice(conversations(TRAIN_SEED, "everything"), 200))


def test_the_held_out_stories_are_others() -> None:
    def stories(seed: int) -> set[str]:
        return {json.dumps(c.messages) for c in islice(conversations(seed), 2000) if c.kind == "story"}

    assert not stories(TRAIN_SEED) & stories(HELD_OUT_SEED)


def test_roles_alternate_and_the_assistant_speaks_last() -> None:
    for drawn in DRAWN:
        roles = [m["role"] for m in drawn.messages]
        if roles[0] == "system":
            del roles[0]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert roles


def test_every_kind_is_drawn() -> None:
    assert {drawn.kind for drawn in DRAWN} == set(MIXES["everything"])


def test_no_placeholder_is_left() -> None:
    for drawn in DRAWN:
        for message in drawn.messages:
            text = message["content"].replace("notes.txt | localllm", "")
            assert not re.search(r"[{}<>|]", text), text


def test_no_message_is_empty() -> None:
    assert all(m["content"].strip() for drawn in DRAWN for m in drawn.messages)


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.theme)
def test_every_plot_keeps_its_hero(plot) -> None:
    for seed in range(20):
        story = tell(random.Random(seed), hero="fox", plot=plot)
        assert "fox called" in story.text
        assert story.name in story.summary
        assert "fox" in story.summary
        assert story.text[-1] in '.!?"'


def test_a_story_has_one_helper_and_one_pronoun() -> None:
    for seed in range(300):
        story = tell(random.Random(seed))
        others = set(ANIMALS) - {story.hero, story.helper}
        assert not others & set(re.findall(r"(?:said|asked) the (\w+)", story.text))
        assert story.helper in story.text
        assert not re.search(r"\b[Hh]is\b", story.text) or not re.search(r"\b[Ss]he\b", story.text)


def test_a_wished_helper_is_named_in_the_request() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        story = tell(rng)
        assert not story.helper_is_wish or story.helper in request(rng, story, short=False)


def test_a_list_is_copied_completely() -> None:
    for kind in (shopping, chores, anything):
        for seed in range(100):
            text, answer = kind(random.Random(seed))
            assert len(text) <= len(answer) + 80
            assert text.splitlines()[-1].lstrip("-*•[] 1234567890.").rstrip(".") in answer


def test_a_summary_of_prose_is_its_first_sentence() -> None:
    for seed in range(100):
        text, answer = report(random.Random(seed))
        assert answer.removeprefix("In short: ") in text


def test_a_request_names_only_what_the_story_has() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        story = tell(rng, hero="owl")
        asked = request(rng, story, short=False)
        if "called" in asked or "named" in asked:
            assert story.name in asked
        if story.trait in asked:
            assert story.trait in story.text


def test_the_server_question_is_answered_with_its_command() -> None:
    questions, answers = ABOUT[0]
    assert any("server" in q for q in questions)
    assert all("localllm serve" in a for a in answers)


def test_the_server_is_stopped_by_a_key() -> None:
    questions, answers = ABOUT[1]
    assert any("stop" in q for q in questions)
    assert all("Ctrl-C" in a for a in answers)


def test_noise_keeps_the_text_recognisable() -> None:
    plain = "Tell me a story about a fox"
    variants = {noisy(random.Random(seed), plain) for seed in range(200)}
    assert plain in variants
    assert plain.lower() in variants
    assert all("f" in v.lower() and len(v) >= len(plain) - 1 for v in variants)


def test_expand_resolves_nested_choices_and_slots() -> None:
    rng = random.Random(0)
    assert expand(rng, "{a {b|b}|a b} <x>", {"x": "c"}) == "a b c"


def test_articles_and_lists() -> None:
    assert (article("owl"), article("fox")) == ("an owl", "a fox")
    assert join_and(["a", "b", "c"]) == "a, b and c"
    assert join_and(["a"]) == "a"
