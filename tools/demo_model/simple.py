"""Small exercises with one right answer: counting, sums, lists of common things."""

import random
from collections.abc import Callable

from tools.demo_model.grammar import capital, expand, join_and, words
from tools.demo_model.words import ANIMALS

DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")
COLOURS = words("red blue green yellow orange purple pink brown black white grey")
FRUITS = words("apples pears plums cherries bananas oranges grapes melons peaches lemons")
NUMBERS = words("zero one two three four five six seven eight nine ten")
OPPOSITES = words(
    """big:small hot:cold day:night up:down fast:slow old:young good:bad happy:sad open:closed full:empty
light:dark long:short high:low loud:quiet wet:dry hard:soft left:right early:late"""
)
SOUNDS = words(
    """cat:meow dog:woof cow:moo duck:quack sheep:baa owl:hoo pig:oink frog:croak bee:buzz mouse:squeak
lion:roar horse:neigh"""
)

Pair = tuple[str, str]


def count(rng: random.Random) -> Pair:
    top = rng.choice((3, 5, 5, 10, 10, 10, 12, 15, 20))
    if rng.random() < 0.25:
        question = f"{rng.choice(('Count down from', 'Count backwards from'))} {top}."
        return question, ", ".join(str(n) for n in range(top, 0, -1)) + "."
    question = expand(
        rng, "{Count to <n>|Count from 1 to <n>|Can you count to <n>?|Count up to <n>}", {"n": str(top)}
    )
    return question, ", ".join(str(n) for n in range(1, top + 1)) + "."


def add(rng: random.Random) -> Pair:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    words = {"a": str(a), "b": str(b)}
    if rng.random() < 0.2:
        words = {"a": NUMBERS[a], "b": NUMBERS[b]}
    question = expand(rng, "{What is|How much is|Calculate|What's|} {<a> plus <b>|<a> + <b>|<a>+<b>}{?|}", words)
    return question, f"{a} plus {b} is {a + b}."


def subtract(rng: random.Random) -> Pair:
    b = rng.randint(0, 10)
    a = rng.randint(b, 10)
    question = expand(
        rng,
        "{What is|How much is|Calculate|What's} {<a> minus <b>|<a> - <b>}{?|}",
        {"a": str(a), "b": str(b)},
    )
    return question, f"{a} minus {b} is {a - b}."


def too_large(rng: random.Random) -> Pair:
    """Sums that the model cannot compute, answered with an explanation instead of a guess."""
    a = rng.choice((rng.randint(11, 99), rng.randint(11, 99), rng.randint(100, 9999)))
    b = rng.choice((rng.randint(2, 10), rng.randint(11, 99), rng.randint(100, 9999)))
    sign = rng.choice((" + ", " * ", " times ", " plus ", " minus ", " divided by ", "*", "/", "+", " - ", "-"))
    if rng.random() < 0.25:  # small numbers, but neither added nor subtracted
        a, sign = rng.randint(1, 10), rng.choice((" * ", " times ", " divided by ", " / ", "*", "/", " x "))
        b = rng.randint(1, 10)
    elif rng.random() < 0.3:
        a, b = b, a
    opening = rng.choice(("What is", "What is", "What's", "How much is", "Calculate", "Compute", ""))
    question = f"{opening} {a}{sign}{b}{rng.choice(('?', ''))}".strip()
    return question, "I am only a small demo model, and I can only add and subtract numbers up to ten."


def larger(rng: random.Random) -> Pair:
    a, b = rng.sample(range(1, 21), 2)
    question = expand(
        rng, "{Which is|What is|Which number is} {larger|bigger}, <a> or <b>?", {"a": str(a), "b": str(b)}
    )
    return question, f"{max(a, b)} is larger than {min(a, b)}."


def name_some(rng: random.Random) -> Pair:
    kind, words = rng.choice((("colours", COLOURS), ("colors", COLOURS), ("animals", ANIMALS), ("fruits", FRUITS)))
    number = rng.choice((2, 3, 3, 3, 4, 5))
    digits = rng.choice((str(number), NUMBERS[number]))
    question = expand(rng, "{Name|List|Tell me|Give me|Say} <n> <kind>{.|}", {"n": digits, "kind": kind})
    return question, capital(join_and(rng.sample(words, number))) + "."


def series(rng: random.Random) -> Pair:
    if rng.random() < 0.5:
        question = "{What are|List|Name|Tell me|Say} the days of the week{.|?|}"
        return expand(rng, question), f"The days of the week are {join_and(DAYS)}."
    if rng.random() < 0.5:
        question = "{What are|List|Name|Tell me|Say} the months{ of the year|}{.|?|}"
        return expand(rng, question), f"The months of the year are {join_and(MONTHS)}."
    question = "{What are|List|Name|Tell me|Say} the {|four }seasons{.|?|}"
    return expand(rng, question), "The seasons are spring, summer, autumn and winter."


def neighbour(rng: random.Random) -> Pair:
    words = rng.choice((DAYS, DAYS, MONTHS))
    index = rng.randrange(len(words))
    unit = "day" if words is DAYS else "month"
    side, step = rng.choice((("after", 1), ("after", 1), ("before", -1)))
    other = words[(index + step) % len(words)]
    question = expand(rng, f"{{What|Which {unit}}} comes {side} {words[index]}?")
    return question, f"{other} comes {side} {words[index]}."


def opposite(rng: random.Random) -> Pair:
    a, b = rng.choice(OPPOSITES).split(":")
    if rng.random() < 0.5:
        a, b = b, a
    question = expand(rng, "{What is|What's|Tell me} the opposite of <a>{?|}", {"a": a})
    return question, f"The opposite of {a} is {b}."


def sound(rng: random.Random) -> Pair:
    animal, noise = rng.choice(SOUNDS).split(":")
    question = expand(rng, "{What does|What sound does} {a|the} <a> {say|make}?", {"a": animal})
    return question, f"The {animal} says {noise}."


def alphabet(rng: random.Random) -> Pair:
    question = expand(rng, "{Say|Tell me|What is|Write} the alphabet{.|?|}")
    return (
        question,
        "The alphabet is A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y and Z.",
    )


EXERCISES: tuple[Callable[[random.Random], Pair], ...] = (
    *(add,) * 4,
    *(subtract,) * 2,
    *(too_large,) * 4,
    *(count, larger, name_some, series, neighbour, opposite) * 2,
    sound,
    alphabet,
)


def exercise(rng: random.Random) -> Pair:
    return rng.choice(EXERCISES)(rng)
