"""Two tiny checkpoints, one of which drafts for the other, often but not always accepted."""

from pathlib import Path
from typing import Any

import torch

from localllm.runtime.engine import Engine
from localllm.runtime.speculation.draft_budget import MAX_MODEL_DRAFTS, DraftModelCost
from localllm.runtime.speculation.draft_model import DraftModel
from tests.models.families import FAMILIES
from tests.tiny import make_checkpoint, make_engine, weights_of


def make_pair(folder: Path, family: str, noise: float, **changes: Any) -> tuple[Path, Path]:
    """Write a random checkpoint, and a copy with `noise` added to every weight."""
    kind, own = FAMILIES[family]
    model = make_checkpoint(folder / "target", kind, **own | changes)
    with torch.no_grad():
        for weight in weights_of(model):
            weight.add_(torch.randn_like(weight) * weight.std() * noise)
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


class FreeDraftModelCost(DraftModelCost):
    """Cost model in which drafting costs nothing, and verification no more than a plain step."""

    def costs(self, sequences: int) -> list[float]:
        return [1.0] * (1 + MAX_MODEL_DRAFTS)

    def pass_cost(self, sequences: int) -> float:
        return 0.0


def draft_model(folder: Path, vocabulary: int = 320, **of_engine: Any) -> DraftModel:
    """A draft model whose drafts cost nothing, so that it always drafts as much as possible."""
    engine = make_engine(folder, **of_engine)
    pace = FreeDraftModelCost(0.0, lambda _, most: [1.0] * (1 + most))
    return DraftModel(engine.runner, engine.pool, vocabulary, 256, engine.scheduler.token_budget, pace)


def drafting(target: Path, draft: Path, vocabulary: int = 320, **of_engine: Any) -> tuple[Engine, DraftModel]:
    engine = make_engine(target, **of_engine)
    model = draft_model(draft, vocabulary)
    engine.drafter = model
    return engine, model
