"""A model in memory, and leases of it: it stays loaded for as long as somebody has one. `models.py` says which are
loaded when. On the event loop."""

import asyncio
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import Protocol

from localllm.api.tokens import TokenTexts
from localllm.errors import UnsupportedModel
from localllm.llm.embedder import Embedder
from localllm.llm.embedding_inputs import EmbeddingModel
from localllm.llm.llm import LLM
from localllm.modelfile.edition import Edition
from localllm.server.request_stats import current_request_stats

FALLBACK_TEMPLATE_NAME = "plain"
FALLBACK_TEMPLATE = """\
{%- if bos_token is defined and bos_token %}{{ bos_token }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == "system" %}{{ message.content }}
{% else %}{{ {"user": "User", "assistant": "Assistant"}.get(message.role, "Tool") }}: {{ message.content or "" }}
{% endif -%}
{%- endfor -%}
Assistant:"""
FALLBACK_STOP = "\nUser:"


@dataclass(eq=False)
class LoadedModel:
    """A model in memory, and who uses it."""

    path_key: str  # where it lies
    name: str  # under which it was asked for first
    llm: LLM | Embedder
    keep_alive: float  # seconds after its last use; math.inf: for ever
    loaded_at: float = field(default_factory=time.time)  # seconds since 1970
    last_used_at: float = field(default_factory=time.time)
    users: int = 0
    token_texts: TokenTexts = field(init=False)
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.token_texts = TokenTexts(self.llm.tokenizer)

    @property
    def expires_at(self) -> float:
        """Seconds since 1970; math.inf: never."""
        return self.last_used_at + self.keep_alive

    @property
    def has_failed(self) -> bool:
        """Has its engine ended, though nobody let go of it?"""
        return isinstance(self.llm, LLM) and self.llm.worker.closed

    @property
    def chat_model(self) -> LLM:
        """Raises UnsupportedModel for one that gives vectors alone."""
        if isinstance(self.llm, Embedder):
            raise UnsupportedModel(f'"{self.name}" does not support chat', "it gives vectors: ask for embeddings")
        return self.llm

    def add_users(self, users: int = 1) -> None:
        self.users += users
        if self.timer and self.users:
            self.timer.cancel()


class LeaseHolder(Protocol):
    """Whoever lends models."""

    def release(self, loaded: LoadedModel) -> None: ...


class Lease:
    """A model that stays loaded until the end of `with`, or `release`, which may be called again."""

    def __init__(self, models: LeaseHolder, loaded: LoadedModel, name: str, edition: Edition | None = None):
        """Takes over one of the model's users. name: as the client sent it, which stands for the edition."""
        self.models = models
        self.loaded = loaded
        self.name = name
        self.edition = edition
        self.token_texts = loaded.token_texts
        self.is_released = False

    @cached_property
    def llm(self) -> LLM:
        """The model, or its edition. Raises as `LoadedModel.chat_model`."""
        model = self.loaded.chat_model
        return model.with_edition(self.edition) if self.edition else model

    def ensure_chat_template(self) -> None:
        """Give a model without a chat template a plain one, and note that in the statistics of the request."""
        if self.llm.has_chat_template:
            return
        own = self.llm.edition or Edition("")
        parameters = {"stop": [FALLBACK_STOP], **own.parameters}
        self.edition = replace(own, template=FALLBACK_TEMPLATE, parameters=parameters)
        self.llm = self.llm.with_edition(self.edition)
        if account := current_request_stats():
            account.template = FALLBACK_TEMPLATE_NAME

    @property
    def embedder(self) -> EmbeddingModel:
        return self.loaded.llm

    def renew(self) -> "Lease":
        """One more of the same, for what goes on after this one's end."""
        self.loaded.add_users()
        return Lease(self.models, self.loaded, self.name, self.edition)

    def release(self) -> None:
        if not self.is_released:
            self.is_released = True
            self.models.release(self.loaded)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
