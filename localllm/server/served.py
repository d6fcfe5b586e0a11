"""What a server answers with: the one model that was loaded when it started."""

import time
from dataclasses import dataclass, field

from localllm.errors import ModelNotFound
from localllm.llm import LLM
from localllm.openai.tokens import TokenTexts


@dataclass(frozen=True)
class Served:
    llm: LLM
    since: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    texts: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", TokenTexts(self.llm.tokenizer))

    def named(self, name: str) -> LLM:
        """Raises ModelNotFound for any name but the model's own."""
        if name != self.llm.name:
            raise ModelNotFound(f"{name!r} is not served here", f"ask for {self.llm.name!r}")
        return self.llm
