"""What is said of an offered model in a line. Only what is known; knows no screen."""

from localllm.formatting import format_bytes
from localllm.tui.machine import ModelOffer
from localllm.visible import one_line


def memory_and_speed(offer: ModelOffer) -> str:
    """`fits: 5.2 of 23.5 GB; about 118 tokens/s`, or what of it is known."""
    said = ""
    if offer.needs_bytes is not None and offer.free_bytes is not None:
        needs, free = format_bytes(offer.needs_bytes), format_bytes(offer.free_bytes)
        said = f"fits: {needs} of {free}" if offer.fits else f"does not fit: {needs} needed, {free} are free"
    speed = f"about {approximate_rate(offer.tokens_per_s)}" if offer.tokens_per_s else ""
    return f"{said}; {speed}" if said and speed else said or speed


def approximate_rate(tokens_per_s: float) -> str:
    """Of a guess: no digits that nobody knows."""
    return f"{tokens_per_s:.0f} tokens/s" if tokens_per_s >= 2 else f"{tokens_per_s:.1f} tokens/s"


def parameters_and_license(offer: ModelOffer) -> str:
    """`4.02B parameters · apache-2.0`."""
    licence = one_line(offer.license) if offer.license else "licence not known"
    return f"{offer.parameters} parameters · {licence}" if offer.parameters != "-" else licence
