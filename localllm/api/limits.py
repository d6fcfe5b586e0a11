"""How much one body may ask, whichever API it is in: more would cost others, and no answer needs it.

What a request's own classes bound stands in `request.py`: ranges of numbers, and sizes and depths of schemas and
grammars. How long a body may be is the server's.
"""

from collections.abc import Sized

from localllm.api.body import BadField

PROMPTS = 128
ANSWERS = 128  # to all prompts together
LOGPROBS = 20  # alternatives to each token
MESSAGES = 4096
PARTS = 1024  # of one message
TOOLS = 128  # as OpenAI has it
TEMPLATE_ARGUMENTS = 64
STOPS = 64
STOP_CHARACTERS = 1024  # of each
STOP_IDS = 1024
BIASES = 4096


def at_most(limit: int, param: str, things: Sized) -> None:
    """Raises BadField where there are more of them."""
    if len(things) > limit:
        raise BadField(param, f"{param} has {len(things):,} entries", f"send at most {limit:,}")


def check_stops(param: str, stops: list[str]) -> None:
    """Raises BadField where they are too many or too long."""
    at_most(STOPS, param, stops)
    if any(len(stop) > STOP_CHARACTERS for stop in stops):
        what = f"{param} has a text of {max(map(len, stops)):,} characters"
        raise BadField(param, what, f"send at most {STOP_CHARACTERS:,}")
