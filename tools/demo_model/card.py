"""The model card, with measured values."""

from collections.abc import Mapping, Sequence
from typing import Any

_KINDS = {
    "story": "stories",
    "about": "questions about localllm",
    "server": "how to start and stop the server",
    "talk": "small talk",
    "notes": "notes and their summary",
    "repeat": "repeat after me",
    "exercise": "small exercises",
    "unknown": "questions it cannot answer",
    "mixed": "several turns, mixed",
    "all": "all together",
}

_CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
library_name: localllm
---

# demo

A very small chat model that comes with localllm, so that a fresh machine without a network can try every
part of it:

```
localllm run demo "Tell me a story about a fox"
localllm run demo "How do I start the server?"
cat notes.txt | localllm run demo "Summarise:"
```

It tells short stories, answers questions about localllm, summarises short lists and notes, counts, and
makes a little small talk. To most other questions it answers that it does not know.

## Model

Llama architecture with {parameters:,} parameters: 6 layers, hidden size 256, feed-forward size 688, 8
attention heads over 4 key-value heads, tied embeddings, a byte-level BPE of 3,072 tokens, and a context
of 1,024 tokens. It was trained on conversations of at most 768 tokens.

The weights of the linear layers are stored as INT8, symmetric, with one bfloat16 scale per output
channel, in the compressed-tensors `int-quantized` layout; embeddings and norms are bfloat16.

## Data

No dataset, no text from elsewhere and no other model's weights or answers went into it.
`tools/demo_model/text.py` writes all conversations from a seed and the grammar beside it: 13 story plots with
many heroes, places and phrasings, the facts about localllm, notes with their summaries, and exercises. Users'
turns carry lower case, missing punctuation and small typing errors.

## Training

{steps:,} steps over {tokens:,} tokens with padding; the {learned:,} that belong to an answer count in the
loss, from {drawn:,} drawn conversations. It took {minutes} minutes on 1 CPU core in bfloat16 autocast, with
Muon for the matrices, AdamW for the rest, and a cosine schedule that starts anew with every stage. The second
stage began when the first rate proved too high. The third gave more weight to copying, which summaries need;
the fourth did little else until the model could do it, and the rest came back after that. Before the seventh
stage the grammar grew: stages 1 to 6 were trained on the text of the files before that. The eighth asked more
often how to start and to stop the server, because the model had begun to mix them up:

| Stage | Highest rate | Mix of the text | Steps | Minutes |
|---|---|---|---|---|
{stages}

## Held-out perplexity

Per token of the answers, on {texts:,} conversations drawn from another seed, without those that also
occur in the text of the stages since the grammar grew. They come from the same grammar, so the numbers say
that the model learned the grammar, and nothing about other text.

| Kind | float32 | INT8 as stored |
|---|---|---|
{table}

## Limits

It is a demonstration, not an assistant. It knows nothing about the world, and it is wrong with
confidence: sums and lists of animals are often wrong, and a question about localllm that it was not taught
gets the answer to another one. A story keeps to one of 13 plots and one helper. It is usually about the
hero of the request, if that is an animal or another hero it was trained on, but often ignores the other
wishes: names, traits, objects and the theme; a name it does not know may change on the way. A summary copies
a short list, with slips, or only the first sentence of a text; words it has never seen come out wrong, up to
nonsense. English only.

## Reproduce

```
export OMP_NUM_THREADS=1
{commands}
python -m tools.demo_model.export --run /tmp/demo-{last} --to localllm/boxed/demo
```

The commands of stages 1 to 6 need `tools/demo_model/` as it was before the commit that added the mix
`everything`. The text is then the same to the letter, the weights are not the same to the last bit: the
schedules of the run above were bounded by time, `--steps` is an estimate of their length, and the steps of
the first stage are known to within ten.

## Licence

Apache-2.0, like localllm.
"""


# Planned steps of the first stages, which were stopped early; later ones were completed.
_SCHEDULES = (2240, 1430, 1170, 780)


def _command(number: int, stage: Mapping[str, Any]) -> str:
    """Command line that repeats one stage."""
    start = f" --start /tmp/demo-{number - 1}" if number > 1 else ""
    stopped = number <= len(_SCHEDULES)
    steps = f"--steps {_SCHEDULES[number - 1]} --stop {stage['steps']}" if stopped else f"--steps {stage['steps']}"
    return (
        f"python -m tools.demo_model.train --out /tmp/demo-{number}{start} \\\n"
        f"    --seed {stage['seed']} --mix {stage['mix']} --rate {stage['rate']:g} {steps}"
    )


def card(
    stages: Sequence[Mapping[str, Any]],
    parameters: int,
    texts: int,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> str:
    """Return the model card. before, after: perplexities in float32 and in INT8, by kind of conversation."""

    def total(key: str) -> int:
        return round(sum(stage[key] for stage in stages))

    kinds = [f"| {title} | {before[kind]:.3f} | {after[kind]:.3f} |" for kind, title in _KINDS.items()]
    lines = [
        f"| {number} | {stage['rate']:g} | {stage['mix']} | {stage['steps']:,} | {stage['minutes']:.0f} |"
        for number, stage in enumerate(stages, 1)
    ]
    return _CARD.format(
        parameters=parameters,
        steps=total("steps"),
        tokens=total("tokens"),
        learned=total("learned_tokens"),
        drawn=total("drawn"),
        minutes=total("minutes"),
        stages="\n".join(lines),
        commands="\n".join(_command(number, stage) for number, stage in enumerate(stages, 1)),
        last=len(stages),
        texts=texts,
        table="\n".join(kinds),
    )
