"""Converts a QuantizedTensor to the layout of compressed-tensors: its tensors, and its entries in config.json.

Weights alone are `pack-quantized`, as vLLM requires; INT8 with activations is `int-quantized`.

`int-quantized`: weight int8 [out, in], weight_scale [out, 1]. `pack-quantized`: weight_packed int32 [out, ceil(in
* bits / 32)], the first code in the lowest bits, codes stored as signed integers plus half their range;
weight_scale [out, groups]; weight_shape int64 [2]; weight_zero_point int8 [out, groups]; weight_g_idx int32 [in],
the group of each column if groups are not adjacent. Source: the `compressed-tensors` package,
`compressors/pack_quantized`.

Groups with zero points are described as blocks of one row, because compressed-tensors packs the zero points of the
strategies `group` and `channel` along the rows, and versions 0.18 to 0.20 cannot load these as long as the model
is compressed: on the meta device, `compress` leaves them unpacked, so the shapes differ.

This module handles neither files nor module names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localllm.checkpoint.layouts import WORD_BITS
from localllm.quant.formats.groups import INT4_ZERO_POINT, unpack_int4
from localllm.quant.packing import INT4
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor

EVERY_LINEAR = "Linear"  # the module class of a target


@dataclass(frozen=True, order=True)
class StorageScheme:
    """Storage of one matrix, as described by its group in config.json."""

    bits: int
    group: int  # columns; 0: an entire row
    symmetric: bool
    ordered: bool  # groups are given by weight_g_idx
    activations: bool  # also quantized to INT8, with a scale per token
    words: bool  # several codes in an int32, otherwise a code in an int8

    @property
    def format(self) -> str:
        return "pack-quantized" if self.words else "int-quantized"

    @property
    def blocks(self) -> bool:
        """Whether groups are described as blocks of one row, so that zero points are not packed."""
        return self.words and not (self.symmetric or self.ordered)

    def config_group(self, targets: Sequence[str], widest: int) -> dict[str, Any]:
        """Return the entry of `config_groups`. widest: columns of the widest matrix"""
        if self.blocks:
            strategy = {"strategy": "block", "group_size": None, "block_structure": [1, self.group or widest]}
        else:
            strategy = {"strategy": "group" if self.group else "channel", "group_size": self.group or None}
        weights = {
            **{"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False, **strategy},
            "actorder": "group" if self.ordered else None,
        }
        activations = {
            **{"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True},
            **{"strategy": "token", "group_size": None},
        }
        return {
            "targets": list(targets),
            "weights": weights,
            "input_activations": activations if self.activations else None,
            "output_activations": None,
            "format": self.format,
        }


def choose_scheme(weight: QuantizedTensor, *, activations: bool) -> StorageScheme:
    """Return the scheme. activations: the matrix is multiplied with activations in INT8"""
    return StorageScheme(
        bits=4 if weight.format == INT4 else 8,
        group=weight.group or 0,
        symmetric="zero" not in weight.parts,
        ordered=COLUMN_ORDER in weight.parts,
        activations=activations,
        words=not activations,
    )


def to_stored_tensors(weight: QuantizedTensor, scheme: StorageScheme) -> dict[str, Tensor]:
    """Return the tensors of the module, by their names within it."""
    offset = 2 ** (scheme.bits - 1)
    codes, columns = signed_codes(weight), weight.parts.get(COLUMN_ORDER)
    if columns is not None:
        codes = torch.empty_like(codes).index_copy_(1, columns, codes)
    tensors = {"weight_scale": weight.parts["scale"]}
    if scheme.format == "int-quantized":
        return tensors | {"weight": codes}
    tensors["weight_packed"] = pack_codes(codes.int() + offset, scheme.bits)
    tensors["weight_shape"] = torch.tensor(weight.shape)
    if scheme.blocks:
        tensors["weight_zero_point"] = signed_zeros(weight)
    elif not scheme.symmetric:
        tensors["weight_zero_point"] = pack_codes(
            signed_zeros(weight).T.int() + offset, scheme.bits
        ).T.contiguous()
    if columns is not None:
        group_ids = torch.arange(len(columns), dtype=torch.int32) // (scheme.group or len(columns))
        tensors["weight_g_idx"] = torch.empty_like(group_ids).index_copy_(0, columns, group_ids)
    return tensors


def signed_codes(weight: QuantizedTensor) -> Tensor:
    """Return codes, int8 [out, in], with columns in stored order."""
    if weight.format == INT4:
        return unpack_int4(weight.parts["q"], weight.shape[1]).to(torch.int8) - INT4_ZERO_POINT
    return weight.parts["q"]


def signed_zeros(weight: QuantizedTensor) -> Tensor:
    """Return zero points, int8 [out, groups]."""
    zero = weight.parts["zero"]
    return zero.to(torch.int8) - INT4_ZERO_POINT if weight.format == INT4 else zero.to(torch.int8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack int32 [rows, n] with values below 2^bits to int32 [rows, ceil(n * bits / 32)]; bits divide 32."""
    codes_per_word = WORD_BITS // bits
    words = torch.nn.functional.pad(codes, (0, -codes.shape[1] % codes_per_word)).unflatten(
        1, (-1, codes_per_word)
    )
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words << shifts).sum(2, dtype=torch.int32)


def quantization_config(
    schemes: Mapping[str, StorageScheme], unquantized: Sequence[str], widest: int
) -> dict[str, Any]:
    """Return the `quantization_config` of config.json.

    schemes: of each quantized module; unquantized: modules with a matrix that is not quantized; widest: columns of
    the widest matrix. The most frequent scheme is assigned to every Linear, others are listed by module name.
    """
    modules: dict[StorageScheme, list[str]] = {}
    for module, scheme in sorted(schemes.items()):
        modules.setdefault(scheme, []).append(module)
    ordered = sorted(modules, key=lambda scheme: (-len(modules[scheme]), scheme))
    groups = {
        f"group_{i}": scheme.config_group([EVERY_LINEAR] if i == 0 else modules[scheme], widest)
        for i, scheme in enumerate(ordered)
    }
    formats = {scheme.format for scheme in ordered}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(unquantized),
        "kv_cache_scheme": None,
    }
