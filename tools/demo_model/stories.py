"""The story grammar: a hero, a place, a plot with a beginning, a middle and an end, and its moral."""

# ruff: noqa: E501 - a pattern reads best on one line

import random
from dataclasses import dataclass

from tools.demo_model.grammar import article, capital, expand, invented_word
from tools.demo_model.plots import PLOTS, Plot
from tools.demo_model.words import (
    ANIMALS,
    BOYS,
    FEMALE_NAMES,
    GIRLS,
    HELPERS,
    MALE_NAMES,
    OBJECTS,
    PEOPLE,
    PLACES,
    THINGS,
    TRAITS,
)


@dataclass(frozen=True)
class Story:
    """One story: the words that a request may mention, and its texts."""

    hero: str
    name: str
    trait: str
    place: tuple[str, str, str]
    helper: str
    helper_is_wish: bool
    thing: str
    plot: Plot
    text: str
    summary: str
    moral: str


def pick_hero(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.06:
        return invented_word(rng)
    if roll < 0.12:  # the animals that people request most often
        return rng.choice(("fox", "owl"))
    group = ANIMALS if roll < 0.7 else PEOPLE if roll < 0.8 else THINGS if roll < 0.92 else BOYS + GIRLS
    return rng.choice(group)


def tell(
    rng: random.Random,
    *,
    hero: str | None = None,
    place: tuple[str, str, str] | None = None,
    short: bool = False,
    plot: Plot | None = None,
) -> Story:
    """Write one story. Arguments that are None are drawn."""
    hero = hero or pick_hero(rng)
    she = hero in GIRLS or (hero not in BOYS and rng.random() < 0.5)
    if rng.random() < 0.06:  # an invented female name ends in "a"
        name = capital(invented_word(rng, 1 if she else 2)) + ("ra" if she else "")
    else:
        name = rng.choice(FEMALE_NAMES if she else MALE_NAMES)
    place = place or rng.choice(PLACES)
    trait = rng.choice(TRAITS)
    plot = plot or rng.choice(PLOTS)
    wish = rng.random() < 0.12
    helper = rng.choice([animal for animal in (HELPERS if wish else plot.helpers) if animal != hero])
    thing = rng.choice(OBJECTS)
    slots = {
        "hero": hero,
        "a_hero": article(hero),
        "trait": trait,
        "a_trait": article(trait),
        "name": name,
        "he": "she" if she else "he",
        "He": "She" if she else "He",
        "him": "her" if she else "him",
        "his": "her" if she else "his",
        "His": "Her" if she else "His",
        "himself": "herself" if she else "himself",
        "in_place": place[0],
        "In_place": capital(place[0]),
        "place": place[2],
        "helper": helper,
        "a_helper": article(helper),
        "A_helper": capital(article(helper)),
        "thing": thing,
        "a_thing": article(thing),
    }
    for slot, options in plot.slots.items():
        slots[slot] = rng.choice(options)
    # Optional sentences are omitted in a short story and mostly used in a long one.
    sentences = [s for s in plot.sentences if not s.startswith("?") or (not short and rng.random() < 0.8)]
    body = [expand(rng, sentence.lstrip("?"), slots) for sentence in (plot.opening, *sentences)]
    moral = expand(rng, plot.moral, slots)
    ending = [] if short and rng.random() < 0.6 else [moral]
    paragraph = " ".join(body + ending)
    if not short and rng.random() < 0.5:  # two paragraphs: the beginning, then the rest
        paragraph = " ".join(body[:2]) + "\n\n" + " ".join(body[2:] + ending)
    summary = capital(expand(rng, plot.summary, slots))
    return Story(hero, name, trait, place, helper, wish, thing, plot, paragraph, summary, moral)


def request(rng: random.Random, story: Story, *, short: bool) -> str:
    """A user's request for this story, which mentions only details of the story."""
    size = rng.choice(("short ", "very short ", "little ")) if short else rng.choice(("", "", "", "", "nice "))
    trait = story.trait + " " if rng.random() < 0.25 else ""
    who = article(trait + story.hero)
    roll = rng.random()
    if story.helper_is_wish:
        who += rng.choice((" and ", " and ", " who meets ")) + article(story.helper)
    elif roll < 0.12:
        who += " " + rng.choice(("called", "named")) + " " + story.name
    elif roll < 0.28 and story.plot.uses_thing:
        who += rng.choice((" and ", " with ")) + article(story.thing)
    elif roll < 0.42:
        who += rng.choice((" " + story.place[1], " and the " + story.place[2]))
    elif roll < 0.46:
        who = rng.choice((story.plot.theme, f"{who} and {story.plot.theme}"))
    elif roll < 0.5:
        who = "the " + story.place[2]
    pattern = rng.choice(REQUESTS)
    return expand(rng, pattern, {"size": size, "a_story": article(size + "story"), "who": who, "hero": story.hero})


REQUESTS = (
    *("Tell me <a_story> about <who>",) * 7,
    "{Please tell me|Can you tell me|Could you tell me|I want|I would like|I'd like to hear} <a_story> about <who>",
    "{Write|Write me|Make up|Give me|Invent} <a_story> about <who>",
    "{Write|Tell} {me|} <a_story> {with|of} <who>",
    "<size>story about <who>",
    "Once upon a time there was <who>",
    "{Tell me|Say something|Tell me something} about <who> in a <size>story",
    "{My daughter|My son|My little sister|My friend} wants <a_story> about <who>",
    "{A bedtime story|A fairy tale|A tale|A children's story} about <who>",
    "Do you know <a_story> about <who>?",
    "Let us hear <a_story> about <who>",
)

OPEN_REQUESTS = (
    "{Tell me|Write|Write me|Give me} a story",
    "Tell me a story{, please| please|}",
    "{Can you tell|Could you tell} {me|us} a story?",
    "{I am bored, tell me a story|I want a story|A story please|story}",
    "{Tell me a bedtime story|I cannot sleep, tell me something|Tell me a fairy tale}",
    "Once upon a time{ ...|...|}",
    "{Surprise me|Make something up|Tell me something nice}",
)


def story_turn(rng: random.Random, *, short_share: float = 0.2) -> tuple[str, Story]:
    """A request and its story."""
    short = rng.random() < short_share
    story = tell(rng, short=short)
    if not short and not story.helper_is_wish and rng.random() < 0.1:
        return expand(rng, rng.choice(OPEN_REQUESTS)), story
    return request(rng, story, short=short), story


def follow_up(rng: random.Random, last: Story) -> tuple[str, str, Story]:
    """A turn that refers to the last story: the request, the answer, and the story that later turns refer to."""
    roll = rng.random()
    if roll < 0.25:
        story = tell(rng, hero=last.hero)
        pattern = "{Another one|Another one, please|One more|Again|Tell me another|More|Another story|Next one}"
        return expand(rng, pattern), story.text, story
    if roll < 0.5:
        story = tell(rng, hero=pick_hero(rng))
        pattern = "{Make it about|Now about|Now one about|Another one about|The same with|And a story about|Do it with} <a>"
        return expand(rng, pattern, {"a": article(story.hero)}), story.text, story
    if roll < 0.65:
        pattern = "{What was the name of the <hero>?|What is the <hero> called?|Who is the story about?|What was <his> name?}"
        question = expand(rng, pattern, {"hero": last.hero, "his": rng.choice(("his", "her"))})
        answer = f"The {last.hero} in the story is called {last.name}."
        return question, answer, last
    if roll < 0.8:
        pattern = (
            "{Summarise it|Make it shorter|Shorter please|In one sentence?|Summarise the story|What happened?}"
        )
        return expand(rng, pattern), last.summary, last
    if roll < 0.9:
        pattern = "{What is the moral?|What do we learn?|What does the story teach us?|And the moral?}"
        return expand(rng, pattern), last.moral, last
    pattern = (
        "{Where did it happen?|Where does the story happen?|Where did the <hero> live?|Where does <name> live?}"
    )
    question = expand(rng, pattern, {"hero": last.hero, "name": last.name})
    return question, f"{last.name} lived {last.place[0]}.", last
