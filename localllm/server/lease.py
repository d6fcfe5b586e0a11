"""Loaded models and leases on them. A model stays loaded while it is leased; `models.py` decides the rest. Only
for the event loop."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import Protocol

from localllm.api.tokens import TokenTexts
from localllm.errors import BadField, UnsupportedModel
from localllm.llm.embedder import Embedder
from localllm.llm.embedding_inputs import EmbeddingModel
from localllm.llm.llm import LLM
from localllm.modelfile.edition import Edition
from localllm.request import ChatRequest
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
    """A model in memory."""

    path_key: str  # identifies the model, as in ModelRef.key
    name: str  # as in the request that loaded it
    llm: LLM | Embedder
    keep_alive: float  # seconds after its last use; math.inf: forever
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
        """Whether its engine has ended without being closed."""
        return isinstance(self.llm, LLM) and self.llm.worker.closed

    @property
    def chat_model(self) -> LLM:
        """The model as an LLM. Raises UnsupportedModel for an embedding model."""
        if isinstance(self.llm, Embedder):
            raise UnsupportedModel(
                f'"{self.name}" does not support chat', "it is an embedding model: request embeddings"
            )
        return self.llm

    def add_users(self, users: int = 1) -> None:
        self.users += users
        if self.timer and self.users:
            self.timer.cancel()


class LeaseHolder(Protocol):
    """The owner of loaded models, to which a lease is returned."""

    def release(self, loaded: LoadedModel) -> None: ...


class Lease:
    """Keeps a model loaded until the end of `with`, or `release`, which may be called repeatedly."""

    def __init__(self, models: LeaseHolder, loaded: LoadedModel, name: str, edition: Edition | None = None):
        """Take over one count of `loaded.users`. name: as the client sent it; edition: what that name selects."""
        self.models = models
        self.loaded = loaded
        self.name = name
        self.edition = edition
        self.token_texts = loaded.token_texts
        self.is_released = False

    @cached_property
    def llm(self) -> LLM:
        """The model, or its edition. Raises UnsupportedModel for an embedding model."""
        model = self.loaded.chat_model
        return model.with_edition(self.edition) if self.edition else model

    def ensure_chat_template(self) -> None:
        """Give a model without a chat template a plain one, and record that for log and response header."""
        if self.llm.has_chat_template:
            return
        own = self.llm.edition or Edition("")
        parameters = {"stop": [FALLBACK_STOP], **own.parameters}
        self.edition = replace(own, template=FALLBACK_TEMPLATE, parameters=parameters)
        self.llm = self.llm.with_edition(self.edition)
        if stats := current_request_stats():
            stats.template = FALLBACK_TEMPLATE_NAME

    async def render(self, chat: ChatRequest) -> tuple[str, list[int]]:
        """Text and token ids of a chat's prompt."""
        self.ensure_chat_template()
        tokens = await asyncio.to_thread(self.llm.encode, chat)
        return await self.detokenize(tokens), tokens

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of token ids, with special tokens. Raises BadField for an id that is out of range."""
        llm = self.loaded.llm
        if (
            invalid := next((token for token in tokens if not 0 <= token < llm.config.vocab_size), None)
        ) is not None:
            remedy = f"its ids are 0 to {llm.config.vocab_size - 1}"
            raise BadField("tokens", f"{invalid} is not a token of this model", remedy)
        return await asyncio.to_thread(llm.tokenizer.decode, tokens, skip_special=False)

    @property
    def embedder(self) -> EmbeddingModel:
        return self.loaded.llm

    def renew(self) -> "Lease":
        """A second lease of the same model, for a response that outlives this one."""
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
