"""The error for a device with less memory than planned: the plan's numbers, and flags that reduce them."""

from localllm.errors import DoesNotFit
from localllm.formatting import format_bytes
from localllm.plan.memory import BLOCK_SIZE, MemoryPlan
from localllm.quant.packing import KV_8BIT_DTYPES


def shortage_error(memory: MemoryPlan, device: str, kv_dtype: str, quantized: bool) -> DoesNotFit:
    """Return the error. kv_dtype: of keys and values; quantized: whether the weights are"""
    parts = {
        "weights": memory.weights.total,
        "a draft model's": memory.draft_bytes,
        f"a cache of {memory.blocks * BLOCK_SIZE} tokens": memory.cache_bytes,
        "recurrent states": memory.state_bytes,
        "a step": memory.workspace,
    }
    listed = ", ".join(f"{format_bytes(nbytes)} for {use}" for use, nbytes in parts.items() if nbytes)
    return DoesNotFit(
        f"{device} is out of memory; {format_bytes(memory.total + memory.workspace)} were planned: {listed}",
        "free memory that other programs use, or use less with "
        + " or ".join(memory_saving_flags(memory, kv_dtype, quantized)),
    )


def memory_saving_flags(memory: MemoryPlan, kv_dtype: str, quantized: bool) -> list[str]:
    """Return flags that reduce memory, in descending order of savings."""
    saved = {f"--context {max(1, memory.context // 2)}": memory.cache_bytes / 2 + 1}
    if memory.cache_bytes and kv_dtype not in KV_8BIT_DTYPES:
        saved["--kv-dtype int8"] = memory.cache_bytes / 2
    if not quantized:
        saved["--quant int4"] = memory.weights.total * 3 / 4
    return sorted(saved, key=lambda flag: -saved[flag])
