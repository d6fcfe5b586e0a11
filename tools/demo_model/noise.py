"""What people do to a prompt before they send it: lower case, no full stop, a slip of the finger."""

import random

_ENDINGS = (" 🙂", " 😀", "!!", " ...", " ✨", "  ")


def noisy(rng: random.Random, text: str) -> str:
    """A user's spelling of `text`: mostly as it is, sometimes careless."""
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
        at = rng.randrange(len(text) // 3, len(text) - 2)
        slips = (text[:at] + text[at + 1 :], text[:at] + text[at + 1] + text[at] + text[at + 2 :])
        text = rng.choice(slips)
    if rng.random() < 0.03:
        text = text.replace("'", "\u2019")
    if rng.random() < 0.02:
        text += rng.choice(_ENDINGS)
    return text
