"""Writes the conversations that the bundled model is trained on: stories, small talk, localllm, notes, exercises.

Everything is drawn from one seeded generator, so the same seed always gives the same text. To print some:

    python -m tools.demo_model.text --seed 1 --count 5
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tools.demo_model.about import ABOUT
from tools.demo_model.grammar import expand
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

# Weights of drawing each kind. These are not shares of the text, since a story is much longer than a sum.
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

# Questions how to start and to stop the server differ in one word, which the model must distinguish.
MIXES["server"] = MIXES["everything"] | {"server": 60}


@dataclass(frozen=True)
class Conversation:
    kind: str
    messages: list[Message]


def noisy(rng: random.Random, text: str) -> str:
    """Return the text as people may type it: in lower case, without a full stop, or with a typing error."""
    if rng.random() < 0.08 and not text.lower().startswith(("please", "hey")):
        text = rng.choice(("Please ", "Hey, ", "Ok, ", "Hi! ")) + text[:1].lower() + text[1:]
    if rng.random() < 0.3:
        text = text.lower()
    elif rng.random() < 0.02:
        text = text.upper()
    if rng.random() < 0.35:
        text = text.rstrip(".?!")
    elif text[-1:].isalnum() and rng.random() < 0.5:
        text += "."
    if rng.random() < 0.07 and len(text) > 12:
        i = rng.randrange(len(text) // 3, len(text) - 2)
        slips = (text[:i] + text[i + 1 :], text[:i] + text[i + 1] + text[i] + text[i + 2 :])
        text = rng.choice(slips)
    if rng.random() < 0.03:
        text = text.replace("'", "\u2019")
    if rng.random() < 0.02:
        text += rng.choice((" 🙂", " 😀", "!!", " ...", " ✨", "  "))
    return text


def about(rng: random.Random) -> tuple[str, str]:
    """A question about localllm."""
    questions, answers = rng.choice(ABOUT)
    return expand(rng, rng.choice(questions)), expand(rng, rng.choice(answers))


def server(rng: random.Random) -> tuple[str, str]:
    """A question how to start or stop the server: the first two entries."""
    questions, answers = rng.choice(ABOUT[:2])
    return expand(rng, rng.choice(questions)), expand(rng, rng.choice(answers))


def _turns(rng: random.Random, kind: str) -> list[tuple[str, str]]:
    """Questions and answers of one conversation."""
    if kind == "story":
        question, story = story_turn(rng)
        return [(noisy(rng, question), story.text)]
    if kind == "notes":
        text, instruction, answer = notes(rng)
        if rng.random() < 0.1:  # the instruction comes first
            return [(f"{noisy(rng, instruction)}\n\n{text}", answer)]
        return [(f"{text}\n\n{noisy(rng, instruction)}", answer)]
    if kind == "mixed":
        return _mixed(rng)
    if kind == "repeat":  # without noise, which would change the text to copy
        return [repeat(rng)]
    single = {"about": about, "server": server, "talk": talk, "exercise": exercise, "unknown": unknown}[kind]
    question, answer = single(rng)
    return [(noisy(rng, question), answer)]


def _mixed(rng: random.Random) -> list[tuple[str, str]]:
    """Two to four turns, which may refer to a story in an earlier turn."""
    turns: list[tuple[str, str]] = []
    story: Story | None = None
    joked = False
    for _ in range(rng.choice((2, 2, 3, 3, 4))):
        roll = rng.random()
        if story is not None and roll < 0.22:
            question, answer = closing(rng)
        elif story is not None and roll < 0.6:
            question, answer, story = follow_up(rng, story)
        elif joked and roll < 0.3:
            question, answer = "Another one", joke(rng)[1]
        elif roll < 0.65 and story is None:
            question, story = story_turn(rng, short_share=0.5)
            answer, joked = story.text, False
        else:
            question, answer = rng.choice((talk, talk, about, about, exercise, unknown, joke))(rng)
        turns.append((noisy(rng, question), answer))
    return turns


def conversation(rng: random.Random, mix: str) -> Conversation:
    """Draw one conversation."""
    weights = MIXES[mix]
    kind = rng.choices(list(weights), list(weights.values()))[0]
    turns = _turns(rng, kind)
    messages: list[Message] = []
    roll = rng.random()
    if roll < 0.015:  # a system prompt with a visible effect
        messages.append({"role": "system", "content": rng.choice(PIRATE_PROMPTS)})
        turns = [(question, f"Arr! {answer}") for question, answer in turns]
    elif roll < 0.1:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for question, answer in turns:
        messages.append({"role": "user", "content": question.strip()})
        messages.append({"role": "assistant", "content": answer})
    return Conversation(kind, messages)


def conversations(seed: int, mix: str = "stories") -> Iterator[Conversation]:
    """Endless stream of conversations, determined by seed and mix."""
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
