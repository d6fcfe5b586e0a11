"""A request to create a model: its edition, its name, and what else is needed. Plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from localllm.modelfile.edition import Edition


@dataclass(frozen=True)
class CreateRequest:
    """What to create."""

    name: str
    edition: Edition
    """Its source is a model's name, or "" if `files` are the model."""

    files: Mapping[str, str] = field(default_factory=dict)
    """File names with digests of stored contents."""

    quant: str = ""
    """`int8`, `int4`, or "" for the unchanged weights."""
