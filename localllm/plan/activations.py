"""Estimates the activation memory of a step, besides weights and caches, from the shapes of its operations.

The peak is the largest of an attention, a feed-forward half, dequantizing a matrix, and sampling from logits. Live
tensors are derived from `runtime/model.py`, the layers and the kernels, compiled ones on a CPU; a test compares
the estimate with the storages that are alive in a step (docs/plan.md states its accuracy). A deterministic step
needs less, because it materializes no scores and no masks.
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
from localllm.plan.weights import dense_element_bytes, is_matrix
from localllm.quant.packing import (
    ELEMENT_BYTES,
    FLOAT32_BYTES,
    GGUF_GPU_PACKED,
    MAX_HEAD_BYTES,
    MAX_SPLITS,
    MAX_WORKSPACE_BYTES,
    MIN_WORKSPACE_TOKENS,
    PANEL_ROWS,
    QUANTIZED_KV_BYTES,
    SCRATCH_ELEMENTS,
    stays_packed,
)

MAX_SCORES = 2**23  # at once, in the attention that materializes them (kernels/attention.py)
# Elements of the keys of as many heads as are expanded at once, in latent attention (kernels/latent.py).
MAX_EXPANDED_KEYS = 2**25
BYTES_PER_LOGIT = 24  # float32 two or three times, and float64 twice, when sampling
ROUTE_BYTES = 8  # for a (token, expert) pair when sorting
MASK_COPIES = 3  # bytes per query-key pair: two masks, and the one computed from them
# Copies of [T, hidden] that are alive in the middle of a layer: x, its addend, the normalized one.
RESIDUAL_COPIES = 3


def activation_bytes(
    config: ModelConfig,
    dtype: str,
    tokens: int,
    context: int,
    sequences: int = 1,
    matrix_bytes: int = 0,
    kv_dtype: str | None = None,
    on_gpu: bool = False,
) -> int:
    """Return the peak of a step with `tokens` tokens in total, of sequences with `context` tokens.

    matrix_bytes: size of the largest matrix that is dequantized in a step, see `dequantized_matrix_bytes`;
    kv_dtype: of keys and values, None for `dtype`; on a CPU, quantized ones that a sequence sees are dequantized,
    layer by layer; on_gpu: with the GPU kernels, which make neither masks nor scores, and with all tokens passing
    a layer's experts at once, rather than expert by expert.
    """
    e, kv = ELEMENT_BYTES[dtype], kv_dtype or dtype
    layers = set(config.layers)
    has_kernels = on_gpu and not config.encoder
    paged = {
        layer.mixer
        for layer in layers
        if has_kernels and reads_paged_cache(layer.mixer, e, quantized=kv in QUANTIZED_KV_BYTES)
    }
    peaks = [
        layer_bytes(
            layer,
            config.hidden_size,
            e,
            tokens,
            context,
            grouped=on_gpu,
            paged=layer.mixer in paged,
            workspace=own_workspace_bytes(layer.mixer) if has_kernels else 0,
        )
        for layer in layers
    ]
    per_layer = 3 * tokens * len(config.layers) * config.per_layer.dim * e if config.per_layer else 0
    others = [layer for layer in layers if layer.mixer not in paged]
    dequantized = max((dequantized_bytes(layer.mixer, e, kv, tokens, context) for layer in others), default=0)
    persistent = dequantized + angle_bytes(config, tokens) + mask_bytes(others, tokens, context) + per_layer
    # While a matrix is dequantized, only input and output of the feed-forward half are alive.
    widest = max(ffn_bytes(layer.ffn, config.hidden_size, e, tokens, on_gpu) for layer in layers) // 2
    dequantizing = RESIDUAL_COPIES * tokens * config.hidden_size * e + widest + matrix_bytes if matrix_bytes else 0
    logits = sequences * config.vocab_size * BYTES_PER_LOGIT
    return max(persistent + max(*peaks, dequantizing), logits)


def reads_paged_cache(c: Mixer, e: int, *, quantized: bool) -> bool:
    """Return whether GPU kernels attend over the block table for any number of tokens (kernels/gpu/decode.py)."""
    if not isinstance(c, AttentionConfig):
        return False
    return c.head_dim * e <= MAX_HEAD_BYTES and not (quantized and c.head_dim % 2)


def split_workspace_bytes(config: ModelConfig) -> int:
    """Return the most bytes that parts of a split context take on a GPU (kernels/gpu/splits.py)."""
    mixers = {layer.mixer for layer in config.layers} if not config.encoder else set()
    return max((own_workspace_bytes(mixer) for mixer in mixers), default=0)


def own_workspace_bytes(c: Mixer) -> int:
    match c:
        case AttentionConfig():
            token_bytes = c.heads * MAX_SPLITS * (c.head_dim + 2) * FLOAT32_BYTES
        case LatentConfig():
            token_bytes = c.heads * MAX_SPLITS * (c.kv_lora_rank + 2) * FLOAT32_BYTES
        case _:
            return 0
    return max(MIN_WORKSPACE_TOKENS * token_bytes, MAX_WORKSPACE_BYTES)


def angle_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the bytes of cos and sin, for each distinct rope."""
    mixers = [layer.mixer for layer in config.layers]
    ropes = {c.rope for c in mixers if isinstance(c, AttentionConfig | LatentConfig)}
    return sum(tokens * rope.dim * FLOAT32_BYTES for rope in ropes if rope)


def dequantized_bytes(c: Mixer, e: int, kv_dtype: str, tokens: int, context: int) -> int:
    """Return the bytes of quantized keys and values that one sequence sees, dequantized to e bytes each."""
    if kv_dtype not in QUANTIZED_KV_BYTES:
        return 0
    seen = keys_seen(c.window if isinstance(c, AttentionConfig) else None, tokens, context)
    return seen * elements_read_per_token(c) * e


def mask_bytes(layers: Iterable[LayerConfig], tokens: int, context: int) -> int:
    """Return the bytes of attention masks, one per query-key pair, for each window."""
    attending = [layer.mixer for layer in layers if isinstance(layer.mixer, AttentionConfig | LatentConfig)]
    windows = {c.window if isinstance(c, AttentionConfig) else None for c in attending}
    return sum(tokens * keys_seen(window, tokens, context) for window in windows)


def keys_seen(window: int | None, tokens: int, context: int) -> int:
    return min(context, window + tokens) if window else context


def layer_bytes(
    layer: LayerConfig,
    hidden: int,
    e: int,
    tokens: int,
    context: int,
    *,
    grouped: bool,
    paged: bool,
    workspace: int,
) -> int:
    """grouped: see `ffn_bytes`; paged: see `mixer_bytes`; workspace: of attention that splits the context"""
    hidden_bytes = tokens * hidden * e
    normed = tokens * hidden * 2 * FLOAT32_BYTES if e < FLOAT32_BYTES else 0
    mixer_peak = 2 * hidden_bytes + mixer_bytes(layer.mixer, hidden, e, tokens, context, paged=paged) + workspace
    return max(
        mixer_peak, RESIDUAL_COPIES * hidden_bytes + max(normed, ffn_bytes(layer.ffn, hidden, e, tokens, grouped))
    )


def mixer_bytes(c: Mixer, hidden: int, e: int, tokens: int, context: int, *, paged: bool) -> int:
    """paged: the kernel makes neither masks nor scores, see `reads_paged_cache`"""
    match c:
        case AttentionConfig():
            keys, heads = c.kv_heads * c.head_dim, c.heads * c.head_dim
            seen = keys_seen(c.window, tokens, context)
            qkv = tokens * (heads + 2 * keys) * e
            gated = qkv + tokens * heads * e if c.output_gate else 0  # including the gates
            rotating = tokens * (heads + keys) * (3 * FLOAT32_BYTES + e)
            mixing = tokens * (2 * heads + keys) * e  # rotated q and k, and the result
            if paged:
                pass
            elif c.softcap or c.sinks:
                mixing += max(
                    min(MAX_SCORES, tokens * c.heads * seen) * 3 * FLOAT32_BYTES, tokens * seen * (MASK_COPIES - 1)
                )
            else:
                mixing += tokens * seen * max(MASK_COPIES - 1, e)  # or the mask in floats
            return gated + qkv + max(rotating, mixing)  # q, k and v before the rotation live until the end
        case LatentConfig():
            width = c.nope_dim + c.rope_dim
            q = tokens * c.heads * width * e
            latent = tokens * (c.kv_lora_rank + c.rope_dim) * e
            head_elements = context * max(width, c.value_dim)
            keys = min(head_elements * c.heads, max(head_elements, MAX_EXPANDED_KEYS)) * e
            seen = tokens * context * max(MASK_COPIES, e)  # the masks, or one in floats besides the keys
            absorbed = tokens * c.heads * (2 * c.kv_lora_rank + c.rope_dim) * e  # if each token attends separately
            mixing = max(3 * keys + tokens * context * e, seen, absorbed)
            return 3 * q + latent + mixing + tokens * c.heads * c.value_dim * e
        case DeltaNetConfig():
            values, qk_dim = c.value_heads * c.value_dim, 2 * c.key_heads * c.key_dim
            convolving = c.channels * (2 * e + 2 * FLOAT32_BYTES)
            stepping = c.channels * e + 2 * qk_dim * FLOAT32_BYTES + values * 2 * e  # including copies
            gating = c.channels * e + qk_dim * FLOAT32_BYTES + values * (e + 3 * FLOAT32_BYTES)
            return tokens * ((c.channels + values) * e + max(convolving, stepping, gating))
        case ShortConvConfig():
            return tokens * c.channels * (5 * e + 2 * FLOAT32_BYTES)


def ffn_bytes(c: MLPConfig | MoEConfig, hidden: int, e: int, tokens: int, grouped: bool = False) -> int:
    """Return the bytes of a feed-forward half: gate, up and their product.

    grouped: also the gate's activation, because a GPU may fall back on torch.
    """
    if isinstance(c, MLPConfig):
        return (4 if grouped else 3) * tokens * c.intermediate_size * e
    outside = tokens * hidden * (FLOAT32_BYTES + e) + 4 * tokens * c.experts * FLOAT32_BYTES
    # The busiest expert receives more than its fair share of tokens.
    expert_tokens = min(tokens, -(-3 * tokens * c.experts_per_token // (2 * c.experts)))
    expert_bytes = expert_tokens * hidden * (2 * e + 2 * FLOAT32_BYTES) + ffn_bytes(
        c.expert, hidden, e, expert_tokens
    )
    if grouped:  # all (token, expert) pairs at once, and their order
        expert_bytes = tokens * c.experts_per_token * ((hidden + c.expert.intermediate_size) * e + 4 * ROUTE_BYTES)
    return outside + max(expert_bytes, ffn_bytes(c.shared, hidden, e, tokens) if c.shared else 0)


def dequantized_matrix_bytes(header: Header, dtype: str, device: str) -> int:
    """Return the bytes of the largest matrix that a step of many tokens dequantizes, including intermediate
    tensors.
    """
    e = ELEMENT_BYTES[dtype]
    sizes = [0]
    for name, tensor in header.tensors.items():
        module, _, suffix = name.rpartition(".")
        matrix = (
            find_packed_matrix(header, module)
            if suffix in CODE_SUFFIXES and tensor.dtype in ("I8", "I32")
            else None
        )
        if device != "cpu":
            sizes.append(scratch_bytes(header, module, suffix, tensor, e))
            continue
        if matrix and stays_packed(matrix.format, device):
            sizes.append(min(matrix.rows, PANEL_ROWS) * matrix.columns * e)  # dequantized in parts
        if is_matrix(name, tensor) and dense_element_bytes(tensor, dtype, device) < e:
            sizes.append(min(tensor.shape[0], PANEL_ROWS) * tensor.shape[1] * e)  # widened in parts
        if tensor.dtype == "U8" and len(tensor.shape) == 3:  # MXFP4, two values per byte: an index of 8 bytes each
            sizes.append(2 * tensor.elements * (8 + FLOAT32_BYTES))
    return max(sizes)


def scratch_bytes(header: Header, module: str, kind: str, tensor: TensorHeader, e: int) -> int:
    """Return the bytes of the buffer that a GPU dequantizes a matrix to, at once or in parts
    (kernels/gpu/dequantize.py).
    """
    matrix = find_packed_matrix(header, module) if kind in CODE_SUFFIXES else None
    elements = matrix.rows * matrix.columns if matrix else 0
    if tensor.offset is not None and tensor.dtype.lower() in GGUF_GPU_PACKED:
        elements = tensor.elements
    if tensor.dtype == "U8" and len(tensor.shape) == 3:  # MXFP4, two values per byte
        elements = 2 * tensor.elements
    return min(elements, SCRATCH_ELEMENTS) * e
