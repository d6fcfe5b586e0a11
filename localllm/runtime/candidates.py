"""Which tokens could have come, and what kept the others out: the sampler's own rules, one after the other, for
people who watch. Knows nothing of steps and requests."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from localllm.inspection import Candidate
from localllm.runtime.sampler import SamplingSpec, apply_grammar, apply_penalties, filtered_probabilities

NEUTRAL_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # in the order in which they are applied


def likeliest_candidates(logits: Tensor, spec: SamplingSpec, token: int, count: int) -> tuple[Candidate, ...]:
    """The `count` likeliest, and `token`, which came, where it is not among them; by the model's own distribution.

    logits: [vocab] float32 as the model gave them. `chance` is what the draw is made from: where a draft that was
    drawn itself is verified, the distribution that acceptance and rejection come to.
    """
    logs = logits.log_softmax(-1)
    best = logs.topk(min(count, len(logs))).indices.tolist()
    ids = best if token in best else [*best, token]
    index = torch.tensor(ids, device=logits.device)
    left_out, chances = ~(logits[index] > -torch.inf), logits
    cut_by = [""] * len(ids)
    for name, chances in filter_stages(logits, spec):
        now = ~(chances[index] > 0)
        for place in (now & ~left_out).nonzero()[:, 0].tolist():
            cut_by[place] = name
        left_out |= now
    return tuple(map(Candidate, ids, logs[index].tolist(), chances[index].tolist(), cut_by))


def filter_stages(logits: Tensor, spec: SamplingSpec) -> Iterator[tuple[str, Tensor]]:
    """What each rule leaves, in their order: [vocab] float64 probabilities."""
    changed = logits.clone()[None]
    apply_grammar(changed, [spec])
    yield "grammar", (changed[0] > -torch.inf).double()
    apply_penalties(changed, [spec])
    yield "logit_bias", (changed[0] > -torch.inf).double()
    params, off = spec.params, dict(NEUTRAL_FILTERS)
    if params.temperature == 0:
        yield "temperature", torch.zeros_like(logits, dtype=torch.float64).index_fill_(0, changed[0].argmax(), 1)
        return
    for name in ("temperature", *NEUTRAL_FILTERS):
        off.pop(name, None)
        if name == "temperature" or getattr(params, name) != NEUTRAL_FILTERS[name]:
            weights = filtered_probabilities(changed, [replace(spec, params=replace(params, **off))])[0].double()
            yield name, weights / weights.sum()
