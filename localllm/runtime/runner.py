"""Runs one step of a model on its device: block copies, the forward pass, logits."""

import torch
from torch import Tensor

from localllm.runtime.batch import Batch
from localllm.runtime.cache import make_caches
from localllm.runtime.model import Decoder


class Runner:
    """Eager execution. `asynchronous`: does the device work on while the host goes on?"""

    def __init__(self, model: Decoder, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device):
        self.model = model
        self.device = device
        self.asynchronous = device.type != "cpu"
        mixers = [layer.mixer for layer in model.config.layers]
        self.caches = make_caches(mixers, blocks, block_size, dtype, device)
        self.paged = list(dict.fromkeys(self.caches))  # each once

    def launch(self, batch: Batch) -> Tensor:
        """Logits [N, vocab] float32 of the tokens in `batch.logit_index`."""
        for source, target in batch.copies:
            for cache in self.paged:
                cache.copy_block(source, target)
        return self.model(batch, self.caches).float()
