"""The matrices of one layer that has heard a calibration text, quantized by a recipe."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from localllm.arch.config import ModelConfig
from localllm.checkpoint.header import Header
from localllm.errors import DamagedModel
from localllm.plan.weights import UNQUANTIZED_MATRIX
from localllm.quant.dequantize import dequantize
from localllm.quant.grid import Grid, row_tiles
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize import awq, gptq, rtn, smoothquant
from localllm.quantize.folds import ScaleFold, apply_fold, find_folds
from localllm.quantize.inputs import InputStatistics
from localllm.quantize.layers import HiddenStates, InputHook, build_layer, observe_linears
from localllm.quantize.recipe import Recipe
from localllm.quantize.resident import RecordedWeights
from localllm.quantize.states import QuantizationResult
from localllm.runtime.kernels.threads import run_in_parts

MIN_INPUT_ROWS = 64  # inputs that a matrix must have seen to be fitted to them
MAX_SEARCHED_MATRICES = 8  # matrices that a scale is searched for, spread over all where more read the same inputs
FLOAT32_BYTES = 4  # bytes
SCALE_SEARCHES = {"awq": awq.search_scale, "smoothquant": smoothquant.search_scale}


def quantizable_names(holding: RecordedWeights) -> list[str]:
    """The names of the matrices that a recipe is for, without `.weight`."""
    return [
        name
        for names in holding.matrix_groups()
        for name in names
        if not UNQUANTIZED_MATRIX.fullmatch(f"{name}.weight")
    ]


def round_to_nearest(weight: Tensor, grid: Grid) -> tuple[QuantizedTensor, float]:
    """To nearest, and |Q(W) - W| / |W|. weight: [out, in], of any float dtype"""
    made: dict[int, QuantizedTensor] = {}
    squares: dict[int, Tensor] = {}  # of what is off, and of the whole

    def some(part: int, parts: int) -> None:
        rows = weight.tensor_split(parts)[part]
        made[part] = rtn.quantize(rows, grid)
        squares[part] = squared_error(rows, made[part])

    run_in_parts(some)
    each = [made[part] for part in sorted(made)]
    parts = {name: torch.cat([some.parts[name] for some in each]) for name in each[0].parts}
    off, whole = sum(squares.values(), torch.zeros(2)).tolist()
    shape = (weight.shape[0], weight.shape[1])
    return QuantizedTensor(grid.format, shape, parts, grid.group), (off / whole) ** 0.5 if whole else 0.0


def relative_error(off: Tensor, exact: Tensor) -> float:
    """|off| / |exact|; 0 where there is nothing, as of a matrix that was pruned whole."""
    whole = exact.norm()
    return (off.norm() / whole).item() if whole else 0.0


def squared_error(weight: Tensor, made: QuantizedTensor) -> Tensor:
    """[2] float32: |Q(W) - W|^2 and |W|^2, a few rows at a time."""
    found, begin = torch.zeros(2), 0
    for rows in row_tiles(weight):
        parts = {name: part[begin : begin + len(rows)] for name, part in made.parts.items()}
        became = dequantize(replace(made, shape=(len(rows), weight.shape[1]), parts=parts), torch.float32)
        found += torch.stack(((became - rows).square().sum(), rows.float().square().sum()))
        begin += len(rows)
    return found


class CalibratedLayer:
    """tensors: the layer's, changed by folds, and of quantized matrices what they now stand for, in float32."""

    def __init__(
        self,
        header: Header,
        config: ModelConfig,
        recipe: Recipe,
        grid: Grid,
        index: int,
        stream: HiddenStates,
        dtype_of: Callable[[str], torch.dtype],
    ):
        self.header = header
        self.config = config
        self.recipe = recipe
        self.grid = grid
        self.index = index
        self.hidden_states = stream
        self.dtype_of = dtype_of
        self.recorded = RecordedWeights()
        self.inputs: dict[str, InputStatistics] = {}
        self.quantized_matrices: dict[str, QuantizedTensor] = {}

    def quantize(self, outcome: QuantizationResult) -> dict[str, Tensor | QuantizedTensor]:
        """Runs the stream through the quantized layer -> the layer's tensors. Raises DamagedModel where inputs are
        not finite."""
        build_layer(self.header, self.config, self.index, self.recorded, torch.float32, stack=False)
        for products in self.product_rounds():
            self.collect_inputs(products)
            if self.recipe.method in SCALE_SEARCHES:
                self.fold_scales()
            for name in (
                name for names in products for name in names if not UNQUANTIZED_MATRIX.fullmatch(f"{name}.weight")
            ):
                self.quantize_matrix(name, outcome)
            self.inputs.clear()
        self.advance_hidden_states()
        return {
            name: self.quantized_matrices.get(name.removesuffix(".weight"), tensor)
            for name, tensor in self.recorded.tensors.items()
        }

    def product_rounds(self) -> list[list[tuple[str, ...]]]:
        """The products that are heard in one run of the layer: GPTQ's X^T X of a round take no more memory than
        the layer, or than one. Those of a later round hear what the quantized ones before them give."""
        products = self.recorded.matrix_groups()
        if self.recipe.method != "gptq":
            return [products]
        limit = sum(tensor.numel() for tensor in self.recorded.tensors.values()) * FLOAT32_BYTES
        found: list[list[tuple[str, ...]]] = []
        room = 0
        for names in products:
            needed = self.input_width(names[0]) ** 2 * FLOAT32_BYTES
            if needed > room or not found:
                found.append([])
                room = limit
            found[-1].append(names)
            room -= needed
        return found

    def input_width(self, name: str) -> int:
        return self.recorded.tensors[f"{name}.weight"].shape[1]

    def collect_inputs(self, products: list[tuple[str, ...]]) -> None:
        def ear(names: tuple[str, ...]) -> InputHook | None:
            if names not in products:
                return None
            hessian = self.recipe.method == "gptq" and not UNQUANTIZED_MATRIX.fullmatch(f"{names[0]}.weight")
            heard = InputStatistics(self.input_width(names[0]), len(self.hidden_states.ids), hessian)
            self.inputs.update(dict.fromkeys(names, heard))

            def see(x: Tensor) -> Tensor:
                heard.add(x)
                return x

            return see

        layer = build_layer(self.header, self.config, self.index, self.recorded, torch.float32, stack=True)
        observe_linears(layer, self.recorded.stacked_names, ear)
        self.hidden_states.run_layer(layer, self.index, keep=False)
        for name, heard in self.inputs.items():
            if not heard.finite:
                raise DamagedModel(
                    f"on the calibration text the inputs of {name} are NaN or infinite", "fetch the model again"
                )

    def fold_scales(self) -> None:
        others_read = self.index in self.hidden_states.shared_kv_layers
        tensors = self.recorded.tensors
        config = self.config.layers[self.index]
        for fold in find_folds(config, f"layers.{self.index}.", tensors, others_read):
            heard = self.inputs[fold.readers[0]]
            if heard.count < MIN_INPUT_ROWS:
                continue
            s = SCALE_SEARCHES[self.recipe.method](
                self.search_matrices(fold), heard, self.grid, fold.nearest_foldable
            )
            apply_fold(fold, s, tensors, self.header.layout.norm_offset)
            if fold.norm:  # as it will be read
                name = f"{fold.norm}.weight"
                tensors[name] = tensors[name].to(self.dtype_of(name)).float()
            for each in {id(self.inputs[name]): self.inputs[name] for name in fold.readers}.values():
                each.divide(s)

    def search_matrices(self, fold: ScaleFold) -> list[Tensor]:
        names = [name for name in fold.readers if not UNQUANTIZED_MATRIX.fullmatch(f"{name}.weight")]
        return [
            self.recorded.tensors[f"{name}.weight"] for name in names[:: -(-len(names) // MAX_SEARCHED_MATRICES)]
        ]

    def quantize_matrix(self, name: str, outcome: QuantizationResult) -> None:
        weight, heard = self.recorded.tensors[f"{name}.weight"], self.inputs[name]
        if heard.count < MIN_INPUT_ROWS:
            made = rtn.quantize(weight, self.grid)
            outcome.rounded.append(name)
        elif self.recipe.method == "gptq" and heard.hessian is not None:
            try:
                made = gptq.quantize(weight, heard.hessian, self.grid)
            except gptq.SingularHessian:
                raise DamagedModel(
                    f"on the calibration text the inputs of {name} have no finite second moments",
                    "fetch the model again",
                ) from None
        elif self.recipe.method == "awq":
            made = awq.quantize(weight, heard, self.grid)
        else:
            made = rtn.quantize(weight, self.grid)
        became = dequantize(made, torch.float32)
        outcome.errors[name] = self.output_error(heard.samples, weight, became)
        self.quantized_matrices[name], self.recorded.tensors[f"{name}.weight"] = made, became

    def output_error(self, rows: Tensor, weight: Tensor, became: Tensor) -> float:
        if not len(rows):
            return relative_error(became - weight, weight)
        exact = rows @ weight.T
        return relative_error(self.round_activations(rows) @ became.T - exact, exact)

    def round_activations(self, x: Tensor) -> Tensor:
        return smoothquant.fake_quantize_tokens(x) if self.recipe.activations else x

    def advance_hidden_states(self) -> None:
        """The hidden states become those behind the layer as it is now."""

        def ear(names: tuple[str, ...]) -> InputHook | None:
            return None if UNQUANTIZED_MATRIX.fullmatch(f"{names[0]}.weight") else self.round_activations

        layer = build_layer(self.header, self.config, self.index, self.recorded, torch.float32, stack=True)
        if self.recipe.activations:
            observe_linears(layer, self.recorded.stacked_names, ear)
        self.hidden_states.run_layer(layer, self.index, keep=True)
