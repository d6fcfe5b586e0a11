"""A draft model beside a model: found and checked before anything is loaded, then loaded and given its memory."""

from dataclasses import dataclass, replace

import torch

from localllm.arch.config import ModelConfig
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import Header, read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.errors import UnsupportedModel
from localllm.hub.resolve import ModelRef
from localllm.llm.cache_allocation import CacheSpec
from localllm.metrics import PhaseTimer
from localllm.plan.fit import LoadOptions, model_needs
from localllm.plan.memory import TOKEN_BUDGET, MemoryNeeds, MemoryPlan
from localllm.quant.vectors import KV_DTYPES
from localllm.runtime.engine import Engine
from localllm.runtime.model_loader import load_decoder
from localllm.runtime.speculation.acceptance_rate import DraftModelCost
from localllm.runtime.speculation.draft_model import DraftModel
from localllm.runtime.speculation.step_cost import StepCost


@dataclass(frozen=True)
class DraftModelPlan:
    name: str
    header: Header
    config: ModelConfig
    needs: MemoryNeeds

    @classmethod
    def find(cls, ref: ModelRef, device_type: str, target_options: LoadOptions) -> "DraftModelPlan":
        """device_type: of the device; target_options: of the model that it drafts for. Raises as `read_header` and
        `parse_config`."""
        header = read_header(ref.path)
        config = parse_config(header.config)
        if config.encoder:
            raise UnsupportedModel(f"{ref.name!r} gives vectors and guesses no tokens", "name another draft model")
        check_quantization(header.config)
        own = replace(target_options, context=None, quant=None)
        return cls(ref.name, header, config, model_needs(header, config, device_type, own, name=ref.name))

    def cache_spec(self, device: torch.device, *, use_graphs: bool) -> CacheSpec:
        kind: torch.dtype = getattr(torch, self.needs.dtype)
        return CacheSpec(self.needs, device, kind, KV_DTYPES.get(self.needs.kv_dtype, kind), use_graphs)

    def load(
        self, engine: Engine, cache_spec: CacheSpec, memory: MemoryPlan, step_cost: StepCost, phases: PhaseTimer
    ) -> DraftModel:
        """Load the draft model beside `engine`, which shares its memory plan. step_cost: of the engine's steps."""
        target, context = engine.runner, cache_spec.max_len(memory)
        decoder, _ = load_decoder(self.header, self.config, target.device, cache_spec.dtype, context, phases)
        return DraftModel(
            cache_spec.make_runner(decoder, memory),
            cache_spec.make_block_pool(memory),
            target.model.config.vocab_size,
            context,
            TOKEN_BUDGET[target.device.type],
            DraftModelCost(self.needs.weights.total / max(1, memory.weights.total), step_cost.cost_table),
        )
