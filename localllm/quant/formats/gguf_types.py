"""The tensor types of GGUF: number in the file, name, elements and bytes per block.

From ggml's `ggml_type` and block sizes. Needs no torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockType:
    name: str
    block_elements: int  # adjacent elements of a row
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row with this many elements, which must be whole blocks."""
        return columns // self.block_elements * self.block_bytes


BLOCK_TYPES = {
    0: BlockType("f32", 1, 4),
    1: BlockType("f16", 1, 2),
    2: BlockType("q4_0", 32, 18),
    3: BlockType("q4_1", 32, 20),
    6: BlockType("q5_0", 32, 22),
    7: BlockType("q5_1", 32, 24),
    8: BlockType("q8_0", 32, 34),
    10: BlockType("q2_k", 256, 84),
    11: BlockType("q3_k", 256, 110),
    12: BlockType("q4_k", 256, 144),
    13: BlockType("q5_k", 256, 176),
    14: BlockType("q6_k", 256, 210),
    20: BlockType("iq4_nl", 32, 18),
    23: BlockType("iq4_xs", 256, 136),
    30: BlockType("bf16", 1, 2),
    39: BlockType("mxfp4_gguf", 32, 17),  # with another order of nibbles than in safetensors
}
BLOCK_TYPE_BY_NAME = {block_type.name: block_type for block_type in BLOCK_TYPES.values()}

UNSUPPORTED_TYPES = {  # types of files in circulation that localllm does not support
    **{9: "q8_1", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 21: "iq3_s", 22: "iq2_s"},
    **{24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0"},
    **{40: "nvfp4", 41: "q1_0"},
}
