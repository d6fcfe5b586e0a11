"""What somebody wants made: an edition, its name, and what else there is to do for it. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from localllm.modelfile.edition import Edition


@dataclass(frozen=True)
class CreateRequest:
    """What is to be made."""

    name: str
    edition: Edition
    """Its source is the name of a model, or "" where `files` are one."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Names with digests of contents that are here."""

    quant: str = ""
    """`int8`, `int4`, or "" for the weights as they are."""
