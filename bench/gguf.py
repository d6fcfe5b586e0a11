"""Prefill and decode speed of a 1B-parameter Llama as GGUF, beside llama.cpp on the same file in the same run.

    python -m bench.gguf [--format q4_0] [--prompt 128] [--answer 16] [--rounds 3] [--save]

The rival is `pip install llama-cpp-python`. The two take turns, round by round, so that a noisy machine is noisy
for both; medians are compared as ratios.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

import localllm
from bench.checkpoint import SHAPE
from bench.report import finish

Sample = dict[str, float]
FORMATS = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}


def make(file: Path, form: gguf.GGMLQuantizationType) -> None:
    """Random weights in the shape of `bench.checkpoint`: matrices in `form`, norms in float32."""
    random = numpy.random.default_rng(0)
    hidden, inner, heads = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_attention_heads"]
    keys = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(SHAPE["head_dim"])
    add_tokenizer(writer)

    def matrix(name: str, rows: int, columns: int) -> None:
        weight = random.standard_normal((rows, columns), dtype=numpy.float32) / columns**0.5
        writer.add_tensor(f"{name}.weight", gguf.quantize(weight, form), raw_dtype=form)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", numpy.ones(hidden, dtype=numpy.float32))

    matrix("token_embd", SHAPE["vocab_size"], hidden)
    norm("output_norm")
    for layer in range(SHAPE["num_hidden_layers"]):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        norm(f"{block}.ffn_norm")
        matrix(f"{block}.attn_q", hidden, hidden)
        matrix(f"{block}.attn_k", keys, hidden)
        matrix(f"{block}.attn_v", keys, hidden)
        matrix(f"{block}.attn_output", hidden, hidden)
        matrix(f"{block}.ffn_gate", inner, hidden)
        matrix(f"{block}.ffn_up", inner, hidden)
        matrix(f"{block}.ffn_down", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """One that only has to exist."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    tokens += [f"t{i}" for i in range(SHAPE["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds + [1] * (len(tokens) - len(kinds)))


def ours(llm: localllm.LLM, prompt: list[int], answer: int) -> Sample:
    done = llm.generate(prompt, localllm.SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
    m = done.metrics
    assert m.output_tokens == answer and m.cached_tokens == 0
    return {"tokens_per_s": m.tokens_per_s, "prefill_tokens_per_s": m.prefill_tokens_per_s}


def theirs(llm: Any, prompt: list[int], answer: int) -> Sample:
    llm.reset()
    start = time.perf_counter()
    llm.eval(prompt)
    between = time.perf_counter()
    for token in range(answer - 1):
        llm.eval([1000 + token])
    end = time.perf_counter()
    return {
        "tokens_per_s": (answer - 1) / (end - between),
        "prefill_tokens_per_s": len(prompt) / (between - start),
    }


def measure(file: Path, prompt_tokens: int, answer: int, rounds: int) -> dict[str, Any]:
    rival = Llama(str(file), n_ctx=prompt_tokens + answer, n_threads=os.cpu_count(), verbose=False)
    llm = localllm.load(file)
    samples: dict[str, list[Sample]] = {"localllm": [], "llama.cpp": []}
    for turn in range(rounds + 1):
        # A new prompt each round, so that nothing is found in a cache.
        generator = torch.Generator().manual_seed(turn)
        prompt = torch.randint(300, SHAPE["vocab_size"], (prompt_tokens,), generator=generator).tolist()
        got = {"localllm": ours(llm, prompt, answer), "llama.cpp": theirs(rival, prompt, answer)}
        print(f"round {turn}{' (warm-up)' if turn == 0 else ''}: {got}", file=sys.stderr)
        for name, sample in got.items():
            samples[name] += [sample] if turn else []
    result = {name: {key: statistics.median(s[key] for s in of) for key in of[0]} for name, of in samples.items()}
    ratios = {f"{key}_ratio": result["localllm"][key] / result["llama.cpp"][key] for key in result["localllm"]}
    sizes = {"weight_bytes": llm.weight_bytes, "prompt_tokens": prompt_tokens, "output_tokens": answer}
    llm.close()
    return sizes | {"rounds": rounds} | result | ratios


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--format", choices=FORMATS, default="q4_0")
    options.add_argument("--prompt", type=int, default=128, help="tokens")
    options.add_argument("--answer", type=int, default=16, help="tokens")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--save", action="store_true", help="append the result to bench/results/gguf.jsonl")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.gguf"
        make(file, FORMATS[chosen.format])
        measured = measure(file, chosen.prompt, chosen.answer, chosen.rounds)
        finish("gguf", {"format": chosen.format} | measured, chosen.save)


if __name__ == "__main__":
    main()
