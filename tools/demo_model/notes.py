"""Notes followed by an instruction such as "Summarise:", and a short answer taken from them."""

# ruff: noqa: E501 - a pattern reads best on one line

import random
from collections.abc import Callable

from tools.demo_model.grammar import article, capital, expand, invented_word, join_and, words
from tools.demo_model.simple import DAYS
from tools.demo_model.stories import tell
from tools.demo_model.words import ANIMALS, FEMALE_NAMES, MALE_NAMES, OBJECTS, PEOPLE

GOODS = words(
    """milk eggs bread butter cheese apples rice soap paper candles tea coffee flour sugar salt honey carrots
onions potatoes tomatoes batteries nails paint flowers stamps pens towels"""
)
CHORES = words(
    "call <name>;water the plants;pay the bill;clean the kitchen;write to <name>;buy <good>;repair the <thing>;"
    "book the train;feed the <animal>;send the report;read the book;bring the <thing> to <name>;test the software;"
    "update the document;order <good>;visit <name>;return the <thing>;plan the party;fix the <word>",
    ";",
)
STATEMENTS = (
    "The <adj> <noun> {is|was} <state>.",
    "<name> {bought|found|sold|needs|likes|repaired|painted} the <adj> <noun>.",
    "{We|They} {go|went|travel} to <town> on <day>.",
    "The <noun> {costs|cost} <number> {dollars|euros|coins}.",
    "<name> and <other> {work|worked|live|lived} in <town>.",
    "The {meeting|party|concert|train|lesson} {is|starts} on <day> at <number>.",
    "{Please|Do not forget to} bring {the <noun>|<good>} on <day>.",
    "There are <number> <good> in the <noun>.",
    "<name> {says|thinks|wrote} that the <noun> is <state>.",
    "The {price|size|colour|number} of the <noun> {changed|went up|is <state>}.",
)
NOUNS = words(
    """house bridge garden shop boat engine report project school museum market road letter window machine tower
kitchen library station program server test budget plan office team"""
)
ADJECTIVES = words("old new big small red blue green heavy expensive broken quiet second last first long")
STATES = words(
    """closed open ready late finished empty full broken cheap important beautiful difficult easy cold warm safe
green delayed cancelled correct"""
)

INSTRUCTIONS = (
    *("Summarise:",) * 3,
    "{Summarize|Summary|summarise|summarize|Summarise this|Summarize this|Sum up|In short}{:|}",
    "{Summarise|Summarize} {the text|the notes|my notes|this text|these notes|it}{ please|}{.|:|}",
    "{Give me|Write} a {short |}summary{ of this|}{.|:|}",
    "{What is this about|What do the notes say|What is the text about|What does it say}?",
    "{Summarise|Summarize} in {one sentence|a sentence|one or two sentences}{.|:|}",
)


def _words(rng: random.Random) -> dict[str, str]:
    def noun() -> str:
        return invented_word(rng) if rng.random() < 0.35 else rng.choice(NOUNS + ANIMALS + PEOPLE)

    names = rng.sample(MALE_NAMES + FEMALE_NAMES, 2)
    return {
        "name": capital(invented_word(rng)) if rng.random() < 0.3 else names[0],
        "other": names[1],
        "noun": noun(),
        "word": noun(),
        "adj": rng.choice(ADJECTIVES),
        "state": rng.choice(STATES),
        "town": capital(invented_word(rng)),
        "day": rng.choice(DAYS),
        "number": str(rng.choice((rng.randint(2, 12), rng.randint(13, 99), rng.randint(100, 999)))),
        "good": rng.choice(GOODS),
        "thing": rng.choice(OBJECTS),
        "animal": rng.choice(ANIMALS),
    }


def _salad(rng: random.Random) -> str:
    """Words in no order: a summary has to copy what is there, not what usually follows."""
    pool = NOUNS + ADJECTIVES + STATES + GOODS + ANIMALS + PEOPLE + ["the", "a", "of", "and", "in", "is", "to"] * 6
    words = [invented_word(rng, rng.randint(1, 3)) if rng.random() < 0.2 else rng.choice(pool) for _ in range(12)]
    return capital(" ".join(words[: rng.randint(4, 12)])) + "."


def _statement(rng: random.Random) -> str:
    if rng.random() < 0.25:
        return _salad(rng)
    return capital(expand(rng, rng.choice(STATEMENTS), _words(rng)))


def shopping(rng: random.Random) -> tuple[str, str]:
    goods = rng.sample(GOODS, rng.randint(2, 6))
    bullet = rng.choice(("- ", "* ", "", "• "))
    title = rng.choice(("Shopping list", "Shopping", "To buy", "Shopping list:", "# Shopping", "Buy:"))
    text = "\n".join([title, *(bullet + good for good in goods)])
    return text, f"The notes are a shopping list: {join_and(goods)}."


def chores(rng: random.Random) -> tuple[str, str]:
    items = [expand(rng, item, _words(rng)) for item in rng.sample(CHORES, rng.randint(2, 5))]
    marks = rng.choice(("- ", "* ", "1", "", "- [ ] "))
    title = rng.choice(("To do", "To do:", "TODO", "Todo list", "Things to do", f"{rng.choice(DAYS)}:", "# Tasks"))
    lines = [f"{n}. {item}" if marks == "1" else marks + item for n, item in enumerate(items, 1)]
    return "\n".join([title, *lines]), f"The notes are a list of things to do: {join_and(items)}."


def meeting(rng: random.Random) -> tuple[str, str]:
    first, last = rng.sample(DAYS, 2)
    tasks = [expand(rng, f"<name> will {rng.choice(CHORES[1:10])}", _words(rng)) for _ in range(rng.randint(1, 3))]
    lines = [f"Meeting on {first}", *(task + "." for task in tasks), f"The next meeting is on {last}."]
    glue = rng.choice(("\n", "\n", ". "))
    text = glue.join(lines).replace("..", ".")
    return (
        text,
        f"At the meeting on {first} it was agreed that {join_and(tasks)}. The next meeting is on {last}.",
    )


def report(rng: random.Random) -> tuple[str, str]:
    """Any prose: the first sentence says what it is about, and the last one often says what follows."""
    sentences = [_statement(rng) for _ in range(rng.randint(1, 6))]
    title = rng.choice(("", "", "Notes\n", "# Notes\n\n", f"{capital(invented_word(rng))} {invented_word(rng)}\n"))
    text = title + rng.choice((" ", " ", "\n", "\n- ")).join(sentences)
    return text, "In short: " + sentences[0] + ("" if len(sentences) < 3 else " " + sentences[-1])


def story_notes(rng: random.Random) -> tuple[str, str]:
    story = tell(rng, short=rng.random() < 0.5)
    return story.text, story.summary


def trip(rng: random.Random) -> tuple[str, str]:
    words = _words(rng)
    goods = rng.sample(GOODS + OBJECTS, 3)
    lines = [
        f"Trip to {words['town']}",
        f"Start: {words['day']} at {words['number']}",
        f"Who: {words['name']} and {words['other']}",
        f"Bring: {', '.join(goods)}",
    ]
    answer = f"{words['name']} and {words['other']} go to {words['town']} on {words['day']} and bring {join_and(goods)}."
    return "\n".join(lines), answer


def diary(rng: random.Random) -> tuple[str, str]:
    words = _words(rng)
    animal = article(words["animal"])
    text = expand(
        rng,
        f"{{Dear diary, today|Today|On <day>}} I {{went to|was in}} <town> with <name>. We saw {animal} and "
        f"{{ate <good>|talked a lot}}. {{It was a nice day.|I was very tired.|It rained all day.}}",
        words,
    )
    return text, f"The writer was in {words['town']} with {words['name']} and saw {animal}."


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    shopping,
    chores,
    meeting,
    report,
    report,
    report,
    story_notes,
    trip,
    diary,
)


def repeat(rng: random.Random) -> tuple[str, str]:
    """A request to repeat a text: plain practice in copying, which summaries need."""
    text = _salad(rng) if rng.random() < 0.5 else _statement(rng)
    asked = expand(rng, "{Repeat after me|Repeat|Say|Copy this|Echo|Repeat this|Write}:")
    return asked + rng.choice((" ", " ", "\n")) + text, text


def notes(rng: random.Random) -> tuple[str, str, str]:
    """The notes, the instruction and the answer; they are kept apart so that noise touches only the instruction."""
    text, answer = rng.choice(KINDS)(rng)
    return text, expand(rng, rng.choice(INSTRUCTIONS)), answer
