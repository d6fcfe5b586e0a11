"""Replaces functions of torch.cuda, and methods of tensors that do not reach the dispatcher, by the device's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from tests.lagging.streams import Event, Graph, Stream

if TYPE_CHECKING:
    from tests.lagging.device import LaggingDevice

CUDA, META = 1, 14  # numbers of device types in c10/core/DeviceType.h
MEMORY_BYTES = 2**33
PROPERTIES = SimpleNamespace(
    major=8, minor=0, multi_processor_count=4, name="a lagging device", total_memory=MEMORY_BYTES
)


@contextlib.contextmanager
def patched_cuda(device: LaggingDevice) -> Iterator[None]:
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph_pool_handle": object,
        "default_generators": (device.generator,),
        "current_stream": device.current_stream,
        "default_stream": lambda _=None: device.streams[0],
        "stream": device.use_stream,
        "synchronize": device.synchronize,
        "device": device.use_device,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "is_current_stream_capturing": lambda: device.capture() is not None,
        "get_device_properties": lambda _=None: PROPERTIES,
        "get_device_name": lambda _=None: PROPERTIES.name,
        "get_device_capability": lambda _=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_arch_list": lambda: ["sm_80"],
        "mem_get_info": lambda _=None: (MEMORY_BYTES // 2, MEMORY_BYTES),
        "empty_cache": lambda: None,
        "max_memory_allocated": lambda _=None: 0,
        "reset_peak_memory_stats": lambda _=None: None,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(device_guard())
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, method in tensor_methods(device).items():
            stack.enter_context(replaced_method(name, method))
        stack.enter_context(interpreted_later(device))
        yield


@contextlib.contextmanager
def device_guard() -> Iterator[None]:
    """Let torch switch to a device that it was built without, as it does before it slices a tensor.

    It has no effect, as on the device `meta`, whose entry of torch's table is used.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * (META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, table[CUDA] = table[CUDA], table[META]
    try:
        yield
    finally:
        table[CUDA] = before


def tensor_methods(device: LaggingDevice) -> dict[str, Callable[[Any], Callable[..., Any]]]:
    from tests.lagging.device import LagTensor

    def reading(original: Any, writes: bool = False) -> Any:
        @functools.wraps(original)
        def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, LagTensor):
                if original.__name__ != "tolist":
                    raise TypeError("can't convert cuda:0 device type tensor to numpy")
                return original(self.cpu())
            with device.lock:
                device.pinned.check_host(self, writes)
            return original(self, *args, **kwargs)

        return method

    def pin_memory(original: Any) -> Any:
        def method(self: Tensor, *_: Any) -> Tensor:
            if has_torch_function((self,)):  # a mode of torch, as any of its methods would ask
                return handle_torch_function(Tensor.pin_memory, (self,), self)
            if isinstance(self, LagTensor):
                raise RuntimeError("cannot pin memory of the device")
            with device.lock:
                if device.pinned.block_of(self):
                    return self
                pinned = device.pinned.allocate(tuple(self.shape), self.dtype)
            return pinned.copy_(self)

        return method

    return {
        "tolist": reading,
        "numpy": functools.partial(reading, writes=True),  # whose memory may be written to
        "pin_memory": pin_memory,
        "is_pinned": lambda _: lambda self, *__: device.pinned.block_of(self) is not None,
    }


@contextlib.contextmanager
def replaced_method(name: str, method: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    original, own = getattr(Tensor, name), name in vars(Tensor)
    setattr(Tensor, name, method(original))
    try:
        yield
    finally:
        if own:
            setattr(Tensor, name, original)
        else:
            delattr(Tensor, name)


@contextlib.contextmanager
def interpreted_later(device: LaggingDevice) -> Iterator[None]:
    """Queue the kernels that Triton's interpreter would run on tensors of the device."""
    from tests.interpreted import TRITON

    if not TRITON:
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    from localllm.runtime.kernels.gpu import launch
    from tests.lagging.device import on_cpu, tensors_in

    original = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        values = (args, kwargs)
        tensors = list(tensors_in(list(values)))
        if not tensors:
            return original(self, *args, **kwargs)
        with torch._C.DisableTorchFunction(), device.lock:
            run_args, run_kwargs = on_cpu(args), on_cpu(kwargs)
            device.reclaim()
            device.forbid_host_tensors(self.fn.__name__, list(values))
            device.launch(self.fn.__name__, lambda: original(self, *run_args, **run_kwargs), [], tensors)

    launch._gpu.cache_clear()
    try:
        with mock.patch.object(GridExecutor, "__call__", call):
            yield
    finally:
        launch._gpu.cache_clear()
