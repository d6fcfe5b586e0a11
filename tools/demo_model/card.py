"""The model card, filled with what was measured."""

from collections.abc import Mapping, Sequence
from typing import Any

_KINDS = {
    "story": "stories",
    "about": "questions about localllm",
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

It tells short stories, answers questions about localllm, summarises short notes, does small exercises
(counting, sums up to ten, lists) and a little small talk. To other questions it answers that it does not
know.

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

{steps:,} steps over {tokens:,} tokens, of which {learned:,} are tokens of an answer and alone count in the
loss, from {drawn:,} drawn conversations. It took {minutes} minutes on 1 CPU core in bfloat16 autocast, with
Muon for the matrices, AdamW for the rest, and a cosine schedule that starts anew with every stage. The second
stage began when the first rate proved too high, the third to give copying, which summaries need, more weight:

| Stage | Highest rate | Mix of the text | Steps | Minutes |
|---|---|---|---|---|
{stages}

## Held-out perplexity

Per token of the answers, on {texts:,} conversations drawn from another seed, without those that also
occur in the training text. They come from the same grammar, so the numbers say that the model learned
the grammar, and nothing about other text.

| Kind | float32 | INT8 as stored |
|---|---|---|
{table}

## Limits

It is a demonstration, not an assistant. It knows nothing about the world. A story keeps to one of 13
plots, uses only the words it has seen, and may ignore a wish of the request that is not a hero, a trait,
a place, an object or a friend. Summaries copy parts of the notes; free text is cut to its first and last
sentence, and unusual words may be copied wrongly. English only.

## Reproduce

```
export OMP_NUM_THREADS=1
python -m tools.demo_model.train --out /tmp/demo-1 --rate 5e-3 --steps 2240 --stop {stops[0]}
python -m tools.demo_model.train --out /tmp/demo-2 --start /tmp/demo-1 --seed 2 --rate 2e-3 \\
    --steps 1430 --stop {stops[1]}
python -m tools.demo_model.train --out /tmp/demo-3 --start /tmp/demo-2 --seed 3 --rate 2e-3 \\
    --mix copying --steps {stops[2]}
python -m tools.demo_model.export --run /tmp/demo-3 --to localllm/boxed/demo
```

The text is the same to the letter, the weights are not the same to the last bit: the schedules of the run
above were bounded by time, their lengths in steps are estimates, and the steps of the first stage are known
to within ten.

## Licence

Apache-2.0, like localllm.
"""


def card(
    stages: Sequence[Mapping[str, Any]],
    parameters: int,
    texts: int,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> str:
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
        stops=[stage["steps"] for stage in stages],
        texts=texts,
        table="\n".join(kinds),
    )
