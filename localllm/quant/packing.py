"""Rules for which weights stay packed in memory, and in which layout, for loading them and for planning memory.

Needs no torch: dtypes and device types are strings (`bfloat16`, `cpu`).
"""

INT8, INT4, W8A8, FP8, MXFP4 = "int8", "int4", "w8a8", "fp8", "mxfp4"
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_8BIT_DTYPES = ("int8", "fp8")  # of quantized keys and values: quant/vectors.py
KV_4BIT_DTYPES = ("k8v4", "int4")  # of values, with int4 also of keys
KV_SCALE_BYTES = 2  # per vector in 8 bits; one in 4 bits has an offset, too
QUANTIZED_KV_BYTES: dict[str, tuple[float, float]] = {  # per element, and per vector: the means of keys and values
    **{name: (1, KV_SCALE_BYTES) for name in KV_8BIT_DTYPES},
    "k8v4": ((1 + 1 / 2) / 2, (KV_SCALE_BYTES + 2 * KV_SCALE_BYTES) / 2),
    "int4": (1 / 2, 2 * KV_SCALE_BYTES),
}


def kv_element_bytes(kv_dtype: str) -> tuple[float, float]:
    """Return bytes per element of keys and values, and per vector for its scale and offset."""
    return QUANTIZED_KV_BYTES.get(kv_dtype) or (ELEMENT_BYTES[kv_dtype], 0)


# localllm/quant/formats/interleaved.py
INT8_INTERLEAVED, INT6_INTERLEAVED, INT4_INTERLEAVED = "int8_lanes", "int6_lanes", "int4_lanes"
INTERLEAVED_BITS = {INT8_INTERLEAVED: 8, INT6_INTERLEAVED: 6, INT4_INTERLEAVED: 4}
TILE_ROWS = 16  # rows interleaved in a tile
PANEL_ROWS = 1024  # rows dequantized together: the product of 512 rows of x runs at 1,700 GFLOP/s, 230 with 256
MAX_GROUP = 128  # columns: the scale of a longer group is repeated for each part
GROUP_UNIT = {8: 16, 4: 32}  # columns: group sizes must be multiples of it
HALF_GROUP_UNIT = 16  # the one shorter INT4 group: one of a unit's two halves

# Bytes per block of GGUF's formats in interleaved layout: codes + scales. Codes of 2 and 3 bits take 4, those of 5
# bits 6, and those from a table 8.
GGUF_INTERLEAVED_BYTES = {
    **{"q4_0": 16 + 2, "q4_1": 16 + 4, "q5_0": 24 + 2, "q5_1": 24 + 4, "q8_0": 32 + 2, "iq4_nl": 32 + 2},
    **{"q2_k": 128 + 36, "q3_k": 128 + 18, "q4_k": 128 + 20, "q5_k": 192 + 20, "q6_k": 192 + 18},
    **{"iq4_xs": 256 + 10, "mxfp4_gguf": 32 + 4},
}


def interleaved_group(group: int | None, columns: int, bits: int) -> int | None:
    """Return how many columns share a scale in interleaved layout; None if the weight cannot be interleaved.

    group: columns that share a scale in the weight; None: an entire row
    """
    unit = GROUP_UNIT[bits]
    if group is None or group >= columns or group % MAX_GROUP == 0:
        return min(MAX_GROUP, -(-columns // unit) * unit)
    fits = group % unit == 0 or (bits == 4 and group == HALF_GROUP_UNIT)
    return group if fits and group <= MAX_GROUP else None


def interleaved_columns(group: int, columns: int) -> int:
    """Return the columns in interleaved layout: padded to a multiple of the group and of the INT4 unit."""
    unit = max(group, GROUP_UNIT[4])
    return -(-columns // unit) * unit


INT4_GPU_PACKED, INT8_GPU_PACKED = "int4_planes", "int8_planes"  # localllm/quant/formats/gpu_packed.py
MXFP4_GPU_PACKED, FP8_GPU_PACKED = "mxfp4_planes", "fp8_planes"  # localllm/quant/formats/gpu_packed.py
W8A8_GPU_PACKED = "w8a8_planes"  # as INT8_GPU_PACKED, with activations that are quantized, too
PLANES_PER_WORD = {INT4_GPU_PACKED: 4, INT8_GPU_PACKED: 2}  # codes in a word of 16 bits
CHUNK_WORDS = (64, 32, 16)  # possible words of a row per chunk


def chunk_words(group: int | None, columns: int, bits: int) -> int | None:
    """Return the words per chunk that need the least padding, then the most words; None if none are possible.

    A plane must be within one group. group: columns that share a scale; None: an entire row
    """
    possible = [words for words in CHUNK_WORDS if group is None or group >= columns or group % words == 0]
    return min(possible, key=lambda words: (gpu_packed_columns(words, columns, bits), -words), default=None)


def gpu_packed_columns(words: int, columns: int, bits: int) -> int:
    """Return the columns in packed GPU layout: padded to whole chunks."""
    chunk = words * (16 // bits)
    return -(-columns // chunk) * chunk


# In packed GPU layout: bits of a code, columns that share a scale, bytes of a group's scale and minimum, and of
# those of a block of 256.
GGUF_GPU_PACKED = {
    **{"q4_0": (4, 32, 2, 0), "q4_1": (4, 32, 4, 0), "q5_0": (8, 32, 2, 0), "q5_1": (8, 32, 4, 0)},
    **{"q8_0": (8, 32, 2, 0), "q2_k": (4, 16, 2, 4), "q3_k": (4, 16, 1, 2), "q4_k": (4, 32, 2, 4)},
    **{"q5_k": (8, 32, 2, 4), "q6_k": (8, 16, 1, 2), "iq4_nl": (8, 32, 2, 0), "iq4_xs": (8, 32, 1, 2)},
    **{"mxfp4_gguf": (4, 32, 1, 0)},
}
K_QUANT_BLOCK = 256
GPU_PACKED_BITS = {INT4: 4, INT8: 8, W8A8: 8, FP8: 8, MXFP4: 4}
SCRATCH_ELEMENTS = 2**26  # size of the buffer that GPUs dequantize matrices to, some rows at a time
FLOAT32_BYTES = 4
MAX_SPLITS = 64  # parts of a context; with more, the workspace's bytes would be noticeable beside the cache's
MIN_WORKSPACE_TOKENS = 16  # of a sequence, which the workspace of attention that splits the context has room for
MAX_WORKSPACE_BYTES = 2**26  # of that workspace, unless so many tokens take more
MAX_HEAD_BYTES = 1024  # of a head or a latent in the dtype of q, limited by the registers of a GPU


def gpu_packed_size(rows: int, columns: int, group: int | None, bits: int) -> tuple[int, int] | None:
    """Return the bytes of codes in packed GPU layout, and the number of scales; None if it cannot be packed so."""
    words = chunk_words(group, columns, bits)
    if words is None:
        return None
    padded_rows, padded_columns = -(-rows // TILE_ROWS) * TILE_ROWS, gpu_packed_columns(words, columns, bits)
    groups = -(-padded_columns // group) if group and group < columns else 1
    return padded_rows * padded_columns * bits // 8, padded_rows * groups


def gguf_gpu_packed_bytes(tensor_format: str, rows: int, columns: int) -> int | None:
    """Return the bytes of a GGUF matrix in packed GPU layout; None if the format cannot be packed so."""
    if tensor_format not in GGUF_GPU_PACKED:
        return None
    bits, group, group_bytes, block_bytes = GGUF_GPU_PACKED[tensor_format]
    size = gpu_packed_size(rows, columns, group, bits)
    assert size
    codes, scales = size
    return (
        codes + scales * group_bytes + -(-rows // TILE_ROWS) * TILE_ROWS * (columns // K_QUANT_BLOCK) * block_bytes
    )


def stays_packed(tensor_format: str, device: str) -> bool:
    """Return whether a kernel reads this format packed, or dequantizing would take too much memory.

    FP8 without a kernel is better dequantized once, when it is loaded.
    """
    return tensor_format != FP8 or device != "cpu"
