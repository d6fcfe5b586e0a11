"""What is seen of one loaded model: its logits, as a function that `quality.measure` takes; its answers, what
comes out of its layers, and how fast it is.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from localllm.llm.llm import LLM
from localllm.quality.text import Windows
from localllm.request import SamplingParams
from localllm.runtime.probes import capture_layer_outputs, stream_logits

LOGITS_PER_CHUNK = 2**25  # logits at once, 134 MB
PROBED_LAYER_TOKENS = 128  # at the begin of the text, whose layers are looked at
PROMPT_TOKENS, ANSWER_TOKENS = 32, 64


class LogitsReader:
    """A model that reads windows of text: token ids -> logits, as `measure.Logits` describes it."""

    def __init__(self, llm: LLM, vocab: int):
        """vocab: of how many tokens logits are given."""
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
    kv_dtype: str | None  # of keys and values, if it is another
    decode_tokens_per_s: float  # of the first answer
    answers: list[tuple[int, ...]]  # token ids, to each prompt
    layers: list[Tensor]  # [T, hidden] float32, after each layer


def probe(llm: LLM, windows: Windows, prompts: Sequence[Sequence[int]]) -> ProbeResult:
    """Greedy answers to the prompts as long as the context allows, and the layers' outputs."""
    room = llm.context - max(map(len, prompts))
    greedy = SamplingParams(temperature=0, max_tokens=min(ANSWER_TOKENS, room), ignore_eos=True)
    done = [llm.generate(prompt, greedy) for prompt in prompts]
    layers = llm.worker.call(
        lambda: capture_layer_outputs(llm.worker.engine, windows.ids[0][:PROBED_LAYER_TOKENS])
    )
    kept = llm.kv_dtype if llm.kv_dtype != llm.dtype else None
    return ProbeResult(llm.dtype, kept, done[0].metrics.tokens_per_s, [one.token_ids for one in done], layers)


def choose_prompts(windows: Windows) -> list[tuple[int, ...]]:
    """The begin of the text, and of the window in its middle."""
    chosen = dict.fromkeys((windows.ids[0], windows.ids[len(windows.ids) // 2]))
    return [ids[: min(PROMPT_TOKENS, max(1, len(ids) // 2))] for ids in chosen]
