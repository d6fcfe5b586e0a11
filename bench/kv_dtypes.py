"""What quantized keys and values cost: perplexity, KL divergence, top-1 agreement and bytes per token.

    python -m bench.kv_dtypes MODEL [--text FILE] [--tokens 7680] [--outliers 16]

Prints rows of the table in docs/kv-cache.md. The reference is the model in float32 with a float32 cache. Row
`bfloat16` also computes in bfloat16, the others in float32. `without rotation` stores keys as they are.
--outliers N constructs a model with outlier keys: in each head, the slowest rotary pair of keys is multiplied by N
and that of queries divided by it, which changes no logit if N is a power of two.
"""

import argparse
import tempfile
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import localllm
from localllm.arch.config import AttentionConfig, ModelConfig
from localllm.arch.cost import kv_bytes_per_token
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.comparison.compare import LogitsReader
from localllm.hub.resolve import resolve_model
from localllm.llm.llm import LLM
from localllm.quality.measure import measure_distance
from localllm.quality.report import Distance
from localllm.quality.text import EVALUATION_TEXT, WINDOW_TOKENS, Windows, split_into_windows
from localllm.quant.packing import kv_element_bytes
from localllm.runtime.kv_cache.tensors import KVCache
from localllm.text.tokenizer import Tokenizer

ROWS = (
    ("bfloat16", "bfloat16", "bfloat16", True),
    ("int8", "float32", "int8", True),
    ("fp8", "float32", "fp8", True),
    ("k8v4", "float32", "k8v4", True),
    ("k8v4 without rotation", "float32", "k8v4", False),
    ("int4", "float32", "int4", True),
    ("int4 without rotation", "float32", "int4", False),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=EVALUATION_TEXT)
    parser.add_argument("--tokens", type=int, default=15 * WINDOW_TOKENS)
    parser.add_argument("--outliers", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = resolve_model(arguments.model).path
        if arguments.outliers > 1:
            path = write_outliers(path, Path(folder), arguments.outliers)
        header = read_header(path)
        config = parse_config(header.config)
        window = min(WINDOW_TOKENS, config.max_context)
        tokenizer = Tokenizer.from_checkpoint(header.path, header.gguf)
        windows = split_into_windows(
            arguments.text.read_text(encoding="utf-8"), tokenizer, window=window, max_tokens=arguments.tokens
        )
        with closing(load(path, "float32", "float32", window)) as reference:
            for name, dtype, kv_dtype, rotated in ROWS:
                with closing(load(path, dtype, kv_dtype, window)) as llm:
                    if not rotated:
                        llm.worker.call(lambda: stop_rotating(llm))
                    print_row(name, measure(reference, llm, windows), kv_bytes(config, kv_dtype))


def load(path: Path, dtype: str, kv_dtype: str, context: int) -> LLM:
    return localllm.load(path, device="cpu", dtype=dtype, kv_dtype=kv_dtype, context=context, draft="off")


def stop_rotating(llm: LLM) -> None:
    for cache in llm.worker.engine.runner.paged_caches:
        assert isinstance(cache, KVCache)
        cache.rotation = 1


def measure(reference: LLM, llm: LLM, windows: Windows) -> Distance:
    vocab = reference.config.vocab_size
    return measure_distance(LogitsReader(reference, vocab), LogitsReader(llm, vocab), windows)


def kv_bytes(config: ModelConfig, kv_dtype: str) -> int:
    return kv_bytes_per_token(config, *kv_element_bytes(kv_dtype))


def print_row(name: str, distance: Distance, nbytes: int) -> None:
    if name == ROWS[0][0]:
        print(f"| float32 | {distance.reference_perplexity.value:.3f} | | | | {2 * nbytes} |")
    divergence, same = distance.divergence, distance.same_top.value
    perplexity = distance.other_perplexity.value
    print(
        f"| {name} | {perplexity:.3f} | {divergence.mean.value:.1e} | {divergence.p99:.1e} | {same:.1%} "
        f"| {nbytes} |",
        flush=True,
    )


def write_outliers(source: Path, target: Path, factor: int) -> Path:
    """Write a copy of a Llama whose keys have outliers, and return its folder."""
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = parse_config(read_header(source).config)
    tensors = load_file(target / "model.safetensors")
    for i, layer in enumerate(config.layers):
        c = layer.mixer
        assert isinstance(c, AttentionConfig) and c.rope and not c.qk_norm and not c.rope.interleaved
        pair = torch.tensor([c.rope.dim // 2 - 1, c.rope.dim - 1])  # the pair that turns slowest
        for part, scale in (("q", 1 / factor), ("k", factor)):
            name = f"model.layers.{i}.self_attn.{part}_proj.weight"
            tensors[name] = scale_dimensions(tensors[name], c.head_dim, pair, scale)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def scale_dimensions(weight: Tensor, head_dim: int, dimensions: Tensor, scale: float) -> Tensor:
    """weight: [heads * head_dim, hidden]"""
    heads = weight.clone().unflatten(0, (-1, head_dim))
    heads[:, dimensions] *= scale
    return heads.flatten(0, 1).contiguous()


if __name__ == "__main__":
    main()
