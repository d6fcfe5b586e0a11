"""The matrices of one layer that has heard a calibration text, quantized by a recipe."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from localllm.arch.config import ModelConfig
from localllm.checkpoint.header import Header
from localllm.errors import DamagedModel
from localllm.plan.weights import KEPT
from localllm.quant import awq, gptq, rtn, smooth
from localllm.quant.dequantize import dequantize
from localllm.quant.grid import Grid, tiles
from localllm.quant.inputs import Inputs
from localllm.quant.recipe import Recipe
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize.folds import Fold, apply, folds
from localllm.quantize.held import Holding
from localllm.quantize.layers import See, Stream, build, watch
from localllm.quantize.states import Outcome
from localllm.runtime.kernels.threads import in_parts

LEAST_ROWS = 64  # inputs that a matrix must have seen to be fitted to them
MOST_READERS = 8  # matrices that a scale is searched for, spread over all where more read the same inputs
FLOAT = 4  # bytes
SCALES = {"awq": awq.scale_of, "smoothquant": smooth.scale_of}


def quantized(holding: Holding) -> list[str]:
    """The names of the matrices that a recipe is for, without `.weight`."""
    return [name for names in holding.matrices() for name in names if not KEPT.fullmatch(f"{name}.weight")]


def rounded(weight: Tensor, grid: Grid) -> tuple[QuantizedTensor, float]:
    """To nearest, and |Q(W) - W| / |W|. weight: [out, in], of any float dtype"""
    made: dict[int, QuantizedTensor] = {}
    squares: dict[int, Tensor] = {}  # of what is off, and of the whole

    def some(part: int, parts: int) -> None:
        rows = weight.tensor_split(parts)[part]
        made[part] = rtn.quantize(rows, grid)
        squares[part] = distance(rows, made[part])

    in_parts(some)
    each = [made[part] for part in sorted(made)]
    parts = {name: torch.cat([some.parts[name] for some in each]) for name in each[0].parts}
    off, whole = sum(squares.values(), torch.zeros(2)).tolist()
    shape = (weight.shape[0], weight.shape[1])
    return QuantizedTensor(grid.format, shape, parts, grid.group), (off / whole) ** 0.5 if whole else 0.0


def relative(off: Tensor, exact: Tensor) -> float:
    """|off| / |exact|; 0 where there is nothing, as of a matrix that was pruned whole."""
    whole = exact.norm()
    return (off.norm() / whole).item() if whole else 0.0


def distance(weight: Tensor, made: QuantizedTensor) -> Tensor:
    """[2] float32: |Q(W) - W|^2 and |W|^2, a few rows at a time."""
    found, begin = torch.zeros(2), 0
    for rows in tiles(weight):
        parts = {name: part[begin : begin + len(rows)] for name, part in made.parts.items()}
        became = dequantize(replace(made, shape=(len(rows), weight.shape[1]), parts=parts), torch.float32)
        found += torch.stack(((became - rows).square().sum(), rows.float().square().sum()))
        begin += len(rows)
    return found


class Calibrated:
    """tensors: the layer's, changed by folds, and of quantized matrices what they now stand for, in float32."""

    def __init__(
        self,
        header: Header,
        config: ModelConfig,
        recipe: Recipe,
        grid: Grid,
        index: int,
        stream: Stream,
        dtype_of: Callable[[str], torch.dtype],
    ):
        self.header = header
        self.config = config
        self.recipe = recipe
        self.grid = grid
        self.index = index
        self.stream = stream
        self.dtype_of = dtype_of
        self.holding = Holding()
        self.inputs: dict[str, Inputs] = {}
        self.packed: dict[str, QuantizedTensor] = {}

    def quantize(self, outcome: Outcome) -> dict[str, Tensor | QuantizedTensor]:
        """Runs the stream through the quantized layer -> the layer's tensors. Raises DamagedModel where inputs are
        not finite."""
        build(self.header, self.config, self.index, self.holding, torch.float32, stack=False)
        for products in self.rounds():
            self.hear(products)
            if self.recipe.method in SCALES:
                self.fold()
            for name in (name for names in products for name in names if not KEPT.fullmatch(f"{name}.weight")):
                self.one(name, outcome)
            self.inputs.clear()
        self.run_on()
        return {
            name: self.packed.get(name.removesuffix(".weight"), tensor)
            for name, tensor in self.holding.tensors.items()
        }

    def rounds(self) -> list[list[tuple[str, ...]]]:
        """The products that are heard in one run of the layer: GPTQ's X^T X of a round take no more memory than
        the layer, or than one. Those of a later round hear what the quantized ones before them give."""
        products = self.holding.matrices()
        if self.recipe.method != "gptq":
            return [products]
        limit = sum(tensor.numel() for tensor in self.holding.tensors.values()) * FLOAT
        found: list[list[tuple[str, ...]]] = []
        room = 0
        for names in products:
            needed = self.columns(names[0]) ** 2 * FLOAT
            if needed > room or not found:
                found.append([])
                room = limit
            found[-1].append(names)
            room -= needed
        return found

    def columns(self, name: str) -> int:
        return self.holding.tensors[f"{name}.weight"].shape[1]

    def hear(self, products: list[tuple[str, ...]]) -> None:
        def ear(names: tuple[str, ...]) -> See | None:
            if names not in products:
                return None
            hessian = self.recipe.method == "gptq" and not KEPT.fullmatch(f"{names[0]}.weight")
            heard = Inputs(self.columns(names[0]), len(self.stream.ids), hessian)
            self.inputs.update(dict.fromkeys(names, heard))

            def see(x: Tensor) -> Tensor:
                heard.add(x)
                return x

            return see

        layer = build(self.header, self.config, self.index, self.holding, torch.float32, stack=True)
        watch(layer, self.holding.joined, ear)
        self.stream.run(layer, self.index, keep=False)
        for name, heard in self.inputs.items():
            if not heard.finite:
                raise DamagedModel(
                    f"on the calibration text the inputs of {name} are NaN or infinite", "fetch the model again"
                )

    def fold(self) -> None:
        others_read = self.index in self.stream.read_by_others
        tensors = self.holding.tensors
        config = self.config.layers[self.index]
        for fold in folds(config, f"layers.{self.index}.", tensors, others_read):
            heard = self.inputs[fold.readers[0]]
            if heard.count < LEAST_ROWS:
                continue
            s = SCALES[self.recipe.method](self.searched(fold), heard, self.grid, fold.allowed)
            apply(fold, s, tensors, self.header.layout.norm_offset)
            if fold.norm:  # as it will be read
                name = f"{fold.norm}.weight"
                tensors[name] = tensors[name].to(self.dtype_of(name)).float()
            for each in {id(self.inputs[name]): self.inputs[name] for name in fold.readers}.values():
                each.divided(s)

    def searched(self, fold: Fold) -> list[Tensor]:
        names = [name for name in fold.readers if not KEPT.fullmatch(f"{name}.weight")]
        return [self.holding.tensors[f"{name}.weight"] for name in names[:: -(-len(names) // MOST_READERS)]]

    def one(self, name: str, outcome: Outcome) -> None:
        weight, heard = self.holding.tensors[f"{name}.weight"], self.inputs[name]
        if heard.count < LEAST_ROWS:
            made = rtn.quantize(weight, self.grid)
            outcome.rounded.append(name)
        elif self.recipe.method == "gptq" and heard.hessian is not None:
            try:
                made = gptq.quantize(weight, heard.hessian, self.grid)
            except gptq.Singular:
                raise DamagedModel(
                    f"on the calibration text the inputs of {name} have no finite second moments",
                    "fetch the model again",
                ) from None
        elif self.recipe.method == "awq":
            made = awq.quantize(weight, heard, self.grid)
        else:
            made = rtn.quantize(weight, self.grid)
        became = dequantize(made, torch.float32)
        outcome.errors[name] = self.error(heard.rows, weight, became)
        self.packed[name], self.holding.tensors[f"{name}.weight"] = made, became

    def error(self, rows: Tensor, weight: Tensor, became: Tensor) -> float:
        if not len(rows):
            return relative(became - weight, weight)
        exact = rows @ weight.T
        return relative(self.as_multiplied(rows) @ became.T - exact, exact)

    def as_multiplied(self, x: Tensor) -> Tensor:
        return smooth.by_token(x) if self.recipe.activations else x

    def run_on(self) -> None:
        """The hidden states become those behind the layer as it is now."""

        def ear(names: tuple[str, ...]) -> See | None:
            return None if KEPT.fullmatch(f"{names[0]}.weight") else self.as_multiplied

        layer = build(self.header, self.config, self.index, self.holding, torch.float32, stack=True)
        if self.recipe.activations:
            watch(layer, self.holding.joined, ear)
        self.stream.run(layer, self.index, keep=True)
