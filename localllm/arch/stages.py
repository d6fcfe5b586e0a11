"""The division of a model among processes by pipeline parallelism: each has some consecutive layers, a stage. Pure
data.

The first stage also has the embedding and the head: a step returns to it as hidden states, which are smaller than
logits, and a tied head is stored once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from localllm.arch.config import AttentionConfig, LayerConfig, ModelConfig, Stage
from localllm.arch.shard import Shard, check_process_count
from localllm.errors import UnsupportedModel, UsageError


@dataclass(frozen=True)
class Position:
    """The position of a process among those that compute a model: first by stage, then by rank in the stage."""

    rank: int
    tensor_size: int = 1  # processes of each stage, which divide its layers
    borders: tuple[int, ...] = ()  # layers before each stage, and all; () if one stage has all
    whole_experts: bool = False  # see `Shard`

    @property
    def stage_count(self) -> int:
        return max(1, len(self.borders) - 1)

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.tensor_size * self.stage_count

    @property
    def shard(self) -> Shard:
        return Shard(self.rank % self.tensor_size, self.tensor_size, self.whole_experts)

    @property
    def stage(self) -> Stage | None:
        """The stage of the process; None if it has all layers."""
        return stages_between(self.borders)[self.rank // self.tensor_size] if self.borders else None


def stages_between(borders: Sequence[int]) -> list[Stage]:
    ranges = enumerate(pairwise(borders))
    return [Stage(index, len(borders) - 1, first, end, borders[-1]) for index, (first, end) in ranges]


def parse_shares(value: int | str | Sequence[float]) -> tuple[int, tuple[float, ...]]:
    """Return the number of stages and their shares of the weights, () if none are given.

    value: the number, or a share of each stage such as `24,16`, of any unit. Raises UsageError for an invalid one.
    """
    error = UsageError(
        f"{value!r} is not a number of stages", "give a whole number, or a share of each stage such as 24,16"
    )
    try:
        shares = [float(part) for part in value.split(",")] if isinstance(value, str) else value
        if isinstance(shares, int):
            count, shares = shares, ()
        elif len(shares) == 1:
            count, shares = int(value) if isinstance(value, str) else 0, ()
        else:
            count, shares = len(shares), tuple(map(float, shares))
    except (TypeError, ValueError):
        raise error from None
    if isinstance(value, bool) or not all(0 < share < float("inf") for share in shares):
        raise error
    check_process_count(count)
    return count, shares


def parse_stages(
    pipeline_parallel: int | str | Sequence[float] | None, workers: int
) -> tuple[int, tuple[float, ...]]:
    """Return the number of stages and their shares, as `parse_shares`. workers: other machines, with a stage each.
    Raises UsageError for another number."""
    if pipeline_parallel is None:
        return 1 + workers, ()
    stages, shares = parse_shares(pipeline_parallel)
    if workers and stages != 1 + workers:
        raise UsageError(
            f"--workers and this machine make {1 + workers} stages, and --pipeline-parallel requires {stages}",
            "leave out --pipeline-parallel, or give a share for each; start a worker for each further GPU",
        )
    return stages, shares


def check_processes(tensor_parallel: int, pipeline_parallel: int) -> None:
    """Raise UsageError for an invalid number of processes."""
    check_process_count(tensor_parallel)
    check_process_count(pipeline_parallel)
    check_process_count(tensor_parallel * pipeline_parallel)


def divide_layers(
    config: ModelConfig, layer_bytes: Sequence[int], outside_bytes: int, shares: Sequence[float]
) -> tuple[int, ...]:
    """Return the borders of stages whose bytes, divided by their shares, are as even as possible.

    outside_bytes: of what the first stage has besides layers. Raises UnsupportedModel if there are too few layers,
    or too few borders between layers that share keys and values.
    """
    count, stages = len(config.layers), len(shares)
    allowed = [border for border in range(1, count) if not crosses(config, border)]
    if config.encoder:
        raise UnsupportedModel("an embedding model has no stages", "leave out --pipeline-parallel")
    if len(allowed) < stages - 1:
        shared = ", of which some share keys and values," if len(allowed) < count - 1 else ""
        raise UnsupportedModel(
            f"a model with {count} layers{shared} cannot have {stages} stages",
            f"use at most {len(allowed) + 1} with --pipeline-parallel",
        )
    before = [0, *accumulate(layer_bytes)]
    # For each border after the stages so far: the smallest possible largest load, and the borders that lead to it.
    best = {end: ((outside_bytes + before[end]) / shares[0], (0, end)) for end in [*allowed, count]}
    for share in shares[1:]:
        best = {
            end: min(
                (max(load, (before[end] - before[begin]) / share), (*borders, end))
                for begin, (load, borders) in best.items()
                if begin < end
            )
            for end in [*allowed, count]
            if any(begin < end for begin in best)
        }
    return best[count][1]


def crosses(config: ModelConfig, border: int) -> bool:
    """Return whether a layer after the border reads keys and values of a layer before it."""
    sources = (source_of(layer) for layer in config.layers[border:])
    return any(source is not None and source < border for source in sources)


def source_of(layer: LayerConfig) -> int | None:
    return layer.mixer.kv_source if isinstance(layer.mixer, AttentionConfig) else None


def stage_config(config: ModelConfig, stage: Stage) -> ModelConfig:
    """Return the configuration of a stage's layers."""
    layers = []
    for layer in config.layers[stage.first : stage.end]:
        source = source_of(layer)
        if source is not None:
            assert isinstance(layer.mixer, AttentionConfig)
            layer = replace(layer, mixer=replace(layer.mixer, kv_source=source - stage.first))
        layers.append(layer)
    return replace(config, layers=tuple(layers), stage=replace(stage, ropes=config.ropes))
