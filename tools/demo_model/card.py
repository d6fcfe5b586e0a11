"""The model card, filled with what was measured."""

from collections.abc import Mapping

_KINDS = {
    "story": "stories",
    "about": "questions about localllm",
    "talk": "small talk",
    "notes": "notes and their summary",
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

No foreign text and no other model went into it. `tools/demo_model/text.py` writes all conversations from
a seed and a grammar that people wrote: 13 story plots with many heroes, places and phrasings, the facts
about localllm, notes with their summaries, and exercises. Users' turns carry lower case, missing
punctuation and small typing errors.

## Training

{steps:,} steps over {tokens:,} tokens ({learned:,} of them tokens of an answer, which alone count in the
loss), from {drawn:,} drawn conversations. It took {minutes:.0f} minutes on 1 CPU core in bfloat16
autocast, with Muon for the matrices, AdamW for the rest, and a cosine schedule.

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
OMP_NUM_THREADS=1 python -m tools.demo_model.train --out /tmp/demo-run
python -m tools.demo_model.export --run /tmp/demo-run --to localllm/boxed/demo
```

## Licence

Apache-2.0, like localllm.
"""


def card(
    report: Mapping[str, float],
    parameters: int,
    texts: int,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> str:
    rows = [f"| {title} | {before[kind]:.3f} | {after[kind]:.3f} |" for kind, title in _KINDS.items()]
    return _CARD.format(
        parameters=parameters,
        steps=int(report["steps"]),
        tokens=int(report["tokens"]),
        learned=int(report["learned_tokens"]),
        drawn=int(report["drawn"]),
        minutes=report["minutes"],
        texts=texts,
        table="\n".join(rows),
    )
