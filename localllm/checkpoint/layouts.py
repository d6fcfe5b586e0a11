"""The supported layouts of quantized checkpoints, as described by config.json. Needs no torch.

config.json lists the possible schemes: bits, groups, zero points. Which matrices are quantized, and with which
scheme, is determined from their tensors (`Quantization.find_scheme`), so that a file's module lists and patterns
are never matched.

Sources: AutoAWQ's `packing_utils`, AutoGPTQ's and GPTQModel's `QuantLinear`, the package compressed-tensors,
transformers' `finegrained_fp8`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.arch.fields import ConfigFields
from localllm.errors import DamagedModel, UnsupportedModel

SUPPORTED_BITS = (4, 8)
WORD_BITS = 32
STRATEGIES = ("tensor", "channel", "group", "block")
PACK_QUANTIZED = "pack-quantized"
FORMATS = (PACK_QUANTIZED, "int-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Scheme:
    """One way in which matrices of a checkpoint are stored."""

    bits: int = 4
    group_size: int | None = None  # columns that share a scale; None: all of a row
    rows: int = 1  # rows that share a scale
    symmetric: bool = True  # otherwise groups have zero points
    floats: bool = False  # E4M3, otherwise integers
    words: bool = True  # several codes in an int32, otherwise a code in an int8

    def group_count(self, columns: int) -> int:
        return -(-columns // self.group_size) if self.group_size else 1


@dataclass(frozen=True)
class Quantization:
    method: str
    schemes: tuple[Scheme, ...] = ()
    zero_offset: int = 0  # subtracted from stored zero points
    act_order: bool = False  # a group's columns may not be adjacent
    activations: bool = False  # INT8 weights outside words are multiplied with activations in INT8

    def find_scheme(self, columns: int, groups: int, **known: object) -> Scheme | None:
        """Return the scheme whose matrices have `groups` groups per row of `columns` columns.

        known: required values of fields. Returns None if there is no such scheme, or several with different
        meaning.
        """
        fitting = {
            scheme
            for scheme in self.schemes
            if scheme.group_count(columns) == groups
            and all(getattr(scheme, name) == value for name, value in known.items())
        }
        # A row with one group is the same for any larger group size in config.json.
        return (
            next(iter(fitting))
            if len(fitting) == 1 or (groups == 1 and len({s.symmetric for s in fitting}) == 1)
            else None
        )


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Parse the quantization; None for weights that are not quantized.

    Raises UnsupportedModel for an unsupported quantization, and DamagedModel for invalid fields.
    """
    if not ConfigFields(config).has("quantization_config"):
        return None
    layout = ConfigFields(config).section("quantization_config")
    method = layout.text("quant_method")
    if method not in READERS:
        raise unsupported(f"{method} {layout.text('format', '')}".strip(), "")
    return READERS[method](layout)


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raise like `read_quantization`."""
    read_quantization(config)


def unsupported(method: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the quantization {method!r}{why} is not supported",
        "use the version that is not quantized, a GGUF file, AWQ, GPTQ, FP8, MXFP4, or compressed-tensors",
    )


def awq(layout: ConfigFields) -> Quantization:
    bits = layout.size("bits", layout.size("w_bit", 4))
    version = layout.text("version", layout.text("format", "gemm")).lower()
    if bits != 4:
        raise unsupported("awq", f" in {bits} bits")
    if version != "gemm":
        raise unsupported("awq", f" in the layout {version!r}")
    group = group_size(layout, "group_size" if layout.has("group_size") else "q_group_size", 128)
    return Quantization("awq", (Scheme(4, group, symmetric=not layout.flag("zero_point", True)),))


def gptq(layout: ConfigFields) -> Quantization:
    checkpoint_format = layout.text("checkpoint_format", layout.text("format", "gptq")).lower()
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise unsupported("gptq", f" in the layout {checkpoint_format!r}")
    schemes = [gptq_scheme(layout.values)]
    overrides = layout.section("dynamic")  # by patterns of modules; those that begin with `-` are not quantized
    schemes += [
        gptq_scheme({**layout.values, **overrides.section(pattern).values}) for pattern in overrides.values
    ]
    # Version 1 subtracts one from zero points, in whole words, and it is added back likewise.
    zero_offset = 1 if checkpoint_format == "gptq" else 0
    return Quantization("gptq", tuple(dict.fromkeys(schemes)), zero_offset, layout.flag("desc_act"))


def gptq_scheme(values: Mapping[str, Any]) -> Scheme:
    fields = ConfigFields(values)
    bits = fields.size("bits")
    if bits not in SUPPORTED_BITS:
        raise unsupported("gptq", f" in {bits} bits")
    # If it is not stated, the tensors determine whether there are zero points.
    return Scheme(bits, group_size(fields, "group_size", None), symmetric=fields.flag("sym"))


def fp8(layout: ConfigFields) -> Quantization:
    """Parse FP8. Activations stay in the model's dtype, which is more precise than the file requires."""
    if layout.text("expert_dtype", "fp8") != "fp8":
        raise unsupported("fp8", f" with experts in {layout.text('expert_dtype')}")
    rows, group = block_shape(layout, "weight_block_size")
    return Quantization(layout.text("quant_method"), (Scheme(8, group, rows, floats=True, words=False),))


def mxfp4(layout: ConfigFields) -> Quantization:
    return Quantization("mxfp4")


def compressed_tensors(layout: ConfigFields) -> Quantization:
    format_name = layout.text("format", "")
    if layout.section("transform_config").values:
        raise unsupported(f"compressed-tensors {format_name}".strip(), " with transforms of the activations")
    if layout.section("sparsity_config").text("format", "dense") != "dense":
        raise unsupported(f"compressed-tensors {format_name}".strip(), " of sparse weights")
    groups = layout.section("config_groups")
    if not groups.values:
        raise unsupported(f"compressed-tensors {format_name}".strip(), " without config_groups")
    parsed = [compressed_scheme(groups.section(name), format_name) for name in groups.values]
    activations = {quantized for scheme, quantized in parsed if not (scheme.words or scheme.floats)}
    if len(activations) > 1:
        raise unsupported(f"compressed-tensors {format_name}", " of some activations and not of others")
    schemes = tuple(dict.fromkeys(scheme for scheme, _ in parsed))
    act_order = any(
        groups.section(name).section("weights").values.get("actorder") in ("group", "dynamic", True)
        for name in groups.values
    )
    return Quantization("compressed-tensors", schemes, act_order=act_order, activations=activations == {True})


def compressed_scheme(group: ConfigFields, format: str) -> tuple[Scheme, bool]:
    """Parse one of config_groups, and return whether its activations are quantized to INT8.

    format: of groups that specify none.
    """
    format = group.text("format", format)
    name = f"compressed-tensors {format}".strip()
    weights, inputs = group.section("weights"), group.section("input_activations")
    bits, floats = weights.size("num_bits", 8), weights.text("type", "int").lower() == "float"
    strategy = weights.text("strategy", "group" if group_size(weights, "group_size", None) else "tensor")
    if (
        format not in FORMATS
        or bits not in SUPPORTED_BITS
        or (bits == 4 and format != PACK_QUANTIZED)
        or (floats and format == PACK_QUANTIZED)
    ):
        raise unsupported(name, f" of {bits} bits")
    if strategy not in STRATEGIES:
        raise unsupported(name, f" by {strategy}")
    if group.has("output_activations"):
        raise unsupported(name, " of outputs")
    rows, columns = 1, None
    if strategy == "group":
        columns = weights.size("group_size")
    if strategy == "block":
        rows, columns = block_shape(weights, "block_structure")
    scheme = Scheme(bits, columns, rows, weights.flag("symmetric", True), floats, format == PACK_QUANTIZED)
    if not inputs.values or (floats and inputs.text("type", "int").lower() == "float"):
        return scheme, False
    per_token = (inputs.size("num_bits", 8), inputs.text("type", "int"), inputs.text("strategy", "tensor")) == (
        *(8, "int", "token"),
    )
    if not inputs.values.get("dynamic"):
        raise unsupported(name, " with static scales of activations")
    if scheme.words or not per_token or not inputs.flag("symmetric", True):
        raise unsupported(name, f" of {bits} bits with these activations")
    if not scheme.symmetric or scheme.group_size or scheme.rows > 1:
        raise unsupported(name, " of activations with groups or zero points in the weights")
    return scheme, True


def group_size(fields: ConfigFields, name: str, default: int | None) -> int | None:
    """Return the group size, or None for -1, which means the entire row."""
    return None if fields.values.get(name) == -1 else fields.size(name, default)


def block_shape(fields: ConfigFields, name: str) -> tuple[int, int | None]:
    """Return the rows and columns that share a scale; one row and all columns if the field is missing."""
    if not fields.has(name):
        return 1, None
    sizes = fields.values[name]
    if isinstance(sizes, str):
        sizes = [int(size) if size.isdigit() and len(size) < 7 else size for size in sizes.split("x")]
    if not isinstance(sizes, list) or len(sizes) != 2:
        raise DamagedModel(f"{name} in config.json is {sizes!r:.60}, not two sizes", "fetch the model again")
    rows, columns = (ConfigFields({name: size}).size(name) for size in sizes)
    return rows, columns


READERS: dict[str, Callable[[ConfigFields], Quantization]] = {
    "awq": awq,
    "gptq": gptq,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "mxfp4": mxfp4,
    "compressed-tensors": compressed_tensors,
}
