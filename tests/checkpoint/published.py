"""Writes quantized checkpoints with the layouts of the Hub, after their published descriptions, and checkpoints of
the dequantized values for transformers.

A writer takes a weight [out, in] and returns the stored tensors of a module and their dequantized values.
"""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import make_checkpoint

Stored = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Stored]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MATRIX = r".*(_proj|_qkvz|\.w[123])\.weight"


def in_words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes [n, m] to int32 [n, ceil(m * bits / 32)], first code in the lowest bits, or in `order`."""
    run = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % run))).astype(np.uint32)
    words = np.zeros((len(codes), padded.shape[1] // run), np.uint32)
    for place, of in enumerate(order or range(run)):
        words |= padded[:, of::run] << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32))


def rounded(
    weight: Tensor, bits: int, group_of: Tensor, symmetric: bool, scale_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return codes from 0 [out, in], scales and zero points [out, groups], and the dequantized weight. group_of:
    [in]
    """
    groups, highest = [weight[:, group_of == group] for group in group_of.unique()], 2**bits - 1
    low = torch.stack([group.amin(1).clamp(max=0) for group in groups], 1)
    high = torch.stack([group.amax(1).clamp(min=0) for group in groups], 1)
    if symmetric:
        scale = (torch.maximum(-low, high) / (highest // 2)).to(scale_dtype)
        zero = torch.full_like(low, 2 ** (bits - 1))
    else:
        scale = ((high - low) / highest).to(scale_dtype)
        zero = (-low / scale.float()).round().clamp(1, highest)
    each, middle = scale.float()[:, group_of], zero[:, group_of]
    codes = (weight / each + middle).round().clamp(0, highest)
    return codes.int(), scale, zero.int(), (codes - middle) * each


def in_turn(columns: int, group: int) -> Tensor:
    return torch.arange(columns) // (columns if group == -1 else group)


def awq(weight: Tensor, group: int = 32) -> Stored:
    codes, scale, zero, exact = rounded(weight, 4, in_turn(weight.shape[1], group), False, torch.float16)
    return {
        "qweight": in_words(codes.T.numpy(), 4, AWQ_ORDER),
        "qzeros": in_words(zero.T.numpy(), 4, AWQ_ORDER),
        "scales": scale.T.contiguous(),
    }, exact


def gptq(
    weight: Tensor,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    version: int = 1,
    desc_act: bool = False,
) -> Stored:
    columns = weight.shape[1]
    group_of = in_turn(columns, group)
    if desc_act:  # one order for all matrices that read the same activations
        group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    codes, scale, zero, exact = rounded(weight, bits, group_of, symmetric, torch.float16)
    less = 1 if version == 1 else 0
    return {
        "qweight": in_words(codes.numpy(), bits).T.contiguous(),
        "qzeros": in_words(zero.T.numpy() - less, bits),
        "scales": scale.T.contiguous(),
        "g_idx": group_of.int(),
    }, exact


def pack_quantized(
    weight: Tensor,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    actorder: bool = False,
    blocks: bool = False,
) -> Stored:
    """blocks: groups are blocks of one row, whose zero points are not packed."""
    columns = weight.shape[1]
    group_of = in_turn(columns, group)
    if actorder:
        group_of = group_of[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    codes, scale, zero, exact = rounded(weight, bits, group_of, symmetric, torch.bfloat16)
    tensors = {
        "weight_packed": in_words(codes.numpy(), bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if blocks:
        tensors["weight_zero_point"] = (zero - 2 ** (bits - 1)).to(torch.int8)
    elif not symmetric:
        tensors["weight_zero_point"] = in_words(zero.T.numpy(), bits).T.contiguous()
    if actorder:
        tensors["weight_g_idx"] = group_of.int()
    return tensors, exact


def int_quantized(weight: Tensor, group: int = -1, symmetric: bool = True) -> Stored:
    codes, scale, zero, exact = rounded(weight, 8, in_turn(weight.shape[1], group), symmetric, torch.float32)
    tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
    if not symmetric:
        tensors["weight_zero_point"] = (zero - 128).to(torch.int8)
    return tensors, exact


def float8(weight: Tensor, block: tuple[int, int], scale_name: str = "weight_scale", flat: bool = False) -> Stored:
    """block: rows and columns that share a scale; flat: the scale of one block as a number."""
    (rows, columns), (tall, wide) = weight.shape, block
    scale = torch.empty(-(-rows // tall), -(-columns // wide))
    q, exact = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(i * tall, (i + 1) * tall), slice(j * wide, (j + 1) * wide))
            scale[i, j] = weight[at].abs().max() / 448
            q[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
            exact[at] = q[at].float() * scale[i, j]
    return {"weight": q, scale_name: scale[0, 0] if flat else scale}, exact


def per_tensor(weight: Tensor) -> Stored:
    tensors, exact = float8(weight, tuple(weight.shape), flat=True)
    return tensors | {"input_scale": torch.tensor(0.5)}, exact


def per_row(weight: Tensor) -> Stored:
    return float8(weight, (1, weight.shape[1]))


def stack_of_float8(weight: Tensor) -> Stored:
    """Stack experts like transformers. weight: [experts, out, in]."""
    each = [float8(expert, (40, 40)) for expert in weight]
    parts = {"": [tensors["weight"] for tensors, _ in each], "_scale_inv": [t["weight_scale"] for t, _ in each]}
    exact = torch.stack([meant for _, meant in each])
    return {name: torch.stack(tensors) for name, tensors in parts.items()}, exact


def compressed(form: str, activations: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors, with one group."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "type": "int"} | weights}
    group |= {"input_activations": activations} if activations else {}
    ignore = {"ignore": ["lm_head", "re:.*mlp.gate$"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}} | ignore


PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FLOAT_ACTIVATIONS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
LAYOUTS: dict[str, tuple[Writer, dict[str, Any]]] = {
    "awq": (awq, AWQ | {"modules_to_not_convert": None}),
    "awq, rows": (partial(awq, group=-1), AWQ | {"group_size": -1}),
    "gptq": (gptq, GPTQ),
    "gptq, zero points": (partial(gptq, symmetric=False), GPTQ | {"sym": False}),
    "gptq v2, zero points": (
        partial(gptq, symmetric=False, version=2),
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq, desc_act": (partial(gptq, desc_act=True), GPTQ | {"desc_act": True}),
    "gptq, 8 bits": (partial(gptq, bits=8, group=-1), GPTQ | {"bits": 8, "group_size": -1}),
    "gptq, 8 bits, desc_act, zero points": (
        partial(gptq, bits=8, symmetric=False, desc_act=True),
        GPTQ | {"bits": 8, "sym": False, "desc_act": True},
    ),
    "W4A16": (pack_quantized, compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)),
    "W4A16, rows": (
        partial(pack_quantized, group=-1),
        compressed("pack-quantized", num_bits=4, strategy="channel"),
    ),
    "W4A16, zero points": (
        partial(pack_quantized, symmetric=False),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    ),
    **{
        f"W{bits}A16, blocks of a row, zero points": (
            partial(pack_quantized, bits=bits, symmetric=False, blocks=True),
            compressed(
                "pack-quantized", num_bits=bits, strategy="block", block_structure=[1, 32], symmetric=False
            ),
        )
        for bits in (4, 8)
    },
    "W4A16, actorder": (
        partial(pack_quantized, actorder=True),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group"),
    ),
    "W8A16": (partial(pack_quantized, bits=8), compressed("pack-quantized", num_bits=8, group_size=32)),
    "W8A16, rows, zero points": (
        partial(pack_quantized, bits=8, group=-1, symmetric=False),
        compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=False),
    ),
    "int-quantized": (int_quantized, compressed("int-quantized", num_bits=8, strategy="channel")),
    "int-quantized, groups, zero points": (
        partial(int_quantized, group=32, symmetric=False),
        compressed("int-quantized", num_bits=8, strategy="group", group_size=32, symmetric=False),
    ),
    "float-quantized, tensors": (
        per_tensor,
        compressed(
            "float-quantized", FLOAT_ACTIVATIONS | {"dynamic": False}, num_bits=8, type="float", strategy="tensor"
        ),
    ),
    "float-quantized, rows": (
        per_row,
        compressed("float-quantized", FLOAT_ACTIVATIONS, num_bits=8, type="float", strategy="channel"),
    ),
    "float-quantized, blocks": (
        partial(float8, block=(24, 32)),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[24, 32]),
    ),
    "fp8, blocks": (
        partial(float8, block=(40, 40), scale_name="weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 40]},
    ),
    "fp8, tensors": (per_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
}
W8A8 = (int_quantized, compressed("int-quantized", PER_TOKEN, num_bits=8, strategy="channel"))

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def write(
    folder: Path,
    writer: Writer | dict[str, Writer],
    quantization: dict[str, Any],
    kind: str = "Llama",
    **changes: Any,
) -> Any:
    """Write a checkpoint to `folder`, and return the transformers model with the dequantized weights. writer: for
    all matrices of layers, or by the pattern of tensor names.
    """
    writers = writer if isinstance(writer, dict) else {MATRIX: writer}
    exact = folder / "exact"
    model = make_checkpoint(exact, kind, **SIZES | changes)
    meant = load_file(exact / "model.safetensors")
    stored = {}
    for name, weight in meant.items():
        chosen = next((made for pattern, made in writers.items() if re.fullmatch(pattern, name)), None)
        if chosen is None:
            stored[name] = weight
            continue
        stack = weight.dim() == 3  # of experts, whose names lack `.weight`
        parts, meant[name] = chosen(weight)
        module = name.removesuffix(".weight")
        stored |= {module + (part if stack else f".{part}"): tensor for part, tensor in parts.items()}
    save_file(meant, exact / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors")
    config = json.loads((exact / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return type(model).from_pretrained(exact, dtype=torch.float32, attn_implementation="eager").eval()
