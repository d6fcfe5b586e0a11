"""Quantizes the matrices of one layer by a recipe, with statistics of a calibration text."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from localllm.arch.config import ModelConfig
from localllm.checkpoint.header import Header
from localllm.errors import DamagedModel
from localllm.plan.weights import UNQUANTIZED_MATRIX
from localllm.quant.dequantize import dequantize
from localllm.quant.grid import Grid, quantize_rtn, row_tiles
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize import awq, gptq, smoothquant
from localllm.quantize.folds import ScaleFold, apply_fold, find_folds
from localllm.quantize.inputs import InputStatistics
from localllm.quantize.layers import HiddenStates, InputHook, RecordedWeights, build_layer, observe_linears
from localllm.quantize.source import Recipe
from localllm.quantize.states import QuantizationResult
from localllm.runtime.kernels.threads import run_in_parts

MIN_INPUT_ROWS = 64  # inputs that a matrix must have received for calibration
MAX_SEARCHED_MATRICES = 8  # matrices evaluated in a scale search, evenly selected if more share the same inputs
FLOAT32_BYTES = 4
SCALE_SEARCHES = {"awq": awq.search_scale, "smoothquant": smoothquant.search_scale}


def quantizable_names(recorded: RecordedWeights) -> list[str]:
    """Return the names of the matrices that are quantized, without `.weight`."""
    return [
        name
        for names in recorded.matrix_groups()
        for name in names
        if not UNQUANTIZED_MATRIX.fullmatch(f"{name}.weight")
    ]


def round_to_nearest(weight: Tensor, grid: Grid) -> tuple[QuantizedTensor, float]:
    """Round to nearest, and return |Q(W) - W| / |W| as well. weight: [out, in], of any float dtype"""
    quantized: dict[int, QuantizedTensor] = {}
    squares: dict[int, Tensor] = {}  # of errors and weights

    def quantize_part(part: int, parts: int) -> None:
        rows = weight.tensor_split(parts)[part]
        quantized[part] = quantize_rtn(rows, grid)
        squares[part] = squared_error(rows, quantized[part])

    run_in_parts(quantize_part)
    parts_in_order = [quantized[part] for part in sorted(quantized)]
    parts = {
        name: torch.cat([quantize_part.parts[name] for quantize_part in parts_in_order])
        for name in parts_in_order[0].parts
    }
    squared_difference, squared_weight = sum(squares.values(), torch.zeros(2)).tolist()
    shape = (weight.shape[0], weight.shape[1])
    return QuantizedTensor(grid.format, shape, parts, grid.group), (
        squared_difference / squared_weight
    ) ** 0.5 if squared_weight else 0.0


def relative_error(difference: Tensor, exact: Tensor) -> float:
    """Return |error| / |exact|; 0 for a zero matrix, which may have been pruned."""
    norm = exact.norm()
    return (difference.norm() / norm).item() if norm else 0.0


def squared_error(weight: Tensor, quantized: QuantizedTensor) -> Tensor:
    """Return [2] float32: |Q(W) - W|^2 and |W|^2, computing a few rows at a time."""
    squares, begin = torch.zeros(2), 0
    for rows in row_tiles(weight):
        parts = {name: part[begin : begin + len(rows)] for name, part in quantized.parts.items()}
        dequantized = dequantize(
            replace(quantized, shape=(len(rows), weight.shape[1]), parts=parts), torch.float32
        )
        squares += torch.stack(((dequantized - rows).square().sum(), rows.float().square().sum()))
        begin += len(rows)
    return squares


class CalibratedLayer:
    """A layer during calibration.

    recorded.tensors are the layer's tensors, updated by folds; quantized matrices are replaced by their
    dequantized values in float32.
    """

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
        """Quantize the layer, advance the hidden states through it, and return its tensors.

        Raises DamagedModel if inputs are not finite.
        """
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
        """Return the products whose inputs are collected in the same run of the layer.

        GPTQ's X^T X of one round take at most the memory of the layer, or of a single product. Later rounds see
        the outputs of already quantized products.
        """
        products = self.recorded.matrix_groups()
        if self.recipe.method != "gptq":
            return [products]
        limit = sum(tensor.numel() for tensor in self.recorded.tensors.values()) * FLOAT32_BYTES
        rounds: list[list[tuple[str, ...]]] = []
        remaining = 0
        for names in products:
            needed = self.input_width(names[0]) ** 2 * FLOAT32_BYTES
            if needed > remaining or not rounds:
                rounds.append([])
                remaining = limit
            rounds[-1].append(names)
            remaining -= needed
        return rounds

    def input_width(self, name: str) -> int:
        return self.recorded.tensors[f"{name}.weight"].shape[1]

    def collect_inputs(self, products: list[tuple[str, ...]]) -> None:
        def make_hook(names: tuple[str, ...]) -> InputHook | None:
            if names not in products:
                return None
            hessian = self.recipe.method == "gptq" and not UNQUANTIZED_MATRIX.fullmatch(f"{names[0]}.weight")
            statistics = InputStatistics(self.input_width(names[0]), len(self.hidden_states.ids), hessian)
            self.inputs.update(dict.fromkeys(names, statistics))

            def hook(x: Tensor) -> Tensor:
                statistics.add(x)
                return x

            return hook

        layer = build_layer(self.header, self.config, self.index, self.recorded, torch.float32, stack=True)
        observe_linears(layer, self.recorded.stacked_names, make_hook)
        self.hidden_states.run_layer(layer, self.index, keep=False)
        for name, statistics in self.inputs.items():
            if not statistics.finite:
                raise DamagedModel(
                    f"on the calibration text, inputs of {name} are NaN or infinite", "fetch the model again"
                )

    def fold_scales(self) -> None:
        kv_shared = self.index in self.hidden_states.shared_kv_layers
        tensors = self.recorded.tensors
        config = self.config.layers[self.index]
        for fold in find_folds(config, f"layers.{self.index}.", tensors, kv_shared):
            statistics = self.inputs[fold.readers[0]]
            if statistics.count < MIN_INPUT_ROWS:
                continue
            s = SCALE_SEARCHES[self.recipe.method](
                self.search_matrices(fold), statistics, self.grid, fold.nearest_foldable
            )
            apply_fold(fold, s, tensors, self.header.layout.norm_offset)
            if fold.norm:  # in the dtype in which it will be loaded
                name = f"{fold.norm}.weight"
                tensors[name] = tensors[name].to(self.dtype_of(name)).float()
            for statistics in {id(self.inputs[name]): self.inputs[name] for name in fold.readers}.values():
                statistics.divide(s)

    def search_matrices(self, fold: ScaleFold) -> list[Tensor]:
        names = [name for name in fold.readers if not UNQUANTIZED_MATRIX.fullmatch(f"{name}.weight")]
        return [
            self.recorded.tensors[f"{name}.weight"] for name in names[:: -(-len(names) // MAX_SEARCHED_MATRICES)]
        ]

    def quantize_matrix(self, name: str, outcome: QuantizationResult) -> None:
        weight, statistics = self.recorded.tensors[f"{name}.weight"], self.inputs[name]
        if statistics.count < MIN_INPUT_ROWS:
            quantized = quantize_rtn(weight, self.grid)
            outcome.rounded.append(name)
        elif self.recipe.method == "gptq" and statistics.hessian is not None:
            try:
                quantized = gptq.quantize(weight, statistics.hessian, self.grid)
            except gptq.SingularHessian:
                raise DamagedModel(
                    f"on the calibration text, inputs of {name} have no finite second moments",
                    "fetch the model again",
                ) from None
        elif self.recipe.method == "awq":
            quantized = awq.quantize(weight, statistics, self.grid)
        else:
            quantized = quantize_rtn(weight, self.grid)
        dequantized = dequantize(quantized, torch.float32)
        outcome.errors[name] = self.output_error(statistics.samples, weight, dequantized)
        self.quantized_matrices[name], self.recorded.tensors[f"{name}.weight"] = quantized, dequantized

    def output_error(self, samples: Tensor, weight: Tensor, dequantized: Tensor) -> float:
        if not len(samples):
            return relative_error(dequantized - weight, weight)
        exact = samples @ weight.T
        return relative_error(self.round_activations(samples) @ dequantized.T - exact, exact)

    def round_activations(self, x: Tensor) -> Tensor:
        return smoothquant.fake_quantize_tokens(x) if self.recipe.activations else x

    def advance_hidden_states(self) -> None:
        """Run the layer in its current state to replace the hidden states."""

        def make_hook(names: tuple[str, ...]) -> InputHook | None:
            return None if UNQUANTIZED_MATRIX.fullmatch(f"{names[0]}.weight") else self.round_activations

        layer = build_layer(self.header, self.config, self.index, self.recorded, torch.float32, stack=True)
        if self.recipe.activations:
            observe_linears(layer, self.recorded.stacked_names, make_hook)
        self.hidden_states.run_layer(layer, self.index, keep=True)
