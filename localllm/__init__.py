"""Run open-weight language models on the machine in front of you.

    import localllm
    llm = localllm.load("demo")
    print(llm.generate("Once upon a time", localllm.SamplingParams(max_tokens=64)).text)

The names below are imported when they are first used, so that `import localllm` needs no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "localllm.llm.llm",
    "load": "localllm.llm.loader",
    "Embedder": "localllm.llm.embedder",
    "load_embedder": "localllm.llm.embedder",
    "Embeddings": "localllm.llm.embedding_inputs",
    "Completion": "localllm.request",
    "FinishReason": "localllm.request",
    "GenerationEvent": "localllm.request",
    "SamplingParams": "localllm.request",
    "TokenLogprob": "localllm.request",
    "Metrics": "localllm.metrics",
    "LocalLLMError": "localllm.errors",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'localllm' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
