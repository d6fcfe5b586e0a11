"""A customized model: the same weights with its own system prompt, template, parameters or messages, as defined by
a Modelfile. Plain data; `hub/local_names.py` stores editions.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from localllm.errors import UsageError
from localllm.modelfile.options import check_options

ROLES = ("system", "user", "assistant")
TEXT_LIMIT = 2**20  # characters per system prompt, template, message or licence
MAX_MESSAGES = 1024
GO_TEMPLATE = re.compile(
    r"\{\{-?\s*(\.|\$|(if|range|with|else if)\s+(\(|\.|\$|not|and|or|eq|gt|lt|len)|end\b|else\b)"
)

Message = Mapping[str, str]


@dataclass(frozen=True)
class Edition:
    source: str
    """The model to load: a catalog name, ORG/REPO, or an absolute path."""

    parent: str = ""
    """The source as its creator named it."""

    system: str = ""
    template: str = ""
    """Jinja; "" for the model's own."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    """In Ollama's names, see `modelfile.options`."""

    messages: tuple[Message, ...] = ()
    """Messages that precede every conversation, each with `role` and `content`."""

    license: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for invalid values."""
        object.__setattr__(self, "parameters", check_options(self.parameters))
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "license", tuple(self.license))
        if GO_TEMPLATE.search(self.template):
            raise UsageError(
                "the template is in Go's syntax, as Ollama's are",
                "write it in Jinja, or leave it out for the model's own",
            )
        if len(self.messages) > MAX_MESSAGES:
            raise UsageError(f"there are {len(self.messages)} messages", f"the limit is {MAX_MESSAGES}")
        for message in self.messages:
            if message.keys() != {"role", "content"} or message["role"] not in ROLES:
                raise UsageError(
                    f"a message is {str(dict(message))[:80]}", f"give a content and a role, {', '.join(ROLES)}"
                )
        texts = (self.system, self.template, *self.license, *(message["content"] for message in self.messages))
        if any(len(text) > TEXT_LIMIT for text in texts):
            raise UsageError("a text of the model is too long", f"the limit is {TEXT_LIMIT:,} characters")

    @property
    def context(self) -> int | None:
        """The requested capacity in tokens for prompt and answer."""
        return self.parameters.get("num_ctx")

    def prepend_to(self, messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return a conversation preceded by the edition's messages; its own system prompt replaces the
        edition's.
        """
        has_system_prompt = messages and messages[0].get("role") == "system"
        system = [{"role": "system", "content": self.system}] if self.system and not has_system_prompt else []
        return (
            [*system, *messages[:1], *self.messages, *messages[1:]]
            if has_system_prompt
            else [*system, *self.messages, *messages]
        )

    def merged_over(self, other: "Edition") -> "Edition":
        """Return this edition on top of the one it was made from: its own values take precedence."""
        return replace(
            self,
            source=other.source,
            system=self.system or other.system,
            template=self.template or other.template,
            parameters={**other.parameters, **self.parameters},
            messages=self.messages or other.messages,
            license=self.license or other.license,
        )


def to_json(edition: Edition) -> dict[str, Any]:
    return asdict(edition)


def from_json(fields: Mapping[str, Any]) -> Edition:
    """Raises KeyError, TypeError, ValueError, AttributeError or UsageError for invalid fields."""
    edition = Edition(**fields)
    texts = [edition.source, edition.parent, edition.system, edition.template, *edition.license]
    texts += [text for message in edition.messages for text in message.values()]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a text is not a string")
    return edition


@dataclass(frozen=True)
class CreateRequest:
    """A request to create a model."""

    name: str
    edition: Edition
    """Its source is a model's name, or "" if `files` are the model."""

    files: Mapping[str, str] = field(default_factory=dict)
    """File names with digests of stored contents."""

    quant: str = ""
    """`int8`, `int4`, or "" for the unchanged weights."""
