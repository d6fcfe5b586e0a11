"""A QuantizedTensor in the layout of compressed-tensors: its tensors, and what config.json says of them.

`int-quantized`: weight int8 [out, in], weight_scale [out, 1].
`pack-quantized`: weight_packed int32 [out, ceil(in * bits / 32)], the first code in the lowest bits, codes stored
as signed numbers plus half their range; weight_scale [out, groups]; weight_shape int64 [2]; weight_zero_point
int32 [ceil(out * bits / 32), groups], packed the same way along the rows; weight_g_idx int32 [in], the group of
each column where groups are no neighbours. Source: the `compressed-tensors` package, `compressors/pack_quantized`.

Knows nothing of files and names of modules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localllm.checkpoint.layouts import WORD_BITS
from localllm.quant.formats import int4
from localllm.quant.packing import INT4
from localllm.quant.tensor import COLUMN_ORDER, QuantizedTensor

EVERY_LINEAR = "Linear"  # the class of module that a target may name


@dataclass(frozen=True, order=True)
class StorageScheme:
    """How one matrix is stored: what its group of config.json says."""

    bits: int
    group: int  # columns; 0: a whole row
    symmetric: bool
    ordered: bool  # groups are given by weight_g_idx
    activations: bool  # rounded to INT8 as well, with a scale a token
    words: bool  # several codes in an int32, else a code in an int8

    @property
    def format(self) -> str:
        return "pack-quantized" if self.words else "int-quantized"

    def config_group(self, targets: Sequence[str]) -> dict[str, Any]:
        """The entry of `config_groups`."""
        weights = {
            **{"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False},
            **{"strategy": "group" if self.group else "channel", "group_size": self.group or None},
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


def choose_scheme(weight: QuantizedTensor, *, activations: bool, as_int32: bool = False) -> StorageScheme:
    """as_int32: also for INT8 with a scale a row, which the plain layout could hold."""
    return StorageScheme(
        bits=4 if weight.format == INT4 else 8,
        group=weight.group or 0,
        symmetric="zero" not in weight.parts,
        ordered=COLUMN_ORDER in weight.parts,
        activations=activations,
        words=as_int32 or weight.format == INT4 or weight.group is not None,
    )


def to_stored_tensors(weight: QuantizedTensor, scheme: StorageScheme) -> dict[str, Tensor]:
    """The tensors of the module, by their names within it."""
    half = 2 ** (scheme.bits - 1)
    codes, columns = signed_codes(weight), weight.parts.get(COLUMN_ORDER)
    if columns is not None:
        codes = torch.empty_like(codes).index_copy_(1, columns, codes)
    found = {"weight_scale": weight.parts["scale"]}
    if scheme.format == "int-quantized":
        found["weight"] = codes
        if not scheme.symmetric:
            found["weight_zero_point"] = signed_zeros(weight)
        return found
    found["weight_packed"] = pack_codes(codes.int() + half, scheme.bits)
    found["weight_shape"] = torch.tensor(weight.shape)
    if not scheme.symmetric:
        found["weight_zero_point"] = pack_codes(signed_zeros(weight).T.int() + half, scheme.bits).T.contiguous()
    if columns is not None:
        places = torch.arange(len(columns), dtype=torch.int32) // (scheme.group or len(columns))
        found["weight_g_idx"] = torch.empty_like(places).index_copy_(0, columns, places)
    return found


def signed_codes(weight: QuantizedTensor) -> Tensor:
    """int8 [out, in], columns as they are stored."""
    if weight.format == INT4:
        return int4.unpack_int4(weight.parts["q"], weight.shape[1]).to(torch.int8) - int4.INT4_ZERO_POINT
    return weight.parts["q"]


def signed_zeros(weight: QuantizedTensor) -> Tensor:
    """int8 [out, groups]"""
    zero = weight.parts["zero"]
    return zero.to(torch.int8) - int4.INT4_ZERO_POINT if weight.format == INT4 else zero.to(torch.int8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """int32 [rows, n] of numbers below 2^bits -> int32 [rows, ceil(n * bits / 32)]; bits divide 32."""
    a_word = WORD_BITS // bits
    words = torch.nn.functional.pad(codes, (0, -codes.shape[1] % a_word)).unflatten(1, (-1, a_word))
    places = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words << places).sum(2, dtype=torch.int32)


def quantization_config(schemes: Mapping[str, StorageScheme], unquantized: Sequence[str]) -> dict[str, Any]:
    """What config.json says under that name.

    schemes: of each quantized module; unquantized: modules with a matrix that is not quantized. The scheme of most
    modules is that of every Linear, others are listed by name.
    """
    modules: dict[StorageScheme, list[str]] = {}
    for module, scheme in sorted(schemes.items()):
        modules.setdefault(scheme, []).append(module)
    in_order = sorted(modules, key=lambda scheme: (-len(modules[scheme]), scheme))
    groups = {
        f"group_{i}": scheme.config_group([EVERY_LINEAR] if i == 0 else modules[scheme])
        for i, scheme in enumerate(in_order)
    }
    formats = {scheme.format for scheme in in_order}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(unquantized),
        "kv_cache_scheme": None,
    }
