"""A model with scripted answers: each piece is by far the most likely token after the previous one. It has real
weights in a real folder, so that a known answer passes through the whole engine.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

WIDTH = 64
CHATML = (
    "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think> <tool_call> #}"
)


def write_scripted(
    folder: Path, script: Sequence[str], *, template: str = CHATML, before: str = "\n", special: Sequence[str] = ()
) -> Path:
    """`before`: end of the prompts. Pieces must be distinct. `special`: pieces that decoding omits."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", *special])
    tokenizer.add_tokens([piece for piece in script if piece not in special and piece not in vocabulary])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    pieces = [tokenizer.encode(before).ids[-1], *map(tokenizer.token_to_id, [*script, "<|im_end|>"])]
    assert len(set(pieces)) == len(pieces) <= WIDTH, "a piece stands twice in the script"
    embedding, head = torch.zeros(2, tokenizer.get_vocab_size(), WIDTH)
    for place, (token, after) in enumerate(zip(pieces, [*pieces[1:], pieces[-1]], strict=True)):
        embedding[token, place] = 1
        head[after, place] = 10
    names = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    weights = {f"model.layers.0.{name}.weight": torch.zeros(WIDTH, WIDTH) for name in names}
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    weights |= {f"model.{name}.weight": torch.ones(WIDTH) for name in norms}
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file({name: weight.clone() for name, weight in weights.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    return folder
