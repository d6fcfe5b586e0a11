"""What a step holds beside weights and caches while it runs: an estimate, from the shapes of the operations.

The largest moment counts: of an attention, a feed-forward half, unpacking a matrix, or drawing tokens from logits.
What lives then is read off `runtime/model.py`, the layers and the kernels, on a CPU the compiled ones; a test
compares it with the storages that are alive in a step (docs/plan.md has how near it comes). A deterministic step
holds less, as it writes out no scores and no masks.
"""

from collections.abc import Iterable

from localllm.arch.config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentConfig,
    LayerConfig,
    Mixer,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    ShortConvConfig,
)
from localllm.arch.cost import elements_read_per_token
from localllm.checkpoint.header import Header, TensorHeader
from localllm.checkpoint.matrices import CODE_SUFFIXES, find_packed_matrix
from localllm.quant.packing import (
    ELEMENT_BYTES,
    GGUF_GPU_PACKED,
    KV_8BIT_DTYPES,
    PANEL_ROWS,
    SCRATCH_ELEMENTS,
    stays_packed,
)

FLOAT32_BYTES = 4  # sums, norms, rotations and scores are made in float32
MAX_SCORES = 2**23  # numbers at once, of the attention that writes them out (kernels/attention.py)
MAX_EXPANDED_KEYS = 2**25  # numbers in the keys of so many heads, of latent attention (kernels/latent.py)
BYTES_PER_LOGIT = 24  # bytes: float32 twice or thrice, and float64 twice, where a token is drawn
ROUTE_BYTES = 8  # bytes of a pair of a token and an expert in their order
MASK_COPIES = 3  # bytes for each pair of a query and a key: two masks, and the one that is made of them
RESIDUAL_COPIES = 3  # copies of [T, hidden] that live in the middle of a layer: x, what is added to it, normed


def activation_bytes(
    config: ModelConfig,
    dtype: str,
    tokens: int,
    context: int,
    sequences: int = 1,
    matrix_bytes: int = 0,
    kv_dtype: str | None = None,
    grouped: bool = False,
) -> int:
    """The peak of a step that brings so many tokens in all, of sequences with so much context.

    matrix_bytes: bytes of the largest matrix that is dequantized on the way, see `unpacked_bytes`; kv_dtype: of
    keys
    and values, None: as `dtype`. In 8 bits those that a sequence sees are dequantized, layer by layer. grouped:
    all tokens go through a layer's experts at once, as on a GPU, not expert by expert.
    """
    e = ELEMENT_BYTES[dtype]
    layers = set(config.layers)
    moments = [layer_bytes(layer, config.hidden_size, e, tokens, context, grouped) for layer in layers]
    per_layer = 3 * tokens * len(config.layers) * config.per_layer.dim * e if config.per_layer else 0
    read = max(dequantized_bytes(layer.mixer, e, kv_dtype or dtype, tokens, context) for layer in layers)
    kept = read + angle_bytes(config, tokens) + mask_bytes(layers, tokens, context) + per_layer
    # While a matrix is unpacked, of the feed-forward half only what goes in and comes out lives.
    widest = max(ffn_bytes(layer.ffn, config.hidden_size, e, tokens, grouped) for layer in layers) // 2
    unpacking = RESIDUAL_COPIES * tokens * config.hidden_size * e + widest + matrix_bytes if matrix_bytes else 0
    logits = sequences * config.vocab_size * BYTES_PER_LOGIT
    return max(kept + max(*moments, unpacking), logits)


def angle_bytes(config: ModelConfig, tokens: int) -> int:
    """Of cos and sin, for each kind of rope."""
    mixers = [layer.mixer for layer in config.layers]
    ropes = {c.rope for c in mixers if isinstance(c, AttentionConfig | LatentConfig)}
    return sum(tokens * rope.dim * FLOAT32_BYTES for rope in ropes if rope)


def dequantized_bytes(c: Mixer, e: int, kv_dtype: str, tokens: int, context: int) -> int:
    """Of keys and values in 8 bits that one sequence sees, as numbers of e bytes."""
    if kv_dtype not in KV_8BIT_DTYPES:
        return 0
    seen = keys_seen(c.window if isinstance(c, AttentionConfig) else None, tokens, context)
    return seen * elements_read_per_token(c) * e


def mask_bytes(layers: Iterable[LayerConfig], tokens: int, context: int) -> int:
    """Who sees whom, a byte a pair, for each window."""
    attending = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionConfig | LatentConfig)]
    windows = {c.window if isinstance(c, AttentionConfig) else None for c in attending}
    return sum(tokens * keys_seen(window, tokens, context) for window in windows)


def keys_seen(window: int | None, tokens: int, context: int) -> int:
    return min(context, window + tokens) if window else context


def layer_bytes(layer: LayerConfig, hidden: int, e: int, tokens: int, context: int, grouped: bool) -> int:
    stream = tokens * hidden * e
    normed = tokens * hidden * 2 * FLOAT32_BYTES if e < FLOAT32_BYTES else 0
    mixed = 2 * stream + mixer_bytes(layer.mixer, hidden, e, tokens, context)
    return max(mixed, RESIDUAL_COPIES * stream + max(normed, ffn_bytes(layer.ffn, hidden, e, tokens, grouped)))


def mixer_bytes(c: Mixer, hidden: int, e: int, tokens: int, context: int) -> int:
    match c:
        case AttentionConfig():
            keys, heads = c.kv_heads * c.head_dim, c.heads * c.head_dim
            seen = keys_seen(c.window, tokens, context)
            qkv = tokens * (heads + 2 * keys) * e
            gated = qkv + tokens * heads * e if c.output_gate else 0  # with the gates, as they come
            rotating = tokens * (heads + keys) * (3 * FLOAT32_BYTES + e)
            mixing = tokens * (2 * heads + keys) * e  # q and k rotated, and the result
            if c.softcap or c.sinks:
                mixing += max(
                    min(MAX_SCORES, tokens * c.heads * seen) * 3 * FLOAT32_BYTES, tokens * seen * (MASK_COPIES - 1)
                )
            else:
                mixing += tokens * seen * max(MASK_COPIES - 1, e)  # or the mask as numbers
            kept = qkv if c.output_gate else 0  # whose gates are a view of it
            return gated + max(qkv + rotating, kept + mixing)
        case LatentConfig():
            width = c.nope_dim + c.rope_dim
            q = tokens * c.heads * width * e
            latent = tokens * (c.kv_lora_rank + c.rope_dim) * e
            of_head = context * max(width, c.value_dim)
            keys = min(of_head * c.heads, max(of_head, MAX_EXPANDED_KEYS)) * e
            seen = tokens * context * max(MASK_COPIES, e)  # the masks, or one as numbers beside the keys
            absorbed = tokens * c.heads * (2 * c.kv_lora_rank + c.rope_dim) * e  # where each token attends alone
            mixing = max(3 * keys + tokens * context * e, seen, absorbed)
            return 3 * q + latent + mixing + tokens * c.heads * c.value_dim * e
        case DeltaNetConfig():
            values, turned = c.value_heads * c.value_dim, 2 * c.key_heads * c.key_dim
            convolving = c.channels * (2 * e + 2 * FLOAT32_BYTES)
            stepping = c.channels * e + 2 * turned * FLOAT32_BYTES + values * 2 * e  # with copies
            gating = c.channels * e + turned * FLOAT32_BYTES + values * (e + 3 * FLOAT32_BYTES)
            return tokens * ((c.channels + values) * e + max(convolving, stepping, gating))
        case ShortConvConfig():
            return tokens * c.channels * (5 * e + 2 * FLOAT32_BYTES)


def ffn_bytes(c: MLPConfig | MoEConfig, hidden: int, e: int, tokens: int, grouped: bool = False) -> int:
    """Of the MLP: gate and up, and their product; torch, which a GPU may fall back on, has the activation of the
    gate beside."""
    if isinstance(c, MLPConfig):
        return (4 if grouped else 3) * tokens * c.intermediate_size * e
    outside = tokens * hidden * (FLOAT32_BYTES + e) + 4 * tokens * c.experts * FLOAT32_BYTES
    # The busiest expert is sent more than its fair share.
    sent = min(tokens, -(-3 * tokens * c.experts_per_token // (2 * c.experts)))
    one = sent * hidden * (2 * e + 2 * FLOAT32_BYTES) + ffn_bytes(c.expert, hidden, e, sent)
    if grouped:  # every pair of a token and an expert at once, and their order
        one = tokens * c.experts_per_token * ((hidden + c.expert.intermediate_size) * e + 4 * ROUTE_BYTES)
    return outside + max(one, ffn_bytes(c.shared, hidden, e, tokens) if c.shared else 0)


def dequantized_matrix_bytes(header: Header, dtype: str, device: str) -> int:
    """Of the largest matrix that a step of many tokens dequantizes whole, with what that takes on the way."""
    e = ELEMENT_BYTES[dtype]
    sizes = [0]
    for name, tensor in header.tensors.items():
        module, _, kind = name.rpartition(".")
        matrix = (
            find_packed_matrix(header, module) if kind in CODE_SUFFIXES and tensor.dtype in ("I8", "I32") else None
        )
        if device != "cpu":
            sizes.append(scratch_bytes(header, module, kind, tensor, e))
            continue
        if matrix and stays_packed(matrix.format, device):
            sizes.append(min(matrix.rows, PANEL_ROWS) * matrix.columns * e)  # a part of it at a time
        if tensor.dtype == "U8" and len(tensor.shape) == 3:  # MXFP4, two values a byte: an index of 8 bytes each
            sizes.append(2 * tensor.elements * (8 + FLOAT32_BYTES))
    return max(sizes)


def scratch_bytes(header: Header, module: str, kind: str, tensor: TensorHeader, e: int) -> int:
    """What a GPU dequantizes a matrix to: all of it, or some rows at a time (kernels/gpu/dequantize.py)."""
    matrix = find_packed_matrix(header, module) if kind in CODE_SUFFIXES else None
    elements = matrix.rows * matrix.columns if matrix else 0
    if tensor.offset is not None and tensor.dtype.lower() in GGUF_GPU_PACKED:
        elements = tensor.elements
    if tensor.dtype == "U8" and len(tensor.shape) == 3:  # MXFP4, two values a byte
        elements = 2 * tensor.elements
    return min(elements, SCRATCH_ELEMENTS) * e
