"""Write the conversations the boxed model learns from: stories, small talk, localllm, notes, exercises.

Everything is drawn from one seeded generator, so a seed names a text for ever. To look at some:

    python -m tools.demo_model.text --seed 1 --count 5
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tools.demo_model.about import ABOUT
from tools.demo_model.grammar import expand
from tools.demo_model.noise import noisy
from tools.demo_model.notes import notes, repeat
from tools.demo_model.simple import exercise
from tools.demo_model.stories import Story, follow_up, story_turn
from tools.demo_model.talk import closing, joke, talk, unknown

Message = dict[str, str]

TRAIN_SEED = 1
HELD_OUT_SEED = 1_000_003

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are demo, a small and friendly model.",
    "You are a friendly storyteller.",
    "Answer briefly.",
    "Be kind and use simple words.",
    "You are a helpful assistant. Answer in English.",
)
PIRATE_PROMPTS = ("You are a pirate.", "Talk like a pirate.", "You are a pirate. Answer like one.")

# How often each kind is drawn; a story is many times longer than a sum, so this is not its share of the text.
MIXES = {
    "stories": {
        "story": 30,
        "about": 20,
        "talk": 14,
        "notes": 18,
        "exercise": 14,
        "unknown": 10,
        "mixed": 16,
        "repeat": 0,
    },
    "copying": {
        "story": 24,
        "about": 18,
        "talk": 14,
        "notes": 50,
        "exercise": 14,
        "unknown": 12,
        "mixed": 12,
        "repeat": 50,
    },
    "everything": {
        "story": 34,
        "about": 28,
        "talk": 22,
        "notes": 40,
        "exercise": 20,
        "unknown": 26,
        "mixed": 26,
        "repeat": 20,
    },
    "practice": {
        "story": 12,
        "about": 8,
        "talk": 6,
        "notes": 50,
        "exercise": 6,
        "unknown": 6,
        "mixed": 4,
        "repeat": 200,
    },
}

# To start and to stop are one word apart, and the difference matters.
MIXES["server"] = MIXES["everything"] | {"server": 60}


@dataclass(frozen=True)
class Conversation:
    kind: str
    messages: list[Message]


def about(rng: random.Random) -> tuple[str, str]:
    """A question about localllm."""
    questions, answers = rng.choice(ABOUT)
    return expand(rng, rng.choice(questions)), expand(rng, rng.choice(answers))


def server(rng: random.Random) -> tuple[str, str]:
    """How to start or to stop the server: the first two entries."""
    questions, answers = rng.choice(ABOUT[:2])
    return expand(rng, rng.choice(questions)), expand(rng, rng.choice(answers))


def _turns(rng: random.Random, kind: str) -> list[tuple[str, str]]:
    """The user's text and the answer of every turn of one conversation."""
    if kind == "story":
        asked, story = story_turn(rng)
        return [(noisy(rng, asked), story.text)]
    if kind == "notes":
        text, instruction, answer = notes(rng)
        if rng.random() < 0.1:  # the instruction may also come first
            return [(f"{noisy(rng, instruction)}\n\n{text}", answer)]
        return [(f"{text}\n\n{noisy(rng, instruction)}", answer)]
    if kind == "mixed":
        return _mixed(rng)
    if kind == "repeat":  # no noise: it would touch what is to be copied
        return [repeat(rng)]
    single = {"about": about, "server": server, "talk": talk, "exercise": exercise, "unknown": unknown}[kind]
    asked, answer = single(rng)
    return [(noisy(rng, asked), answer)]


def _mixed(rng: random.Random) -> list[tuple[str, str]]:
    """Two to four turns; once a story is told, a turn may refer to it."""
    turns: list[tuple[str, str]] = []
    story: Story | None = None
    joked = False
    for _ in range(rng.choice((2, 2, 3, 3, 4))):
        roll = rng.random()
        if story is not None and roll < 0.22:
            asked, answer = closing(rng)
        elif story is not None and roll < 0.6:
            asked, answer, story = follow_up(rng, story)
        elif joked and roll < 0.3:
            asked, answer = "Another one", joke(rng)[1]
        elif roll < 0.65 and story is None:
            asked, story = story_turn(rng, short_share=0.5)
            answer, joked = story.text, False
        else:
            asked, answer = rng.choice((talk, talk, about, about, exercise, unknown, joke))(rng)
        turns.append((noisy(rng, asked), answer))
    return turns


def conversation(rng: random.Random, mix: str) -> Conversation:
    """Draw one conversation."""
    weights = MIXES[mix]
    kind = rng.choices(list(weights), list(weights.values()))[0]
    turns = _turns(rng, kind)
    messages: list[Message] = []
    roll = rng.random()
    if roll < 0.015:  # a system prompt with an effect that one can see
        messages.append({"role": "system", "content": rng.choice(PIRATE_PROMPTS)})
        turns = [(asked, f"Arr! {answer}") for asked, answer in turns]
    elif roll < 0.1:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for asked, answer in turns:
        messages.append({"role": "user", "content": asked.strip()})
        messages.append({"role": "assistant", "content": answer})
    return Conversation(kind, messages)


def conversations(seed: int, mix: str = "stories") -> Iterator[Conversation]:
    """An endless stream of conversations, the same for the same seed and mix."""
    rng = random.Random(seed)
    while True:
        yield conversation(rng, mix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=TRAIN_SEED)
    parser.add_argument("--count", type=int, default=5)
    options = parser.parse_args()
    for drawn, _ in zip(conversations(options.seed), range(options.count), strict=False):
        print(f"=== {drawn.kind}")
        for message in drawn.messages:
            print(f"[{message['role']}] {message['content']}")


if __name__ == "__main__":
    main()
