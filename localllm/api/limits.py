"""How much one body may ask, whichever API it is in: more would cost others, and no answer needs it.

What a request's own classes bound stands in `request.py`: ranges of numbers, and sizes and depths of schemas and
grammars. How long a body may be is the server's.
"""

from collections.abc import Sized

from localllm.errors import BadField

MAX_PROMPTS = 128
MAX_ANSWERS = 128  # to all prompts together
MAX_LOGPROBS = 20  # alternatives to each token
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_TOOLS = 128  # as OpenAI has it
MAX_TEMPLATE_ARGUMENTS = 64
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024  # of each
MAX_STOP_IDS = 1024
MAX_LOGIT_BIASES = 4096


def check_count(limit: int, param: str, things: Sized) -> None:
    """Raises BadField where there are more of them."""
    if len(things) > limit:
        raise BadField(param, f"{param} has {len(things):,} entries", f"send at most {limit:,}")


def check_stop_strings(param: str, stops: list[str]) -> None:
    """Raises BadField where they are too many or too long."""
    check_count(MAX_STOPS, param, stops)
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        what = f"{param} has a text of {max(map(len, stops)):,} characters"
        raise BadField(param, what, f"send at most {MAX_STOP_CHARACTERS:,}")
