"""Random encoders of every family, made by `transformers`, with the files of sentence-transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.tiny import randomize

WORDS = ["the", "a", "cat", "dog", "sat", "on", "under", "mat", "red", "blue", "sky"]
WORDS += ["runs", "slowly", "##s", "##ing", "un", "##able"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *map(chr, range(97, 123))]
VOCABULARY += [f"##{chr(c)}" for c in range(97, 123)] + ["é", ".", ",", "!", "中", "文"]
VOCABULARY = list(dict.fromkeys(VOCABULARY))

BERT: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
DECODER: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-3,
    "attn_implementation": "eager",
}
GEMMA: dict[str, Any] = DECODER | {
    "use_bidirectional_attention": True,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    },
    "query_pre_attn_scalar": 10,  # GGUF files have no word for another than the size of heads
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("BertModel", BERT),
    "BERT, tanh GELU": ("BertModel", BERT | {"hidden_act": "gelu_new"}),
    "RoBERTa": ("RobertaModel", BERT | {"pad_token_id": 1, "type_vocab_size": 1}),
    "XLM-RoBERTa": ("XLMRobertaModel", BERT | {"pad_token_id": 1, "type_vocab_size": 1}),
    "NomicBert": ("NomicBertModel", BERT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
    "EmbeddingGemma": ("Gemma3TextModel", GEMMA),
    "Gemma 3, looking back": ("Gemma3TextModel", GEMMA | {"use_bidirectional_attention": False}),
    "Qwen3": ("Qwen3Model", DECODER),
    "Llama": ("LlamaModel", DECODER),
    "Mistral with a window": ("MistralModel", DECODER | {"sliding_window": 5}),
}
Pooling = Mapping[str, Any]
MEAN: Pooling = {"pooling_mode_mean_tokens": True}
CLS: Pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
LAST: Pooling = {"pooling_mode_lasttoken": True, "include_prompt": True}


def make_encoder(folder: Path, family: str, **changes: Any) -> Any:
    """Write a checkpoint with a WordPiece tokenizer, and return the transformers model."""
    kind, fields = FAMILIES[family]
    cls = getattr(transformers, kind)
    torch.manual_seed(0)
    model = cls(cls.config_class(**fields | changes)).eval()
    randomize(model)
    model.save_pretrained(folder)
    word_pieces(folder)
    return model


def word_pieces(folder: Path) -> None:
    """Tokenizer like BERT's, with truncation and padding enabled, as in published ones."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    backend.add_special_tokens(VOCABULARY[:5])
    backend.enable_truncation(8)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))


def sentence_transformer(
    folder: Path,
    pooling: Pooling,
    dense: tuple[torch.nn.Linear, ...] = (),
    settings: Mapping[str, Any] | None = None,
    longest: int | None = None,
) -> None:
    """Write the files that sentence-transformers adds to a checkpoint."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    names = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds))][: len(kinds) + 1]
    folders = ["" if kind == "Transformer" else names[i + 1] for i, kind in enumerate(kinds)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, folders, strict=True))
    ]
    write(folder / "modules.json", modules)
    write(folder / folders[1] / "config.json", {"word_embedding_dimension": 48, **pooling})
    for path, layer in zip(folders[2:], dense, strict=False):
        fields = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": layer.bias is not None,
        }
        write(folder / path / "config.json", fields | {"activation_function": "torch.nn.modules.linear.Identity"})
        tensors = {f"linear.{name}": tensor.detach() for name, tensor in layer.named_parameters()}
        save_file(tensors, folder / path / "model.safetensors")
    if settings is not None:
        write(folder / "config_sentence_transformers.json", settings)
    if longest is not None:
        write(folder / "sentence_bert_config.json", {"max_seq_length": longest, "do_lower_case": False})


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
