"""Which weights stay packed in memory: the rule that they are loaded by, and that memory is planned by.

Needs no torch: dtypes and kinds of devices are named (`bfloat16`, `cpu`).
"""

INT8 = "int8"
INT4 = "int4"
VECTOR = 16  # elements
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_8BIT = ("int8", "fp8")  # what keys and values are quantized to: quant/vectors.py
SCALE_BYTES = 2  # of each of their vectors


def kv_bytes(kv_dtype: str) -> tuple[int, int]:
    """Of an element of keys and values, and of a vector's scale."""
    return (1, SCALE_BYTES) if kv_dtype in KV_8BIT else (ELEMENT_BYTES[kv_dtype], 0)


def reads_packed(form: str, columns: int, dtype: str, device: str) -> bool:
    """Does a kernel read this format as it is stored, or is it so much smaller that it must stay packed? INT8 that
    no kernel reads is better dequantized once, when it is loaded. Rows of INT8 must be whole vectors."""
    return form != INT8 or (device == "cpu" and dtype == "bfloat16" and columns % VECTOR == 0)
