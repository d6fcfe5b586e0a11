"""Observes one loaded model: its logits, as a `quality.measure.LogitsFunction`; its answers, layer outputs and
speed.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from localllm.llm.llm import LLM
from localllm.quality.text import Windows
from localllm.request import SamplingParams
from localllm.runtime.probes import capture_layer_outputs, stream_logits

LOGITS_PER_CHUNK = 2**25  # logits at once: 134 MB
PROBED_LAYER_TOKENS = 128  # tokens at the beginning of the text whose layer outputs are captured
PROMPT_TOKENS, ANSWER_TOKENS = 32, 64


class LogitsReader:
    """A model that reads windows of text, as a `measure.LogitsFunction`."""

    def __init__(self, llm: LLM, vocab: int):
        """vocab: number of tokens to give logits for."""
        self.llm = llm
        self.vocab = vocab
        self.tokens = 0
        self.seconds = 0.0

    def __call__(self, ids: Sequence[int]) -> Iterator[Tensor]:
        worker = self.llm.worker
        pieces = stream_logits(worker.engine, ids, max(1, LOGITS_PER_CHUNK // self.vocab))
        try:
            while True:
                start = time.perf_counter()
                piece = worker.call(lambda: next(pieces, None))
                if piece is None:
                    break
                self.seconds += time.perf_counter() - start
                self.tokens += len(piece)
                yield piece[:, : self.vocab]
        finally:
            worker.call(pieces.close)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class ProbeResult:
    dtype: str
    kv_dtype: str | None  # of the KV cache, if it differs
    decode_tokens_per_s: float  # for the first answer
    answers: list[tuple[int, ...]]  # token ids, to each prompt
    layers: list[Tensor]  # [T, hidden] float32, after each layer


def probe(llm: LLM, windows: Windows, prompts: Sequence[Sequence[int]]) -> ProbeResult:
    """Return greedy answers to the prompts, as long as the context allows, and the layers' outputs."""
    available = llm.context - max(map(len, prompts))
    greedy = SamplingParams(temperature=0, max_tokens=min(ANSWER_TOKENS, available), ignore_eos=True)
    completions = [llm.generate(prompt, greedy) for prompt in prompts]
    layers = llm.worker.call(
        lambda: capture_layer_outputs(llm.worker.engine, windows.ids[0][:PROBED_LAYER_TOKENS])
    )
    kv_dtype = llm.kv_dtype if llm.kv_dtype != llm.dtype else None
    return ProbeResult(
        llm.dtype,
        kv_dtype,
        completions[0].metrics.tokens_per_s,
        [completion.token_ids for completion in completions],
        layers,
    )


def choose_prompts(windows: Windows) -> list[tuple[int, ...]]:
    """Return the beginning of the text, and of its middle window."""
    chosen = dict.fromkeys((windows.ids[0], windows.ids[len(windows.ids) // 2]))
    return [ids[: min(PROMPT_TOKENS, max(1, len(ids) // 2))] for ids in chosen]
