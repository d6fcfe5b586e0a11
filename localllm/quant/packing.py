"""Which weights stay packed in memory: the rule that they are loaded by, and that memory is planned by.

Needs no torch: dtypes and kinds of devices are named (`bfloat16`, `cpu`).
"""

INT8 = "int8"
INT4 = "int4"
W8A8 = "w8a8"
FP8 = "fp8"
VECTOR = 16  # elements
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def reads_packed(form: str, columns: int, dtype: str, device: str) -> bool:
    """Does a kernel read this format as it is stored, or is it so much smaller that it must stay packed? INT8 that
    no kernel reads is better dequantized once, when it is loaded, and so is FP8, which none reads yet. Rows of
    INT8 must be whole vectors."""
    if form == INT8:
        return device == "cpu" and dtype == "bfloat16" and columns % VECTOR == 0
    return form != FP8
