"""Writes a generated INT4 model to disk, in the format of `localllm quantize`. Weights are random, since speed
does not depend on their values, and the vocabulary is artificial.
"""

import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.torch import save_file
from torch import Tensor

from bench.gpu.setting import Setting
from localllm.benchmark.gpu.generated import RandomSource
from localllm.quant.packing import INT4, INT8
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize.compressed import StorageScheme, choose_scheme, quantization_config, to_stored_tensors


def write(folder: Path, shape: dict[str, Any], setting: Setting) -> int:
    """Write one file per layer. Return the bytes of all tensors."""
    folder.mkdir(parents=True)
    source = RandomSource("int4", setting.device)
    hidden, ffn = shape["hidden_size"], shape["intermediate_size"]
    queries, keys = (shape[f"num_{kind}_heads"] * shape["head_dim"] for kind in ("attention", "key_value"))
    matrices = {
        **{"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden)},
        **{"self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries)},
        **{"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)},
    }
    norms = ("input_layernorm", "post_attention_layernorm")
    schemes: dict[str, StorageScheme] = {}
    weight_map: dict[str, str] = {}
    size = 0

    def save(file: str, tensors: dict[str, Tensor]) -> None:
        nonlocal size
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        size += sum(tensor.nbytes for tensor in tensors.values())

    @functools.cache  # packing takes longer than writing, so all layers have the same weights
    def packed(form: str, rows: int, columns: int) -> tuple[StorageScheme, dict[str, Tensor]]:
        weight = to_cpu(source.packed(form, rows, columns))
        scheme = choose_scheme(weight, activations=False)
        return scheme, to_stored_tensors(weight, scheme)

    def quantized(module: str, form: str, rows: int, columns: int) -> dict[str, Tensor]:
        schemes[module], parts = packed(form, rows, columns)
        return {f"{module}.{part}": tensor for part, tensor in parts.items()}

    def dense(*shape: int) -> Tensor:
        return source.tensor("", *shape).cpu()

    for i in range(shape["num_hidden_layers"]):
        name = f"model.layers.{i}"
        layer = {f"{name}.{norm}.weight": dense(hidden) for norm in norms}
        for module, (rows, columns) in matrices.items():
            layer |= quantized(f"{name}.{module}", INT4, rows, columns)
        save(f"layer-{i:02}.safetensors", layer)
    others = {"model.embed_tokens.weight": dense(shape["vocab_size"], hidden), "model.norm.weight": dense(hidden)}
    save("others.safetensors", others | quantized("lm_head", INT8, shape["vocab_size"], hidden))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    widest = max(columns for _, columns in matrices.values())
    quantization = quantization_config(schemes, [], widest)
    config = shape | {"tie_word_embeddings": False, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"t{i}": i for i in range(shape["vocab_size"])}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "t0")).save(str(folder / "tokenizer.json"))
    return size


def to_cpu(weight: QuantizedTensor) -> QuantizedTensor:
    parts = {name: part.cpu() for name, part in weight.parts.items()}
    return QuantizedTensor(weight.format, weight.shape, parts, weight.group)
