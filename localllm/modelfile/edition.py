"""An edition of a model: the same weights with a system prompt, a template, parameters or messages of its own, as
a Modelfile says it. Plain data; where editions are kept is `hub/made.py`'s business."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from localllm.errors import UsageError
from localllm.modelfile.options import check_options

ROLES = ("system", "user", "assistant")
TEXT_LIMIT = 2**20  # characters of a system prompt, a template, a message or a licence
MAX_MESSAGES = 1024
GO_TEMPLATE = re.compile(
    r"\{\{-?\s*(\.|\$|(if|range|with|else if)\s+(\(|\.|\$|not|and|or|eq|gt|lt|len)|end\b|else\b)"
)

Message = Mapping[str, str]


@dataclass(frozen=True)
class Edition:
    source: str
    """What is loaded: a name of the catalogue, ORG/REPO, or a path from the root."""

    parent: str = ""
    """What its maker called the source."""

    system: str = ""
    template: str = ""
    """Jinja; "": the model's own."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    """In Ollama's words, `modelfile.options`."""

    messages: tuple[Message, ...] = ()
    """What stands before every conversation, each with `role` and `content`."""

    license: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for what makes no sense."""
        object.__setattr__(self, "parameters", check_options(self.parameters))
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "license", tuple(self.license))
        if GO_TEMPLATE.search(self.template):
            raise UsageError(
                "the template is one of Go, as Ollama's are",
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
            raise UsageError("a text of the edition is too long", f"the limit is {TEXT_LIMIT:,} characters")

    @property
    def context(self) -> int | None:
        """Tokens of prompt and answer that it asks room for."""
        return self.parameters.get("num_ctx")

    def prepend_to(self, messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """A conversation with what stands before it; a system prompt of its own replaces the edition's."""
        own = messages and messages[0].get("role") == "system"
        system = [{"role": "system", "content": self.system}] if self.system and not own else []
        return (
            [*system, *messages[:1], *self.messages, *messages[1:]]
            if own
            else [*system, *self.messages, *messages]
        )

    def merged_over(self, other: "Edition") -> "Edition":
        """This one on top of the edition that it was made from: what it says stands, the rest is the other's."""
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
    """Raises KeyError, TypeError, ValueError, AttributeError or UsageError where these are none."""
    found = Edition(**fields)
    texts = [found.source, found.parent, found.system, found.template, *found.license]
    texts += [text for message in found.messages for text in message.values()]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a text is none")
    return found
