"""Configuration of a server process, as data: `localllm serve` builds its application from it, and so does
every replica, in a process of its own."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette

from localllm.server.access import AccessPolicy
from localllm.server.app import create_app
from localllm.server.models import DEFAULT_KEEP_ALIVE_S, ModelPool
from localllm.server.prometheus import TokenPrice
from localllm.server.slots import SlotFiles
from localllm.settings import Settings

if TYPE_CHECKING:
    from localllm.hub.resolve import ModelRef
    from localllm.llm.embedder import Embedder
    from localllm.llm.llm import LLM


@dataclass(frozen=True)
class ServerSetup:
    """The options of a server."""

    models: Sequence[str]  # loaded at the start
    load: "Callable[[str | ModelRef, int | None], LLM | Embedder]"
    access: AccessPolicy
    _: KW_ONLY
    keep_alive_s: float = DEFAULT_KEEP_ALIVE_S
    max_models: int | None = None
    log_prompts: bool = False
    strict: bool = False
    slot_folder: Path | None = None
    token_price: TokenPrice | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables to set before the first model is loaded."""

    def behind_front(self, environment: Mapping[str, str]) -> "ServerSetup":
        """The setup of a replica. environment: variables that it sets"""
        return replace(self, access=self.access.behind_front(), environment=environment)

    def build(self) -> tuple[Starlette, ModelPool]:
        """Load the models and build the application. Raises what `load` raises, and UsageError for a folder of
        slots that cannot be used."""
        os.environ.update(self.environment)
        settings = Settings.from_environment()
        slot_files = SlotFiles(self.slot_folder) if self.slot_folder else None
        warn: Callable[..., Any] = logging.getLogger("localllm.models").warning
        pool = ModelPool(
            self.load,
            keep_alive=self.keep_alive_s,
            max_models=self.max_models,
            record_steps=lambda llm: llm.record_steps(settings.home, warn),
        )
        for model in self.models:
            pool.add_preloaded(self.load(model, None), model)
        app = create_app(
            pool,
            self.access,
            log_prompts=self.log_prompts,
            strict=self.strict,
            slot_files=slot_files,
            token_price=self.token_price,
        )
        return app, pool
