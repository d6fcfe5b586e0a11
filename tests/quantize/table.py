"""Measures the quality of each method by bits and group size, on two real models.

python -m tests.quantize.table     prints the tables of docs/quantize.md

Calibration and evaluation use disjoint parts of one file. The quantized model is written as dequantized float32,
and run by the engine like any other model.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

import localllm
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.cli.quantize import build_recipe
from localllm.quantize import quantizer
from localllm.quantize.layers import find_linears
from localllm.quantize.quantizer import quantize_layers
from localllm.quantize.smoothquant import fake_quantize_tokens
from localllm.quantize.source import Recipe
from localllm.runtime.kernels.norm import Norm
from localllm.runtime.layers.linear import Linear
from localllm.text.tokenizer import Tokenizer
from tests.quantize.reference import MemoryArtefact, write_plain
from tests.shared import DATA
from tests.tiny import make_engine
from tools.demo_model.chat import encode
from tools.demo_model.text import conversations

DEMO = Path(localllm.__file__).parent / "boxed/demo"
WINDOW = 256  # tokens
WINDOWS = 48  # that are judged
CALIBRATION, EVALUATION = slice(0, 60_000), slice(100_000, 200_000)  # characters of the text

RECIPES = [  # as `localllm quantize` makes them
    *(
        build_recipe(method, bits, group, asymmetric=asymmetric, activations=None)
        for method, bits, group, asymmetric in (
            *(("rtn", 8, 0, False), ("rtn", 8, 128, False), ("gptq", 8, 0, False)),
            *((method, 4, group, False) for group in (32, 64, 128) for method in ("rtn", "gptq", "awq")),
            *((method, 4, 32, True) for method in ("rtn", "gptq", "awq")),
        )
    ),
    *(build_recipe(method, 8, 0, asymmetric=False, activations="int8") for method in ("rtn", "smoothquant")),
]


@dataclass(frozen=True)
class Quality:
    perplexity: float
    divergence: float  # mean KL divergence from the model that was not quantized, nats
    nbytes: int


@dataclass
class EvaluatedModel:
    """A model with separate texts for calibration and evaluation."""

    folder: Path
    calibration: list[int]
    evaluation: list[int]
    learned: list[bool]  # of the evaluation's tokens: those that the model was trained to predict

    @cached_property
    def windows(self) -> Tensor:
        """[windows, T]"""
        return in_windows(self.evaluation)

    @cached_property
    def judged(self) -> Tensor:
        """[windows, T - 1], of the tokens but the first"""
        return in_windows(self.learned)[:, 1:]

    @cached_property
    def exact(self) -> list[Tensor]:
        return self.logprobs(self.folder, rounds=False)

    def logprobs(self, folder: Path, rounds: bool) -> list[Tensor]:
        """Log probabilities [T, vocab] of each window. rounds: round inputs of layers to INT8."""
        engine = make_engine(folder)
        if rounds:
            for layer in engine.runner.model.layers:
                for owner, attribute, linear in list(find_linears(layer)):
                    setattr(owner, attribute, Rounding(linear))
        return [engine.logits(window.tolist()).float().log_softmax(-1) for window in self.windows]

    def perplexity(self, logprobs: list[Tensor]) -> float:
        """exp of the mean negative log-likelihood of each window's tokens but the first."""
        pairs = zip(logprobs, self.windows, strict=True)
        loss = torch.stack([-found[:-1].gather(1, ids[1:, None])[:, 0] for found, ids in pairs])
        return loss[self.judged].mean().exp().item()

    def quality(self, recipe: Recipe) -> Quality:
        header, kept = read_header(self.folder), MemoryArtefact()
        windows = quantizer.calibration_windows(self.calibration, parse_config(header.config).max_context)
        quantize_layers(header, recipe, windows, kept, lambda *_: None)
        with tempfile.TemporaryDirectory() as folder:
            found = self.logprobs(write_plain(kept, header, Path(folder) / "model"), recipe.activations)
        pairs = zip(self.exact, found, strict=True)
        divergence = torch.stack([(exact.exp() * (exact - other)).sum(-1)[:-1] for exact, other in pairs])
        return Quality(self.perplexity(found), divergence[self.judged].mean().item(), kept.nbytes)


def in_windows(each: list[int] | list[bool]) -> Tensor:
    """Split to [windows, T]."""
    count = min(WINDOWS, len(each) // WINDOW)
    return torch.tensor(each[: count * WINDOW]).view(count, WINDOW)


class Rounding:
    """Linear layer with W8A8."""

    def __init__(self, linear: Linear):
        self.linear = linear

    def __call__(self, x: Tensor, norm: Norm | None = None, **behind: Any) -> Tensor:
        return self.linear(fake_quantize_tokens(norm(x) if norm else x), **behind)


def of_stories(folder: Path) -> EvaluatedModel:
    text, tokenizer = (DATA / "text/tiny.txt").read_text(), Tokenizer.from_folder(folder)
    evaluation = tokenizer.encode(text[EVALUATION])
    return EvaluatedModel(folder, tokenizer.encode(text[CALIBRATION]), evaluation, [True] * len(evaluation))


def of_conversations() -> EvaluatedModel:
    """The bundled model, evaluated on answers of its own grammar."""
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))

    def drawn(seed: int) -> tuple[list[int], list[bool]]:
        some = [encode(tokenizer, each.messages) for each in islice(conversations(seed, "everything"), 200)]
        return [token for ids, _ in some for token in ids], [own for _, learned in some for own in learned]

    return EvaluatedModel(DEMO, drawn(7001)[0], *drawn(7002))


def rows(judged: EvaluatedModel) -> Iterator[str]:
    """Rows of the Markdown table."""
    yield "| method | bits | group | zero points | perplexity | change | mean KL (nats) | bytes of float32 |"
    yield "|---|---|---|---|---|---|---|---|"
    before = judged.perplexity(judged.exact)
    yield f"| float32 | 32 | | | {before:.4g} | | | 100% |"
    whole = sum(4 * tensor.elements for tensor in read_header(judged.folder).tensors.values())
    for recipe in RECIPES:
        found = judged.quality(recipe)
        bits = "W8A8" if recipe.activations else str(recipe.bits)
        cells = [recipe.method, bits, str(recipe.group or "row"), "" if recipe.symmetric else "yes"]
        change = f"{found.perplexity / before - 1:+.2%}"
        cells += [f"{found.perplexity:.4g}", change, f"{found.divergence:.5f}", f"{found.nbytes / whole:.0%}"]
        yield f"| {' | '.join(cells)} |"


@torch.inference_mode()
def main() -> None:
    for title, judged in (
        ("stories260K, children's stories", of_stories(DATA / "stories260K")),
        ("demo, conversations of its own kind", of_conversations()),
        ("demo, children's stories", of_stories(DEMO)),
    ):
        print(f"\n### {title}\n", flush=True)
        for row in rows(judged):
            print(row, flush=True)


if __name__ == "__main__":
    main()
