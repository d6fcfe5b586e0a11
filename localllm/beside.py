"""A draft model beside a model: found and checked before anything is loaded, then loaded and given its memory."""

from dataclasses import dataclass, replace

import torch

from localllm.arch.config import ModelConfig
from localllm.arch.describe import describe
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.hub.resolve import resolve
from localllm.metrics import Phases
from localllm.plan.fit import Wish, needs_of
from localllm.plan.memory import TOKEN_BUDGET, Memory, Needs
from localllm.quant.vectors import FORMS
from localllm.room import Room
from localllm.runtime.build import load_decoder
from localllm.runtime.engine import Engine
from localllm.runtime.speculation.draft_model import DraftModel
from localllm.runtime.speculation.pace import Pace
from localllm.runtime.speculation.price import Price


@dataclass(frozen=True)
class Beside:
    name: str
    header: Header
    config: ModelConfig
    needs: Needs

    @classmethod
    def find(cls, name: str, kind: str, wish: Wish) -> "Beside":
        """kind: of the device; wish: of the model beside it. Raises as `resolve`, `read_header` and `describe`."""
        ref = resolve(name)
        header = read_header(ref.path)
        config = describe(header.config)
        check_quantization(header.config)
        own = replace(wish, context=None, quant=None)
        return cls(ref.name, header, config, needs_of(header, config, kind, own, name=ref.name))

    def room(self, device: torch.device, *, graphs: bool) -> Room:
        kind: torch.dtype = getattr(torch, self.needs.dtype)
        return Room(self.needs, device, kind, FORMS.get(self.needs.kv_dtype, kind), graphs)

    def load(self, engine: Engine, room: Room, memory: Memory, price: Price, phases: Phases) -> DraftModel:
        """Beside an engine that was made with the same memory; price: of the engine's steps."""
        target, context = engine.runner, room.context(memory)
        decoder, _ = load_decoder(self.header, self.config, target.device, room.dtype, context, phases)
        return DraftModel(
            room.runner(decoder, memory),
            room.pool(memory),
            target.model.config.vocab_size,
            context,
            TOKEN_BUDGET[target.device.type],
            Pace(self.needs.weights.total / max(1, memory.weights.total), price.table),
        )
