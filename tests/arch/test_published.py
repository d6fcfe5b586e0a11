"""Published configurations, shortened to what counts: the parameters that their model cards state."""

from typing import Any

import pytest

from localllm.arch.cost import active_parameters, kv_bytes_per_token, parameters
from localllm.arch.families import describe

PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Llama-3.2-1B-Instruct": (
        1_235_814_400,
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "head_dim": 64,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        {
            "architectures": ["MistralForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
    ),
    "Mixtral-8x7B-v0.1": (
        46_702_792_704,
        {
            "architectures": ["MixtralForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
    ),
    "Qwen2.5-0.5B-Instruct": (
        494_032_768,
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 21,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Qwen3-0.6B": (
        596_049_920,
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "vocab_size": 151936,
        },
    ),
    "gemma-2-2b-it": (
        2_614_341_888,
        {
            "architectures": ["Gemma2ForCausalLM"],
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "vocab_size": 256000,
        },
    ),
    "gemma-3-1b-it": (
        999_885_952,
        {
            "architectures": ["Gemma3ForCausalLM"],
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
    ),
    "Phi-3-mini-4k-instruct": (
        3_821_079_552,
        {
            "architectures": ["Phi3ForCausalLM"],
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "sliding_window": 2047,
            "tie_word_embeddings": False,
            "vocab_size": 32064,
        },
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "head_dim": 64,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "max_position_embeddings": 131072,
            "num_attention_heads": 64,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
            "vocab_size": 201088,
        },
    ),
    "SmolLM3-3B": (
        3_075_098_624,
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "attention_bias": False,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "max_position_embeddings": 65536,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 5000000.0,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
    ),
    "OLMo-2-1124-7B": (
        7_298_617_344,
        {
            "architectures": ["Olmo2ForCausalLM"],
            "attention_bias": False,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-06,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_model_card(name: str) -> None:
    stated, config = PUBLISHED[name]
    assert parameters(describe(config)) == stated


def test_what_one_token_costs() -> None:
    config = describe(PUBLISHED["Qwen3-30B-A3B"][1])
    assert 3.3e9 < active_parameters(config) < 3.4e9  # the A3B of its name
    assert kv_bytes_per_token(config, 2) == 48 * 2 * 4 * 128 * 2


def test_gemma_3_looks_far_in_every_sixth_layer() -> None:
    windows = [layer.mixer.window for layer in describe(PUBLISHED["gemma-3-1b-it"][1]).layers]
    assert [i for i, window in enumerate(windows) if window is None] == [5, 11, 17, 23]
    assert set(windows) == {512, None}


def test_smollm3_has_no_positions_in_every_fourth_layer() -> None:
    layers = describe(PUBLISHED["SmolLM3-3B"][1]).layers
    assert [i for i, layer in enumerate(layers) if layer.mixer.rope is None] == list(range(3, 36, 4))
