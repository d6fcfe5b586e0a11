"""Held-out perplexity of the bundled model, by kind of conversation."""

import json
import math
from itertools import islice

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from tools.demo_model.chat import encode
from tools.demo_model.text import HELD_OUT_SEED, Conversation, conversations
from tools.demo_model.train import WINDOW, Stage, labelled, loss_sum

CANDIDATES = 1500
OLD_STAGES = 6  # stages trained on text of an older grammar, which cannot be generated again


def held_out(stages: list[Stage]) -> list[Conversation]:
    """Return conversations of another seed that do not occur in the text of the later stages."""
    seen = {
        json.dumps(c.messages)
        for stage in stages[OLD_STAGES:]
        for c in islice(conversations(stage["seed"], stage["mix"]), stage["drawn"])
    }
    others = islice(conversations(HELD_OUT_SEED, stages[-1]["mix"]), CANDIDATES)
    return [c for c in others if json.dumps(c.messages) not in seen]


def perplexity(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[Conversation]) -> dict[str, float]:
    """Perplexity of the assistant's tokens, by kind and for all conversations."""
    losses: dict[str, float] = {}
    counts: dict[str, int] = {}
    model.eval()
    with torch.inference_mode():
        for text in texts:
            ids, learned = encode(tokenizer, text.messages)
            if len(ids) > WINDOW:
                continue
            loss, count = loss_sum(model, [(ids, labelled(ids, learned), list(range(len(ids))))])
            for kind in (text.kind, "all"):
                losses[kind] = losses.get(kind, 0.0) + float(loss)
                counts[kind] = counts.get(kind, 0) + count
    return {kind: math.exp(losses[kind] / counts[kind]) for kind in sorted(losses)}
