"""Notes with an instruction such as "Summarise:", and a short answer taken from them."""

# ruff: noqa: E501 - a pattern reads best on one line

import random
from collections.abc import Callable

from tools.demo_model.grammar import capital, expand, invented_word, join_and, words
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
    "The <noun> {met|opened|arrived|began|ended} on <day> {morning|evening|afternoon} to {discuss|see|plan|repair} the <adj> <noun>.",
    "{Many|Some|Most|All} <word> {complained|asked|talked|wrote|heard|worried} about <noun> and <word>.",
    "{Today|Yesterday|Last week|This year|On <day>} {I|we|they|<name>} {went to|was in|saw|visited} the <noun> {with <other>|in <town>|and the <word>}.",
    "{We|They|You|I} {still|also|often|never} {need|want|use|have|like} {a|the|some} <adj> <noun>.",
    "The next <noun> will be {held|built|closed|ready|paid} next {week|month|year|<day>}.",
    "The <noun> is planned for <day>{, because the <word> is <state>| and the <word> is <state>|}.",
    "{In|Since|Until} <number>, the <noun> of <town> {had|has been|was} <state> and <adj>.",
    "{However|But|Because of this|So|Then|After that}, <name> {did not|could not|had to|wants to} {find|buy|move|open|change} the <noun>.",
    "<name> {writes|tests|reads|checks|brings|cooks} the <noun>, and <other> {the <word>|helps}.",
    "The {price|size|colour|number} of the <noun> {changed|went up|is <state>}.",
)
NOUNS = words(
    """house bridge garden shop boat engine report project school museum market road letter window machine tower
kitchen library station program server test budget plan office team"""
)
# These words are only copied, so their use does not need to make sense.
MANY = words(
    """council evening lane resident noise parking vote month release documentation installer logo company customer
price weather region winter river doctor patient study result water energy power plant country government law
election player season goal match ticket hotel beach holiday flight airport bus street traffic accident police
fire child parent student class lesson exam book author film song concert artist picture phone computer screen
version error bug user file data model token memory code feature request review deadline budget contract invoice
payment bank money salary job interview manager colleague customer product order delivery package address recipe
kitchen oven soup bread dinner breakfast lunch family birthday wedding friend visitor guest dog garden tree flower
mountain road bicycle car repair battery light winter snow storm rain wind sun temperature science history culture
scientists people residents experts workers volunteers members visitors"""
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
        return invented_word(rng) if rng.random() < 0.35 else rng.choice(NOUNS + ANIMALS + PEOPLE + MANY)

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


def _salad(rng: random.Random, longest: int = 12) -> str:
    """Random words: a summary must copy them, since it cannot predict them."""
    pool = (
        NOUNS
        + ADJECTIVES
        + STATES
        + GOODS
        + ANIMALS
        + PEOPLE
        + MANY
        + ["the", "a", "of", "and", "in", "is", "to"] * 6
    )
    words = [
        invented_word(rng, rng.randint(1, 3)) if rng.random() < 0.2 else rng.choice(pool)
        for _ in range(rng.randint(min(4, longest), longest))
    ]
    return capital(" ".join(words)) + "."


def _statement(rng: random.Random) -> str:
    if rng.random() < 0.25:
        return _salad(rng)
    return capital(expand(rng, rng.choice(STATEMENTS), _words(rng)))


def _listed(rng: random.Random, title: str, items: list[str]) -> str:
    """A list as people write it: with or without a title, bullets, numbers or full stops."""
    mark = rng.choice(("- ", "- ", "- ", "* ", "• ", "1", "", "- [ ] "))
    end = "." if rng.random() < 0.1 else ""
    lines = [(f"{n}. " if mark == "1" else mark) + item + end for n, item in enumerate(items, 1)]
    return "\n".join(([title] if title else []) + lines)


def shopping(rng: random.Random) -> tuple[str, str]:
    goods = rng.sample(GOODS, rng.randint(2, 6))
    title = rng.choice(("", "", "", "Shopping list", "Shopping", "To buy", "Shopping list:", "# Shopping", "Buy:"))
    return _listed(rng, title, goods), f"The notes are a shopping list: {join_and(goods)}."


def chores(rng: random.Random) -> tuple[str, str]:
    items = [expand(rng, item, _words(rng)) for item in rng.sample(CHORES, rng.randint(2, 5))]
    day = rng.choice(DAYS)
    title = rng.choice(
        ("", "", "", "To do", "To do:", "TODO", "Todo", "Todo list", "Things to do", f"{day}:", "# Tasks")
    )
    return _listed(rng, title, items), f"The notes are a list of things to do: {join_and(items)}."


def anything(rng: random.Random) -> tuple[str, str]:
    """A list of unknown kind, whose answer copies all items."""
    size = rng.randint(2, 5)
    roll = rng.random()
    if roll < 0.35:
        items = [_salad(rng, 3).rstrip(".").lower() for _ in range(size)]
    elif roll < 0.6:
        items = [_statement(rng).rstrip(".") for _ in range(size)]
    else:
        patterns = ("<noun>", "<adj> <noun>", "<name>", "<good>")
        items = [expand(rng, rng.choice(patterns), _words(rng)) for _ in range(size)]
    title = rng.choice(("", "", "", "Notes", "Ideas:", f"{capital(invented_word(rng))}:"))
    return _listed(rng, title, items), f"The notes are a list: {join_and(items)}."


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
    """Prose, whose answer copies the first sentence."""
    sentences = [_statement(rng) for _ in range(rng.randint(1, 6))]
    title = rng.choice(
        ("", "", "", "Notes\n", "# Notes\n\n", f"{capital(invented_word(rng))} {invented_word(rng)}\n")
    )
    text = title + rng.choice((" ", " ", " ", "\n")).join(sentences)
    return text, "In short: " + sentences[0]


def story_notes(rng: random.Random) -> tuple[str, str]:
    story = tell(rng, short=rng.random() < 0.5)
    return story.text, story.summary


KINDS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    shopping,
    chores,
    anything,
    meeting,
    report,
    report,
    report,
    anything,
    story_notes,
)


def repeat(rng: random.Random) -> tuple[str, str]:
    """A request to repeat a text, as practice in copying, which summaries need."""
    text = _salad(rng) if rng.random() < 0.5 else _statement(rng)
    question = expand(rng, "{Repeat after me|Repeat|Say|Copy this|Echo|Repeat this|Write}:")
    return question + rng.choice((" ", " ", "\n")) + text, text


def notes(rng: random.Random) -> tuple[str, str, str]:
    """Return the notes, the instruction and the answer separately, since noise is added only to the instruction."""
    text, answer = rng.choice(KINDS)(rng)
    return text, expand(rng, rng.choice(INSTRUCTIONS)), answer
