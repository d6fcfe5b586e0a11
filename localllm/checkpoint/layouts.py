"""How config.json says that weights are stored: the layouts of quantized checkpoints that run, as they lie on the
Hub. Reads config.json alone and needs no torch.

It states what may be there: bits, groups, zero points. Which matrices are quantized, and in which of several ways,
their tensors tell (`Quantization.fitting`), so lists of names and patterns of a stranger are never matched.

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
    group_size: int | None = None  # neighbours in a row that share a scale; None: all of them
    rows: int = 1  # that share it, too
    symmetric: bool = True  # else groups have zero points
    floats: bool = False  # E4M3, else whole numbers
    words: bool = True  # several codes in an int32, else a code in an int8

    def group_count(self, columns: int) -> int:
        return -(-columns // self.group_size) if self.group_size else 1


@dataclass(frozen=True)
class Quantization:
    method: str
    schemes: tuple[Scheme, ...] = ()
    zero_offset: int = 0  # zero points are stored less this
    act_order: bool = False  # groups are of columns that may lie apart
    activations: bool = False  # INT8 that is not packed in words is multiplied with activations in INT8

    def find_scheme(self, columns: int, groups: int, **known: object) -> Scheme | None:
        """The scheme whose matrices with so many columns have so many groups in a row, of those with the fields
        that are known; None where there is none, or several that mean different weights."""
        fit = {
            scheme
            for scheme in self.schemes
            if scheme.group_count(columns) == groups
            and all(getattr(scheme, name) == is_ for name, is_ in known.items())
        }
        # A row that is one group means the same whatever longer group config.json names.
        return next(iter(fit)) if len(fit) == 1 or (groups == 1 and len({s.symmetric for s in fit}) == 1) else None


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """None for weights that are not quantized.

    Raises UnsupportedModel where config.json describes a quantization that does not run, DamagedModel for
    nonsense.
    """
    if not ConfigFields(config).has("quantization_config"):
        return None
    layout = ConfigFields(config).section("quantization_config")
    method = layout.text("quant_method")
    if method not in READERS:
        raise unsupported(f"{method} {layout.text('format', '')}".strip(), "")
    return READERS[method](layout)


def check_quantization(config: Mapping[str, Any]) -> None:
    """Raises as `read_quantization`."""
    read_quantization(config)


def unsupported(method: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the quantization {method!r}{why} is not supported",
        "take the edition that is not quantized, a GGUF file, AWQ, GPTQ, FP8, MXFP4, or compressed-tensors",
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
    form = layout.text("checkpoint_format", layout.text("format", "gptq")).lower()
    if form not in ("gptq", "gptq_v2"):
        raise unsupported("gptq", f" in the layout {form!r}")
    schemes = [gptq_scheme(layout.values)]
    changed = layout.section("dynamic")  # by patterns of modules; those that begin with `-` are left out
    schemes += [gptq_scheme({**layout.values, **changed.section(pattern).values}) for pattern in changed.values]
    # Version 1 stores zero points less one, as one subtraction from the whole word: so it is undone, too.
    less = 1 if form == "gptq" else 0
    return Quantization("gptq", tuple(dict.fromkeys(schemes)), less, layout.flag("desc_act"))


def gptq_scheme(values: Mapping[str, Any]) -> Scheme:
    fields = ConfigFields(values)
    bits = fields.size("bits")
    if bits not in SUPPORTED_BITS:
        raise unsupported("gptq", f" in {bits} bits")
    # Where it is not said, zero points are what the tensors say.
    return Scheme(bits, group_size(fields, "group_size", None), symmetric=fields.flag("sym"))


def fp8(layout: ConfigFields) -> Quantization:
    """Activations stay in the model's dtype, which is finer than what the file was made for."""
    if layout.text("expert_dtype", "fp8") != "fp8":
        raise unsupported("fp8", f" with experts in {layout.text('expert_dtype')}")
    rows, group = block_shape(layout, "weight_block_size")
    return Quantization(layout.text("quant_method"), (Scheme(8, group, rows, floats=True, words=False),))


def mxfp4(layout: ConfigFields) -> Quantization:
    return Quantization("mxfp4")


def compressed_tensors(layout: ConfigFields) -> Quantization:
    kind = layout.text("format", "")
    if layout.section("transform_config").values:
        raise unsupported(f"compressed-tensors {kind}".strip(), " with transforms of the activations")
    if layout.section("sparsity_config").text("format", "dense") != "dense":
        raise unsupported(f"compressed-tensors {kind}".strip(), " of sparse weights")
    groups = layout.section("config_groups")
    if not groups.values:
        raise unsupported(f"compressed-tensors {kind}".strip(), " without config_groups")
    found = [compressed_scheme(groups.section(name), kind) for name in groups.values]
    activations = {multiplied for scheme, multiplied in found if not (scheme.words or scheme.floats)}
    if len(activations) > 1:
        raise unsupported(f"compressed-tensors {kind}", " of some activations and not of others")
    schemes = tuple(dict.fromkeys(scheme for scheme, _ in found))
    ordered = any(
        groups.section(name).section("weights").values.get("actorder") in ("group", "dynamic", True)
        for name in groups.values
    )
    return Quantization("compressed-tensors", schemes, act_order=ordered, activations=activations == {True})


def compressed_scheme(group: ConfigFields, format: str) -> tuple[Scheme, bool]:
    """One of config_groups, and whether its activations are quantized to INT8 when they are multiplied.
    format: the format of groups that name none."""
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
        raise unsupported(name, " of what matrices give")
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
        raise unsupported(name, " with scales of activations that were fixed beforehand")
    if scheme.words or not per_token or not inputs.flag("symmetric", True):
        raise unsupported(name, f" of {bits} bits with these activations")
    if not scheme.symmetric or scheme.group_size or scheme.rows > 1:
        raise unsupported(name, " of activations with groups or zero points in the weights")
    return scheme, True


def group_size(fields: ConfigFields, name: str, default: int | None) -> int | None:
    """None for -1, which stands for a whole row."""
    return None if fields.values.get(name) == -1 else fields.size(name, default)


def block_shape(fields: ConfigFields, name: str) -> tuple[int, int | None]:
    """Rows and columns that share a scale; one row, and all columns, where the field is not there."""
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
