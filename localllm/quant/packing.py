"""Which weights stay packed in memory, and how: the rules that they are loaded by, and that memory is planned by.

Needs no torch: dtypes and kinds of devices are named (`bfloat16`, `cpu`).
"""

INT8, INT4, W8A8, FP8, MXFP4 = "int8", "int4", "w8a8", "fp8", "mxfp4"
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_8BIT_DTYPES = ("int8", "fp8")  # what keys and values are quantized to: quant/vectors.py
KV_SCALE_BYTES = 2  # of each of their vectors


def kv_element_bytes(kv_dtype: str) -> tuple[int, int]:
    """Of an element of keys and values, and of a vector's scale."""
    return (1, KV_SCALE_BYTES) if kv_dtype in KV_8BIT_DTYPES else (ELEMENT_BYTES[kv_dtype], 0)


INT8_INTERLEAVED, INT4_INTERLEAVED = "int8_lanes", "int4_lanes"  # localllm/quant/formats/lanes.py
INTERLEAVED_BITS = {INT8_INTERLEAVED: 8, INT4_INTERLEAVED: 4}
TILE_ROWS = 16  # side by side
PANEL_ROWS = 1024  # dequantized together: the product of 512 rows of x runs at 1,700 GFLOP/s, 230 with 256
MAX_GROUP = 128  # columns: longer groups have their scale again in each part
GROUP_UNIT = {8: 16, 4: 32}  # columns that groups must be whole numbers of
HALF_GROUP_UNIT = 16  # the one group that is shorter in INT4: a unit's low and high halves

# Bytes that a block of GGUF's formats takes in lanes: codes, then scales. Codes of 2 and 3 bits take 4, others 8.
GGUF_INTERLEAVED_BYTES = {
    **{"q4_0": 16 + 2, "q4_1": 16 + 4, "q5_0": 32 + 2, "q5_1": 32 + 4, "q8_0": 32 + 2, "iq4_nl": 32 + 2},
    **{"q2_k": 128 + 36, "q3_k": 128 + 18, "q4_k": 128 + 20, "q5_k": 256 + 20, "q6_k": 256 + 18},
    **{"iq4_xs": 256 + 10, "mxfp4_gguf": 32 + 4},
}


def interleaved_group(group: int | None, columns: int, bits: int) -> int | None:
    """How many columns share a scale in lanes, of a weight that has `group` (None: a whole row); None where it
    does not go into lanes."""
    unit = GROUP_UNIT[bits]
    if group is None or group >= columns or group % MAX_GROUP == 0:
        return min(MAX_GROUP, -(-columns // unit) * unit)
    fits = group % unit == 0 or (bits == 4 and group == HALF_GROUP_UNIT)
    return group if fits and group <= MAX_GROUP else None


def interleaved_columns(group: int, columns: int) -> int:
    """How many columns lie in lanes: filled up to whole groups, and to whole units of INT4."""
    unit = max(group, GROUP_UNIT[4])
    return -(-columns // unit) * unit


INT4_GPU_PACKED, INT8_GPU_PACKED = "int4_planes", "int8_planes"  # localllm/quant/formats/planes.py
MXFP4_GPU_PACKED, FP8_GPU_PACKED = "mxfp4_planes", "fp8_planes"  # localllm/quant/formats/float_planes.py
PLANES_PER_WORD = {INT4_GPU_PACKED: 4, INT8_GPU_PACKED: 2}  # of codes in a word of 16 bits
CHUNK_WORDS = (64, 32, 16)  # that a row may have in a chunk


def chunk_words(group: int | None, columns: int, bits: int) -> int | None:
    """How many words a chunk has, of a weight that has `group` (None: a whole row): what fills up least, then the
    most; None where a plane would not lie in one group."""
    fit = [words for words in CHUNK_WORDS if group is None or group >= columns or group % words == 0]
    return min(fit, key=lambda words: (gpu_packed_columns(words, columns, bits), -words), default=None)


def gpu_packed_columns(words: int, columns: int, bits: int) -> int:
    """How many columns lie in planes: filled up to whole chunks."""
    chunk = words * (16 // bits)
    return -(-columns // chunk) * chunk


# In planes: bits of a code, columns that share a scale, bytes of their scale and minimum, and of those of a block
# of 256.
GGUF_GPU_PACKED = {
    **{"q4_0": (4, 32, 2, 0), "q4_1": (4, 32, 4, 0), "q5_0": (8, 32, 2, 0), "q5_1": (8, 32, 4, 0)},
    **{"q8_0": (8, 32, 2, 0), "q2_k": (4, 16, 2, 4), "q3_k": (4, 16, 1, 2), "q4_k": (4, 32, 2, 4)},
    **{"q5_k": (8, 32, 2, 4), "q6_k": (8, 16, 1, 2), "iq4_nl": (8, 32, 2, 0), "iq4_xs": (8, 32, 1, 2)},
    **{"mxfp4_gguf": (4, 32, 1, 0)},
}
K_QUANT_BLOCK = 256
GPU_PACKED_BITS = {INT4: 4, INT8: 8, FP8: 8, MXFP4: 4}
SCRATCH_ELEMENTS = 2**26  # that matrices are dequantized to on a GPU, some rows at a time


def gpu_packed_size(rows: int, columns: int, group: int | None, bits: int) -> tuple[int, int] | None:
    """Bytes of the codes in planes, and how many scales; None where the weight does not go into planes."""
    words = chunk_words(group, columns, bits)
    if words is None:
        return None
    tall, stored = -(-rows // TILE_ROWS) * TILE_ROWS, gpu_packed_columns(words, columns, bits)
    groups = -(-stored // group) if group and group < columns else 1
    return tall * stored * bits // 8, tall * groups


def gguf_gpu_packed_bytes(form: str, rows: int, columns: int) -> int | None:
    """Of blocks of a GGUF file in planes; None where the format does not go into planes."""
    if form not in GGUF_GPU_PACKED:
        return None
    bits, group, of_group, of_block = GGUF_GPU_PACKED[form]
    found = gpu_packed_size(rows, columns, group, bits)
    assert found
    codes, scales = found
    return codes + scales * of_group + -(-rows // TILE_ROWS) * TILE_ROWS * (columns // K_QUANT_BLOCK) * of_block


def stays_packed(form: str, device: str) -> bool:
    """Does a kernel read this format packed, or is it so much smaller that it must stay packed? FP8 that no kernel
    reads is better dequantized once, when it is loaded."""
    return form != FP8 or device != "cpu"
