"""Writes a Llama with random weights as a GGUF file, in the shape of `bench.checkpoint`: blocks of random codes
with one scale, since speed does not depend on the values of weights. The vocabulary is artificial.
"""

from pathlib import Path

import gguf
import numpy as np

from bench.checkpoint import SHAPE

SCALE = 0.004  # of a 4-bit code, for weights with a standard deviation of 0.02


def make(file: Path, form: str) -> None:
    """Write the file. The head is tied to the embedding.

    form: `Q4_0` or `Q8_0` for every matrix, or `Q4_K_M`: Q6_K for the embedding and, in half of the layers, for v
    and down, otherwise Q4_K.
    """
    hidden, ffn, vocabulary = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    queries = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    keys = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(SHAPE["head_dim"])
    writer.add_rope_freq_base(500_000.0)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{form}"))
    writer.add_tokenizer_model("llama")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    writer.add_token_list(["<unk>", "<s>", "</s>", *byte_tokens, *(f"t{i}" for i in range(vocabulary - 259))])
    writer.add_token_scores([-float(i) for i in range(vocabulary)])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (vocabulary - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    generator = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int, *, larger: bool = False) -> None:
        quant = form if form != "Q4_K_M" else "Q6_K" if larger else "Q4_K"
        raw_dtype = gguf.GGMLQuantizationType[quant]
        writer.add_tensor(name, random_blocks(generator, rows, columns, quant), raw_dtype=raw_dtype)

    matrix("token_embd.weight", vocabulary, hidden, larger=True)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for i in range(SHAPE["num_hidden_layers"]):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(hidden, np.float32))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(hidden, np.float32))
        matrix(f"blk.{i}.attn_q.weight", queries, hidden)
        matrix(f"blk.{i}.attn_k.weight", keys, hidden)
        matrix(f"blk.{i}.attn_v.weight", keys, hidden, larger=i % 2 == 0)
        matrix(f"blk.{i}.attn_output.weight", hidden, queries)
        matrix(f"blk.{i}.ffn_gate.weight", ffn, hidden)
        matrix(f"blk.{i}.ffn_up.weight", ffn, hidden)
        matrix(f"blk.{i}.ffn_down.weight", hidden, ffn, larger=i % 2 == 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(generator: np.random.Generator, rows: int, columns: int, quant: str) -> np.ndarray:
    """Random packed weights, uint8 [rows, bytes per row]."""
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant]]
    packed = generator.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)

    def set_float16(offset: int, value: float) -> None:
        packed[:, offset : offset + 2] = np.array([value], np.float16).view(np.uint8)

    if quant == "Q6_K":
        set_float16(size - 2, SCALE / 4 / 64)  # 6-bit codes, multiplied by factors of up to 128
    else:
        set_float16(0, {"Q4_0": SCALE, "Q8_0": SCALE / 16, "Q4_K": SCALE / 32}[quant])
    if quant == "Q4_K":
        set_float16(2, SCALE / 4)  # scale of the minima: 7.5 codes at the mean factor of 32
    return packed.reshape(rows, -1)
