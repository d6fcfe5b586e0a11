"""Generated models in the shapes of Llamas, with random weights made on the device. Speed does not depend on the
values of weights, so nothing needs to be downloaded, stored or copied.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from localllm.arch.config import ModelConfig
from localllm.arch.cost import WeightBytes
from localllm.arch.describe import parse_config
from localllm.arch.layout import TensorLayout
from localllm.checkpoint.header import Header
from localllm.checkpoint.tensors import Weights
from localllm.quant.formats.groups import MXFP4_GROUP
from localllm.quant.packing import INT4, INT8, MXFP4
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.weight_source import WeightSource

Form = Literal["bf16", "int8", "int4", "mxfp4"]
GROUP = 128  # columns that share a scale in INT4
MXFP4_BIAS = 127  # of a scale's exponent
CODE_DEVIATION = {INT4: 4.6, INT8: 73.9}  # standard deviation of random codes


def llama(
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    tied: bool = False,
    dim: int = 128,
) -> dict[str, Any]:
    """Content of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "dtype": "bfloat16",
    }


SHAPES = {
    "1B": llama(2048, 8192, 16, 32, 8, 128_256, tied=True, dim=64),  # Llama 3.2 1B
    "8B": llama(4096, 14_336, 32, 32, 8, 128_256),  # Llama 3.1 8B
    "32B": llama(5120, 27_648, 64, 40, 8, 152_064),  # Qwen2.5 32B, without its biases
    "70B": llama(8192, 28_672, 80, 64, 8, 128_256),  # Llama 3.1 70B
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201_088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "attention_bias": True,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
DEEPSEEK = {  # DeepSeek-V2-Lite
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102_400,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248_320,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
TINY = llama(64, 128, 2, 4, 2, 320, dim=16)


@dataclass
class WeightCounter:
    """Bytes of the weights made so far, by how a step reads them, without padding of the packed layout."""

    layers: int = 0
    head: int = 0
    tables: int = 0

    def add(self, name: str, size: int, tied: bool) -> None:
        if name.startswith("lm_head") or (tied and name.startswith("embed_tokens")):
            self.head += size
        elif name.startswith("embed_tokens"):
            self.tables += size
        else:
            self.layers += size

    @property
    def weights(self) -> WeightBytes:
        return WeightBytes(self.layers, 0, self.head, self.tables)


class RandomSource(WeightSource):
    """Random weights of any name and shape, in the formats that `--quant` gives them: the matrices of layers are
    in `form`, the head is in INT8 if they are quantized, and the embedding is not quantized.
    """

    def __init__(
        self,
        form: Form,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        tied: bool = False,
        prefix: str = "",
        made: WeightCounter | None = None,
    ):
        header = Header(Path("generated"), {}, {}, {}, TensorLayout())  # without tensors
        super().__init__(Weights(header), device, dtype)
        self.form: Form = form
        self.tied = tied
        self.prefix = prefix
        self.made = made or WeightCounter()

    def under(self, name: str) -> "RandomSource":
        return RandomSource(self.form, self.device, self.dtype, self.tied, f"{self.prefix}{name}.", self.made)

    def has_matrix(self, name: str) -> bool:
        return False

    def norm_weight(self, name: str, size: int) -> Tensor:
        return self.float32_tensor(name, size) + 1

    def float32_tensor(self, name: str, *shape: int) -> Tensor:
        return self.counted(name, torch.randn(shape, device=self.device) / 10)

    def tensor(self, name: str, *shape: int) -> Tensor:
        tensor = torch.empty(shape, device=self.device, dtype=self.dtype)
        return self.counted(name, tensor.normal_(std=shape[-1] ** -0.5))

    def lookup_table(self, name: str, rows: int, columns: int) -> Tensor:
        return self.tensor(name, rows, columns)

    def matrices(
        self, names: dict[str, int], columns: int, order: object = None, *, checked: bool = True
    ) -> tuple[Tensor | QuantizedTensor]:
        """Return one stacked matrix, like a checkpoint with a single format."""
        return (self.matrix(next(iter(names)), sum(names.values()), columns),)

    def matrix(self, name: str, rows: int, columns: int, *, checked: bool = True) -> Tensor | QuantizedTensor:
        if (form := self.format_of(name)) is None:
            return self.tensor(name, rows, columns)
        packed = self.packed(form, rows, columns)
        self.made.add(self.prefix + name, packed.nbytes, self.tied)
        return self.packed_or_dequantized(packed, name)

    def format_of(self, name: str) -> str | None:
        """Return the format of a matrix; None for plain ones. In MXFP4, as published, only experts are packed."""
        if self.form == "bf16" or name == "embed_tokens":
            return None
        if self.form == "mxfp4":
            return MXFP4 if ".experts." in self.prefix + name else None
        return INT8 if self.form == "int8" or name == "lm_head" else INT4

    def dequantized_matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.tensor(name, rows, columns)

    def packed(self, form: str, rows: int, columns: int) -> QuantizedTensor:
        """Random codes in MXFP4, or in the formats of round-to-nearest quantization without zero points: INT4 with
        one scale per group, INT8 with one per row.
        """
        if form == MXFP4:
            groups = columns // MXFP4_GROUP
            codes = torch.randint(0, 256, (rows, groups, MXFP4_GROUP // 2), device=self.device, dtype=torch.uint8)
            exponents = torch.randint(-2, 2, (rows, groups), device=self.device) - round(math.log2(columns) / 2)
            scale = (exponents + MXFP4_BIAS).to(torch.uint8)
            return QuantizedTensor(MXFP4, (rows, columns), {"q": codes, "scale": scale})
        group = min(GROUP, columns) if form == INT4 else None
        low, high = (0, 256) if form == INT4 else (-127, 128)
        width, dtype = (columns // 2, torch.uint8) if form == INT4 else (columns, torch.int8)
        codes = torch.randint(low, high, (rows, width), device=self.device, dtype=dtype)
        scale = torch.rand(rows, columns // (group or columns), device=self.device) + 0.5
        scale = (scale * columns**-0.5 / CODE_DEVIATION[form]).to(torch.bfloat16)
        return QuantizedTensor(form, (rows, columns), {"q": codes, "scale": scale}, group)

    def counted(self, name: str, tensor: Tensor) -> Tensor:
        """Count the tensor's bytes, and return it."""
        self.made.add(self.prefix + name, tensor.nbytes, self.tied)
        return tensor


def config_of(shape: dict[str, Any], form: Form) -> ModelConfig:
    """Parse the configuration. A quantized head is not tied to the embedding."""
    config = parse_config(shape)
    return config if form == "bf16" else replace(config, tie_embeddings=False)
