"""A Llama in transformers with the settings that its documentation recommends for speed: a static cache, and the
forward pass compiled with CUDA graphs.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from bench.gpu.setting import Setting
from localllm.hardware.gpu_clock import finished


class CompiledLlama:
    """A Llama with random weights, and a random prompt of `context` tokens."""

    def __init__(self, setting: Setting, shape: dict[str, Any], context: int, max_len: int, dtype: torch.dtype):
        self.device = setting.device
        self.context = context
        fields = {name: value for name, value in shape.items() if name not in ("architectures", "dtype")}
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with setting.device:
                self.model: Any = LlamaForCausalLM(LlamaConfig(**fields, eos_token_id=None, bos_token_id=None))
        finally:
            torch.set_default_dtype(default_dtype)
        self.model.eval()
        self.cache = StaticCache(config=self.model.config, max_cache_len=max_len)
        parameters = inspect.signature(self.model.forward).parameters
        name = "cache" if "cache" in parameters else "past_key_values"  # before transformers 5.24
        self.options = {name: self.cache, "use_cache": True}
        self.forward: Any = (  # not compiled in a test of the harness
            self.model.forward
            if setting.tiny
            else torch.compile(self.model.forward, mode="reduce-overhead", fullgraph=True)
        )
        self.warm = False

    @property
    def prompt(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.model.config.vocab_size, (1, self.context), generator=generator)
        return ids.to(self.device)

    @torch.no_grad()
    def step_s(self, steps: int) -> float:
        """Return the mean seconds of a greedy step whose tokens stay on the device."""
        self.cache.reset()
        logits = self.model(input_ids=self.prompt, **self.options).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        position = torch.full((1, 1), self.context, device=self.device)
        for _ in range(1 if self.warm else 4):  # the first steps compile and capture
            token, position = self.step(token, position)
        self.warm = True
        start = finished(self.device)
        for _ in range(steps):
            token, position = self.step(token, position)
        return (finished(self.device) - start) / steps

    def step(self, token: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.forward(input_ids=token, position_ids=position, **self.options).logits
        return logits[:, -1].argmax(-1, keepdim=True).clone(), position + 1

    def generate_s(self, steps: int) -> float:
        """Return the seconds per token of `generate`: the difference between a long and a short answer."""
        times = []
        for count in (steps, 3 * steps):
            start = finished(self.device)
            answer = self.model.generate(
                self.prompt,
                attention_mask=torch.ones_like(self.prompt),
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
                cache_implementation="static",
                pad_token_id=0,
            )
            assert answer.shape[1] == self.context + count
            times.append(finished(self.device) - start)
        return (times[1] - times[0]) / (2 * steps)
