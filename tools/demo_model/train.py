"""Trains the bundled model from scratch, first its tokenizer, then the network, on text that `text.py` writes.

    OMP_NUM_THREADS=1 python -m tools.demo_model.train --out /tmp/demo-run

All stages together take about one and a half hours on one CPU core. A stage writes a checkpoint every few minutes;
the model card lists the exact commands. `export.py` then measures the result and writes `localllm/boxed/demo/`.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_model.chat import BEGIN, END, PAD, SPECIAL_TOKENS, encode, token_id
from tools.demo_model.text import MIXES, TRAIN_SEED, conversations

VOCABULARY = 3072
WINDOW = 768  # tokens of the longest conversation; shorter ones share a row
ROWS = 3
IGNORED = -100
WARMUP = 50
CHECKPOINT_SECONDS = 240

Stage = dict[str, Any]
Row = tuple[list[int], list[int], list[int]]


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE, whose alphabet contains every byte, so that it encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (m["content"] for c in islice(conversations(TRAIN_SEED), 20_000) for m in c.messages)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def new_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=token_id(tokenizer, BEGIN),
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def labelled(ids: list[int], learned: list[bool]) -> list[int]:
    return [token if use else IGNORED for token, use in zip(ids, learned, strict=True)]


class PackedRows(Iterator[Row]):
    """Rows of complete conversations: token ids, labels, and positions, which restart with every conversation."""

    def __init__(self, tokenizer: Tokenizer, seed: int, mix: str) -> None:
        self.tokenizer = tokenizer
        self.pad = token_id(tokenizer, PAD)
        self.stream = conversations(seed, mix)
        self.waiting: list[tuple[list[int], list[bool]]] = []
        self.drawn = 0  # conversations drawn from the stream

    def __next__(self) -> Row:
        tokens: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        while True:
            self._refill()
            space = WINDOW - len(tokens)
            # Take the oldest conversation that fits, so that long ones do not wait longer.
            index = next((i for i, (ids, _) in enumerate(self.waiting) if len(ids) <= space), None)
            if index is None:
                break
            ids, learned = self.waiting.pop(index)
            tokens += ids
            labels += labelled(ids, learned)
            positions += range(len(ids))
        return tokens + [self.pad] * space, labels + [IGNORED] * space, positions + list(range(space))

    def _refill(self) -> None:
        while len(self.waiting) < 64:
            ids, learned = encode(self.tokenizer, next(self.stream).messages)
            self.drawn += 1
            if len(ids) <= WINDOW:
                self.waiting.append((ids, learned))


def loss_sum(model: LlamaForCausalLM, rows: list[Row]) -> tuple[torch.Tensor, int]:
    """Return the sum of the losses of labelled tokens, and their number."""
    tokens, labels, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    hidden = model.model(input_ids=tokens, position_ids=positions).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    labelled_mask = targets != IGNORED
    logits = model.lm_head(hidden[labelled_mask]).float()
    loss = functional.cross_entropy(logits, targets[labelled_mask], reduction="sum")
    return loss, int(labelled_mask.sum())


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for matrices, which learned faster per token than with AdamW; AdamW for all other parameters."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def learning_rate(peak: float, step: int, progress: float) -> float:
    """A short warm-up, then a cosine schedule to zero."""
    return peak * min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * progress))


def save(model: LlamaForCausalLM, out: Path, stages: list[Stage]) -> None:
    """Write the model and the report of its stages, so that an interrupted run is usable."""
    model.save_pretrained(out / "model")
    (out / "report.json").write_text(json.dumps(stages, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=2400, help="length of the learning rate schedule")
    parser.add_argument("--stop", type=int, default=10**9, help="step to stop at before the end of the schedule")
    parser.add_argument("--minutes", type=float, default=1e9, help="maximum length of the schedule in minutes")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=TRAIN_SEED, help="seed of the text, different in every stage")
    parser.add_argument(
        "--mix", choices=list(MIXES), default="stories", help="weights of the kinds of conversation"
    )
    parser.add_argument("--start", type=Path, help="folder of an earlier stage to continue from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)

    earlier: list[Stage] = []
    if options.start:
        tokenizer = Tokenizer.from_file(str(options.start / "tokenizer.json"))
        model = LlamaForCausalLM.from_pretrained(options.start / "model", dtype=torch.float32)
        model.config.use_cache = False
        earlier = json.loads((options.start / "report.json").read_text())
    else:
        tokenizer = train_tokenizer()
        model = new_model(tokenizer)
    model.train()
    tokenizer.save(str(options.out / "tokenizer.json"))
    all_optimizers = optimizers(model)
    rows = PackedRows(tokenizer, options.seed, options.mix)
    start = saved = time.monotonic()
    learned = step = 0

    def stage_report() -> Stage:
        return {
            "seed": options.seed,
            "mix": options.mix,
            "rate": options.rate,
            "steps": step,
            "tokens": step * ROWS * WINDOW,
            "learned_tokens": learned,
            "drawn": rows.drawn,
            "minutes": round((time.monotonic() - start) / 60, 1),
        }

    while True:
        minutes = (time.monotonic() - start) / 60
        progress = max(step / options.steps, minutes / options.minutes)
        if progress >= 1 or step >= options.stop:
            break
        for group in (g for optimizer in all_optimizers for g in optimizer.param_groups):
            group["lr"] = learning_rate(options.rate, step, progress)
        with torch.autocast("cpu", torch.bfloat16):
            loss, count = loss_sum(model, list(islice(rows, ROWS)))
            loss = loss / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in all_optimizers:
            optimizer.step()
            optimizer.zero_grad()
        learned += count
        step += 1
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f} learned {learned} minutes {minutes:.1f}", flush=True)
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            saved = time.monotonic()
            save(model, options.out, [*earlier, stage_report()])
    save(model, options.out, [*earlier, stage_report()])


if __name__ == "__main__":
    main()
