"""What to say where a device has less memory than was planned with: the plan's arithmetic, and flags that help."""

from localllm.errors import DoesNotFit
from localllm.formatting import format_bytes
from localllm.plan.memory import BLOCK_SIZE, MemoryPlan
from localllm.quant.packing import KV_8BIT_DTYPES


def shortage_error(memory: MemoryPlan, device: str, kv_dtype: str, quantized: bool) -> DoesNotFit:
    """kv_dtype: of keys and values; quantized: are the weights?"""
    parts = {
        "weights": memory.weights.total,
        "a draft model's": memory.draft_bytes,
        f"a cache of {memory.blocks * BLOCK_SIZE} tokens": memory.cache_bytes,
        "recurrent states": memory.state_bytes,
        "a step": memory.workspace,
    }
    told = ", ".join(f"{format_bytes(taken)} for {what}" for what, taken in parts.items() if taken)
    return DoesNotFit(
        f"{device} has no memory left; {format_bytes(memory.total + memory.workspace)} were planned: {told}",
        "free some that others use, or take less with "
        + " or ".join(memory_saving_flags(memory, kv_dtype, quantized)),
    )


def memory_saving_flags(memory: MemoryPlan, kv_dtype: str, quantized: bool) -> list[str]:
    """What would take less, that which saves most first."""
    saved = {f"--context {max(1, memory.context // 2)}": memory.cache_bytes / 2 + 1}
    if memory.cache_bytes and kv_dtype not in KV_8BIT_DTYPES:
        saved["--kv-dtype int8"] = memory.cache_bytes / 2
    if not quantized:
        saved["--quant int4"] = memory.weights.total * 3 / 4
    return sorted(saved, key=lambda flag: -saved[flag])
