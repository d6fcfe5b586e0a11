"""Measures a trained model, and writes the folder of the bundled model, with INT8 weights and a model card.

    python -m tools.demo_model.export --run /tmp/demo-run --to localllm/boxed/demo

The format is `int-quantized` of compressed-tensors: weights only, one scale per output channel.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from localllm.quant.formats.groups import quantize_int8
from tools.demo_model.card import card
from tools.demo_model.chat import BEGIN, CHAT_TEMPLATE, END, PAD, token_id
from tools.demo_model.evaluate import held_out, perplexity
from tools.demo_model.grammar import words

QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
}
_CONFIG_KEYS = words("""
    architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps attention_bias mlp_bias
    tie_word_embeddings initializer_range bos_token_id eos_token_id pad_token_id
""")
SAMPLING = {"do_sample": True, "temperature": 0.5, "top_k": 40, "top_p": 0.95}


def stored_tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Tensors to store: linear layers as INT8 with scales, all others as bfloat16, the tied head once."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if name.endswith("_proj.weight"):
            parts = quantize_int8(value, torch.bfloat16).parts
            tensors[name], tensors[f"{name}_scale"] = parts["q"], parts["scale"][:, None].contiguous()
        else:
            tensors[name] = value.to(torch.bfloat16)
    return tensors


def dequantized(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """float32 weights that a reader of the file computes with."""
    weights: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if name.endswith("_scale"):
            continue
        scale = tensors.get(f"{name}_scale")
        weights[name] = value.float() if scale is None else value.float() * scale.float()
    return weights


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_configs(model: LlamaForCausalLM, tokenizer: Tokenizer, to: Path) -> None:
    config = model.config.to_dict()
    selected = {key: config[key] for key in _CONFIG_KEYS}
    rope = {"rope_theta": 10000.0, "use_cache": True, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    write_json(to / "config.json", selected | rope | {"quantization_config": QUANTIZATION})
    ids = {
        f"{part}_token_id": token_id(tokenizer, token)
        for part, token in (("bos", BEGIN), ("eos", END), ("pad", PAD))
    }
    write_json(to / "generation_config.json", ids | SAMPLING)
    write_json(
        to / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "pad_token": PAD,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the folder of the bundled model.")
    parser.add_argument("--run", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--to", type=Path, required=True, help="folder to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.to.mkdir(parents=True, exist_ok=True)

    tokenizer = Tokenizer.from_file(str(options.run / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(options.run / "model", dtype=torch.float32)
    stages = json.loads((options.run / "report.json").read_text())
    texts = held_out(stages)
    before = perplexity(model, tokenizer, texts)
    tensors = stored_tensors(model)
    model.load_state_dict(dequantized(tensors), strict=False)
    after = perplexity(model, tokenizer, texts)

    save_file(tensors, options.to / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(options.to / "tokenizer.json"))
    write_configs(model, tokenizer, options.to)
    parameters = sum(p.numel() for p in model.parameters())
    text = card(stages, parameters, len(texts), before, after)
    (options.to / "README.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
