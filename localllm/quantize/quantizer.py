"""The quantizer: turns a model's folder and a recipe into an artefact, layer by layer, or resumes doing so.

It reads a layer, collects its inputs, quantizes and writes it, and runs the result. The only file it reads is the
checkpoint: an `Artefact` receives the finished tensors by their runtime names in parts `tables`, `layers.0`,
`layers.1`, ... and `head`. It needs the memory of one layer and of the hidden states: `quantize.check` has the
formula.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from localllm.arch.config import ModelConfig
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header
from localllm.checkpoint.tensors import Weights
from localllm.errors import UsageError
from localllm.plan.weights import stored_dtype
from localllm.quant.grid import Grid
from localllm.quant.packing import W8A8
from localllm.quant.tensor import QuantizedTensor
from localllm.quantize import states
from localllm.quantize.artefact import Artefact
from localllm.quantize.check import check_memory, check_recipe
from localllm.quantize.layers import CPU, HiddenStates, RecordedWeights, RecordingSource, build_layer
from localllm.quantize.matrices import CalibratedLayer, quantizable_names, round_to_nearest
from localllm.quantize.source import INSTEAD, Recipe, check_source
from localllm.quantize.states import QuantizationResult, digest_token_ids
from localllm.quantize.store import artefact_lock, artefact_path, find_artefact, recipe_of
from localllm.runtime.layers.linear import Embedding
from localllm.runtime.layers.norm import load_norm
from localllm.runtime.layers.per_layer import PerLayerInputs
from localllm.text.tokenizer import Tokenizer

WINDOW_TOKENS = 512  # of calibration text
MIN_CALIBRATION_TOKENS = 2048
MAX_WINDOWS = 64
Progress = Callable[[str, int, int], None]  # part, number of complete parts, number of parts
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def find_or_quantize(
    header: Header,
    quant: str,
    home: Path,
    on_progress: Progress = lambda part, done, count: None,
    notify: Callable[[str], object] = lambda text: None,
) -> Path:
    """Return the folder of the `--quant` version of a model, which is quantized the first time and reused later.

    notify: receives a message for the user. Raises UsageError for a source that is already quantized, and like
    `make_artefact`; an interrupted run is resumed the next time.
    """
    recipe = recipe_of(quant)
    check_source(header, INSTEAD)
    folder = artefact_path(home, header.path, quant)
    with artefact_lock(folder, lambda: notify(f"another process is quantizing {header.path}; waiting for it")):
        if (existing := find_artefact(home, header.path, quant)) is not None:
            return existing
        make_artefact(header, recipe, folder, on_progress, force=True)
    return folder


def make_artefact(
    header: Header,
    recipe: Recipe,
    folder: Path,
    on_progress: Progress,
    *,
    text: str | None = None,
    force: bool = False,
) -> QuantizationResult:
    """Quantize a model. text: calibration text, if the recipe uses one; None for the project's own.

    Raises like `Artefact` and `quantize_layers`, and UsageError for a text that is too short.
    """
    ids = None
    if recipe.method != "rtn":
        tokens = Tokenizer.from_folder(header.path).encode(default_calibration_text() if text is None else text)
        ids = calibration_windows(tokens, parse_config(header.config).max_context)
    calibration = digest_token_ids(ids) or None
    with Artefact(folder, header, recipe, calibration=calibration, force=force) as artefact:
        outcome = quantize_layers(header, recipe, ids, artefact, on_progress, artefact.states)
        artefact.finish()
    return outcome


def default_calibration_text() -> str:
    """Return prose, dialogue, code, lists and numbers in several languages, written for this project."""
    return (resources.files("localllm.quantize") / "calibration.txt").read_text(encoding="utf-8")


def calibration_windows(ids: Sequence[int], context: int) -> Tensor:
    """Return windows [windows, T] int64 of a text's tokens, dropping an incomplete one at the end.

    T is 512, or the model's context if that is shorter. For a text of more than 64 windows, 64 evenly spaced ones
    are returned. Raises UsageError for a text of fewer than 2,048 tokens.
    """
    if len(ids) < MIN_CALIBRATION_TOKENS:
        raise UsageError(
            f"the calibration text has {len(ids)} tokens, but {MIN_CALIBRATION_TOKENS} are needed",
            "name a longer text with --calib, or leave out --calib",
        )
    length = min(WINDOW_TOKENS, context)
    count = len(ids) // length
    indices = torch.linspace(0, count - 1, min(count, MAX_WINDOWS)).round().long()
    return torch.tensor(ids[: count * length]).view(count, length)[indices]


class PartWriter(Protocol):
    """`done`: names of complete parts. A part may be written again."""

    @property
    def done(self) -> set[str]: ...

    def write(self, part: str, tensors: Mapping[str, Tensor | QuantizedTensor]) -> None: ...


@torch.inference_mode()
def quantize_layers(
    header: Header,
    recipe: Recipe,
    ids: Tensor | None,
    artefact: PartWriter,
    on_progress: Progress,
    states_folder: Path | None = None,
) -> QuantizationResult:
    """Quantize a model.

    ids: calibration windows [windows, T] int64, not needed for `rtn`; states_folder: where the state for resuming
    an interrupted run is stored; without it, a run starts at the first layer.

    Raises UsageError for a recipe that contradicts itself or lacks its text, DoesNotFit, and errors of reading a
    checkpoint; DamagedModel if a layer computes NaN or infinity.
    """
    check_recipe(recipe)
    config = parse_config(header.config)
    if recipe.method == "rtn":
        ids = None
    elif ids is None:
        raise UsageError(f"{recipe.method} needs a calibration text", "give one, or use rtn")
    check_memory(header, config, recipe, 0 if ids is None else ids.numel())
    run = LayerwiseQuantizer(header, config, recipe, ids, artefact, on_progress, states_folder)
    run.write_tables()
    run.quantize_layers()
    run.write_head()
    return run.result


class LayerwiseQuantizer:
    def __init__(
        self,
        header: Header,
        config: ModelConfig,
        recipe: Recipe,
        ids: Tensor | None,
        artefact: PartWriter,
        on_progress: Progress,
        states_at: Path | None,
    ):
        self.header = header
        self.config = config
        self.recipe = recipe
        self.ids = ids
        self.artefact = artefact
        self.on_progress = on_progress
        self.states_folder = states_at
        self.calibration_digest = states.digest_token_ids(ids)
        self.result = QuantizationResult()
        # dtype of scales, and of tensors that were not stored dense
        self.dtype = DTYPES.get(stored_dtype(header, "cuda"), torch.float32)
        self.part_count = len(config.layers) + (2 if self.writes_head else 1)
        self.finished_count = 0

    @property
    def writes_head(self) -> bool:
        """Whether the head is written: a tied head that stays unquantized is the embedding."""
        return self.recipe.head_bits == 8 or not self.config.tie_embeddings

    def grid(self) -> Grid:
        recipe = self.recipe
        return Grid(recipe.bits, recipe.group, recipe.symmetric, self.dtype)

    def write_part(self, part: str, tensors: Mapping[str, Tensor | QuantizedTensor]) -> None:
        self.artefact.write(part, {name: self.as_stored(name, tensor) for name, tensor in tensors.items()})

    def as_stored(self, name: str, tensor: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
        """Return an unquantized tensor in its stored dtype."""
        if isinstance(tensor, QuantizedTensor):
            return tensor
        return tensor.to(self.dtype_of(name))

    def dtype_of(self, name: str) -> torch.dtype:
        entry = self.header.tensors.get(name)
        return DTYPES.get(entry.dtype, self.dtype) if entry else self.dtype

    def report_part(self, part: str) -> None:
        self.finished_count += 1
        self.on_progress(part, self.finished_count, self.part_count)

    def write_tables(self) -> None:
        """Write the tensors before and behind the layers that stay unquantized."""
        if "tables" not in self.artefact.done:
            c, recorded = self.config, RecordedWeights()
            source = RecordingSource(Weights(self.header), CPU, self.dtype, recorded)
            Embedding(source, "embed_tokens", c.vocab_size, c.hidden_size)
            if c.per_layer:
                PerLayerInputs(c.per_layer, c, source)
            load_norm(source, "norm", c.hidden_size, c)
            self.write_part("tables", recorded.tensors)
        self.report_part("tables")

    def write_head(self) -> None:
        if not self.writes_head:
            return
        c = self.config
        source = RecordingSource(Weights(self.header), CPU, self.dtype, RecordedWeights())
        name = "embed_tokens" if c.tie_embeddings else "lm_head"
        weight: Tensor | QuantizedTensor = source.dequantized_matrix(name, c.vocab_size, c.hidden_size)
        if self.recipe.head_bits == 8:
            # INT8 layers share their scheme with the head: transformers dequantizes a whole folder by one.
            grid = self.grid() if self.recipe.bits == 8 else Grid(8, None, True, self.dtype)
            weight, error = round_to_nearest(weight, grid)
            # Not part of the saved state, so the head is always quantized again.
            self.result.errors["lm_head"] = error
        self.write_part("head", {"lm_head.weight": weight})
        self.report_part("head")

    def quantize_layers(self) -> None:
        first, stream = self.resume()
        for index in range(len(self.config.layers)):
            part = f"layers.{index}"
            if index >= first:
                tensors = self.round_layer(index) if stream is None else self.calibrate_layer(index, stream)
                self.save_state(index + 1, stream)
                self.write_part(part, tensors)
                if self.states_folder:
                    states.remove_state(self.states_folder, index)
            self.report_part(part)

    def resume(self) -> tuple[int, HiddenStates | None]:
        """Return the first layer to quantize, and the hidden states before it."""
        done = self.artefact.done
        stream = None if self.ids is None else HiddenStates(self.header, self.config, self.ids)
        first = next((i for i in range(len(self.config.layers)) if f"layers.{i}" not in done), -1)
        first = len(self.config.layers) if first < 0 else first
        saved = (
            states.load_state(self.states_folder, first, self.calibration_digest)
            if self.states_folder and first
            else None
        )
        if saved is None:
            return 0, stream
        self.result, tensors = saved
        if stream:
            stream.restore(tensors)
        return first, stream

    def save_state(self, layer: int, stream: HiddenStates | None) -> None:
        if self.states_folder:
            states.save_state(
                self.states_folder, layer, self.calibration_digest, self.result, stream.tensors() if stream else {}
            )

    def round_layer(self, index: int) -> dict[str, Tensor | QuantizedTensor]:
        """Round each matrix of a layer to nearest, a few rows at a time."""
        recorded = RecordedWeights()
        build_layer(self.header, self.config, index, recorded, self.dtype, stack=False)
        tensors: dict[str, Tensor | QuantizedTensor] = {**recorded.tensors}
        for name in quantizable_names(recorded):
            weight, self.result.errors[name] = round_to_nearest(recorded.tensors[f"{name}.weight"], self.grid())
            tensors[f"{name}.weight"] = self.mark_w8a8(weight)
        return tensors

    def calibrate_layer(self, index: int, stream: HiddenStates) -> dict[str, Tensor | QuantizedTensor]:
        layer = CalibratedLayer(self.header, self.config, self.recipe, self.grid(), index, stream, self.dtype_of)
        tensors = layer.quantize(self.result)
        return {
            name: self.mark_w8a8(tensor) if isinstance(tensor, QuantizedTensor) else tensor
            for name, tensor in tensors.items()
        }

    def mark_w8a8(self, weight: QuantizedTensor) -> QuantizedTensor:
        """Mark INT8 weights whose inputs are quantized, too."""
        return replace(weight, format=W8A8) if self.recipe.activations else weight
