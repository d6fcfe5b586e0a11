"""A draft model beside a model: found and checked before anything is loaded, then loaded and given its memory."""

from dataclasses import dataclass, replace

import torch

from localllm.arch.config import ModelConfig
from localllm.arch.describe import describe
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.errors import UnsupportedModel
from localllm.hub.resolve import resolve
from localllm.metrics import Phases
from localllm.plan.fit import Wish, needs_of
from localllm.plan.memory import BLOCK_SIZE, MAX_RUNNING, TOKEN_BUDGET, Memory, Needs
from localllm.quant.vectors import FORMS
from localllm.runtime.build import load_decoder
from localllm.runtime.engine import Engine
from localllm.runtime.runner import Runner
from localllm.runtime.speculation.draft_model import DraftModel
from localllm.runtime.speculation.pace import Pace
from localllm.runtime.speculation.price import Price
from localllm.runtime.state import BlockPool


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
        if config.encoder:
            raise UnsupportedModel(f"{ref.name!r} gives vectors and guesses no tokens", "name another draft model")
        check_quantization(header.config)
        own = replace(wish, context=None, quant=None)
        return cls(ref.name, header, config, needs_of(header, config, kind, own, name=ref.name))

    def load(self, engine: Engine, memory: Memory, price: Price, phases: Phases, *, graphs: bool) -> DraftModel:
        """Beside an engine that was made with the same memory; price: of the engine's steps."""
        target, needs = engine.runner, self.needs
        context = min(memory.context, self.config.max_context)
        kind: torch.dtype = getattr(torch, needs.dtype)
        kept = FORMS.get(needs.kv_dtype, kind)
        rows = memory.rows if needs.own_row_bytes else 0
        decoder, _ = load_decoder(self.header, self.config, target.device, kind, context, phases)
        captured = context if graphs else None
        runner = Runner(decoder, memory.blocks, BLOCK_SIZE, kind, target.device, rows, kept, MAX_RUNNING, captured)
        return DraftModel(
            runner,
            BlockPool(memory.blocks, BLOCK_SIZE, rows),
            target.model.config.vocab_size,
            context,
            TOKEN_BUDGET[target.device.type],
            Pace(needs.weights.total / max(1, memory.weights.total), price.table),
        )
