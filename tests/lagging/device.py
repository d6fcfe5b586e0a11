"""Tensors on "cuda" whose operations are checked at once and computed later, on the CPU."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.lagging.memory import Allocator, Memory, PinnedMemory, byte_range, check_unchanged
from tests.lagging.streams import Access, DeviceFault, Queues, Stream, Task, _active, caller

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
# Composite operations that move tensors between devices: only their parts are queued.
DECOMPOSED = ("aten::to", "aten::item", "aten::is_nonzero", "aten::cpu", "aten::type_as")
UNINITIALIZED = (
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
)
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index")


class LagTensor(Tensor):
    """A tensor on the device: its metadata is that of `fake`, and `memory` has its values once computed."""

    fake: FakeTensor
    memory: Memory

    @staticmethod
    def __new__(cls, fake: FakeTensor, memory: Memory) -> LagTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            fake.shape,
            strides=fake.stride(),
            storage_offset=fake.storage_offset(),
            dtype=fake.dtype,
            layout=fake.layout,
            device=fake.device,
        )
        tensor.fake, tensor.memory = fake, memory
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = _active[-1]
        assert isinstance(device, LaggingDevice)
        return device.dispatch(func, args, kwargs or {})

    def on_cpu(self) -> Tensor:
        """Return the memory as a tensor on the CPU, for tasks."""
        return cpu_view(self.fake, self.memory)

    def access(self, writes: bool) -> Access:
        return Access(self.memory.block, *byte_range(self.fake), writes)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"LagTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def cpu_view(fake: FakeTensor, memory: Memory) -> Tensor:
    with _disable_current_modes(), torch.inference_mode():
        view = torch.empty(0, dtype=fake.dtype)
        view.set_(memory.block.data.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())
        return view


class Mode(TorchDispatchMode):
    """Passes the operations of a thread to the device: also those on the host, which may touch pinned memory."""

    def __init__(self, device: LaggingDevice):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.device.dispatch(func, args, kwargs or {})


class LaggingDevice(Queues):
    """A context in which this thread, and threads in `torch.cuda.device`, have a GPU that lags.

    At its end, everything is executed, and a fault that was caught on the way is raised. seed: see Queues.
    """

    def __init__(self, seed: int | None = None):
        super().__init__(seed)
        self.allocator = Allocator(self)
        self.pinned = PinnedMemory(self)
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=False)
        self.operations = 0
        self.undo = contextlib.ExitStack()

    def __enter__(self) -> LaggingDevice:
        from tests.lagging.cuda_api import patched_cuda

        _active.append(self)
        self.undo.callback(_active.pop)
        Stream()  # the default stream
        self.undo.enter_context(patched_cuda(self))
        self.undo.enter_context(self.use_device())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.synchronize()
        finally:
            self.undo.close()
        if error is None and self.faults:
            raise DeviceFault(f"{len(self.faults)} faults, first: {self.faults[0]}")

    @contextlib.contextmanager
    def use_device(self, _: object = None) -> Iterator[None]:
        """Replaces torch.cuda.device: pass this thread's operations to the device."""
        if getattr(self.thread, "active", False):
            yield  # one mode suffices, and two would be in each other's way
            return
        self.thread.active, lifts_cpu_only = True, torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(device=) shows its copy
        try:
            with Mode(self):
                yield
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts_cpu_only)
            self.thread.active = False

    def reclaim(self) -> None:
        self.allocator.reclaim()

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat = pytree.tree_leaves((args, kwargs))
        on_device = [value for value in flat if isinstance(value, LagTensor)]
        if not on_device and not any(is_cuda(value) for value in flat):
            return self.run_on_host(func, args, kwargs, flat)
        with self.lock:
            self.reclaim()
            name = func._schema.name
            if name in DECOMPOSED and func._can_decompose():
                with Mode(self):
                    return func.decompose(*args, **kwargs)
            self.operations += 1
            if func is aten._local_scalar_dense.default:
                self.wait_for_stream("reading a value of the device")
                return args[0].on_cpu().item()
            if func is aten._to_copy.default and (moved := self.move(args[0], **kwargs)) is not None:
                return moved
            if func is aten.copy_.default and args[0].is_cuda != args[1].is_cuda:
                non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
                self.copy_across(args[0], args[1], non_blocking)
                return args[0]
            return self.queue(func, name, args, kwargs)

    def run_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flat: list[Any]) -> Any:
        if kwargs.get("pin_memory"):
            made = func(*args, **{**kwargs, "pin_memory": None})
            return self.pinned.pin(made, poison=func._schema.name in UNINITIALIZED)
        if self.pinned.blocks and not is_view(func):
            written = written_arguments(func, args, kwargs)
            with self.lock:
                for tensor in flat:
                    if isinstance(tensor, Tensor):
                        self.pinned.check_host(tensor, writes=any(tensor is each for each in written))
        return func(*args, **kwargs)

    def tensor(self, fake: FakeTensor) -> LagTensor:
        """Allocate a tensor with this metadata."""
        return LagTensor(fake, self.allocator.allocate(byte_range(fake)[1]))

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> LagTensor:
        with self.fake_mode:
            fake = aten.empty.memory_format(list(shape), dtype=dtype, device=CUDA)  # torch.empty may be patched
        assert isinstance(fake, FakeTensor)
        return self.tensor(fake)

    def launch(
        self,
        label: str,
        run: Callable[[], object],
        reads: Iterable[Any],
        writes: Iterable[Any],
        pinned: Iterable[Access] = (),
    ) -> None:
        """Queue work on the current stream that reads and writes these tensors, and pinned memory."""
        tensors = [(t, w) for group, w in ((reads, False), (writes, True)) for t in group if t.numel()]
        blocks = [(tensor.memory.block, tensor.memory.block.lifetimes) for tensor, _ in tensors]
        graph = self.capture()
        where = f"{label} at {caller()}"

        def check_replay() -> None:
            for block, lifetimes in blocks:
                if block.pool is None and block.lifetimes != lifetimes:
                    raise self.fault(f"a graph uses {block.name} in {where}, which was freed after its capture")

        accesses = [*(tensor.access(w) for tensor, w in tensors), *pinned]
        task = Task(where, run, accesses, check_replay=check_replay if graph else None)
        self.submit(self.current_stream(), task)
        self.advance()

    def forbid_host_tensors(self, kernel: str, arguments: Any) -> None:
        if any(not isinstance(tensor, LagTensor) for tensor in tensors_in(arguments, Tensor)):
            raise self.fault(f"the kernel {kernel} gets tensors of the host and of the device")

    def queue(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute an operation's metadata now, and its values later."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(value, Tensor) and not isinstance(value, LagTensor) for value in flat):
            flat = [self.host_argument(value, name) for value in flat]
        fake_args, fake_kwargs = pytree.tree_unflatten([self.fake_of(value) for value in flat], spec)
        try:
            with self.fake_mode:
                fakes = func(*fake_args, **fake_kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self.run_now(func, name, flat, spec)
        except Exception as error:
            raise self.fault(f"{name}: {error}") from error
        by_fake = {id(t.fake): t for t in flat if isinstance(t, LagTensor)}
        by_storage = {t.fake.untyped_storage()._cdata: t for t in flat if isinstance(t, LagTensor)}
        fresh: list[tuple[int, LagTensor]] = []
        flat_fakes, out_spec = pytree.tree_flatten(fakes)
        outputs: list[Any] = []
        for index, fake in enumerate(flat_fakes):
            if not isinstance(fake, FakeTensor):
                outputs.append(fake)
            elif id(fake) in by_fake:
                outputs.append(by_fake[id(fake)])
            elif (base := by_storage.get(fake.untyped_storage()._cdata)) is not None:
                outputs.append(LagTensor(fake, base.memory))
            else:
                outputs.append(self.tensor(fake))
                fresh.append((index, outputs[-1]))
        written = [t for t in written_arguments(func, args, kwargs) if isinstance(t, LagTensor)]
        if (written or fresh) and name not in UNINITIALIZED:
            values = [as_argument(value) for value in flat]
            targets = [(index, tensor.on_cpu()) for index, tensor in fresh]

            def run() -> None:
                run_args, run_kwargs = pytree.tree_unflatten(values, spec)
                results = pytree.tree_leaves(func(*run_args, **run_kwargs))
                for index, target in targets:
                    target.copy_(results[index])

            reads = [t for t in flat if isinstance(t, LagTensor)]
            self.launch(name, run, reads, [*written, *(tensor for _, tensor in fresh)])
        return pytree.tree_unflatten(outputs, out_spec)

    def host_argument(self, value: Any, name: str) -> Any:
        """Return a tensor of the host as the device gets it: a scalar by value, an index by an implicit copy."""
        if not isinstance(value, Tensor) or isinstance(value, LagTensor):
            return value
        self.pinned.check_host(value, writes=False)
        if value.dim() == 0:
            return value.clone()
        if name not in INDEXED:
            return value  # FakeTensorMode refuses it
        target = self.empty(value.shape, value.dtype)
        self.copy_across(target, value, non_blocking=False)
        return target

    def fake_of(self, value: Any) -> Any:
        if isinstance(value, LagTensor):
            return value.fake
        return self.fake_mode.from_tensor(value) if isinstance(value, Tensor) else value

    def run_now(self, func: Any, name: str, flat: list[Any], spec: Any) -> Any:
        """Run an operation whose result has a shape that depends on values, for which the host waits."""
        self.wait_for_stream(name)
        run_args, run_kwargs = pytree.tree_unflatten([as_argument(value) for value in flat], spec)
        with torch.inference_mode():
            results = func(*run_args, **run_kwargs)

        def to_device(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            target = self.empty(value.shape, value.dtype)
            on_cpu = target.on_cpu()
            self.launch(name, lambda: on_cpu.copy_(value), [], [target])
            return target

        return pytree.tree_map(to_device, results)

    def move(self, source: Tensor, **options: Any) -> Tensor | None:
        """Copy a tensor to the other side of the bus; None if it stays where it is."""
        target_device = options.get("device")
        to_cuda = source.is_cuda if target_device is None else target_device.type == "cuda"
        if to_cuda == source.is_cuda:
            return None
        dtype = options.get("dtype") or source.dtype
        non_blocking = bool(options.get("non_blocking"))
        if to_cuda:
            target = self.empty(source.shape, dtype)
        elif non_blocking:  # torch pins the result of such a copy
            target = self.pinned.allocate(tuple(source.shape), dtype)
        else:
            target = torch.empty(source.shape, dtype=dtype)
        self.copy_across(target, source, non_blocking)
        return target

    def copy_across(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        """Queue a copy between host and device. The host waits for it unless it is non_blocking and the memory of
        the host is pinned and contiguous."""
        host, on_gpu = (source, target) if isinstance(target, LagTensor) else (target, source)
        assert isinstance(on_gpu, LagTensor)
        upload = host is source
        access = self.pinned.access(host, writes=not upload)
        direction = "to the device" if upload else "to the host"
        label, view = f"a copy of {tuple(source.shape)} {direction}", on_gpu.on_cpu()
        if non_blocking and access is not None and host.is_contiguous():
            self.queue_copy(label, host, view, on_gpu, access)
            return
        self.pinned.check_host(host, writes=not upload)
        self.wait_for_stream(f"{'pageable' if access is None else 'blocking or strided'} copy {direction}")
        if upload:
            values = host.clone()
            self.launch(label, lambda: view.copy_(values), [], [on_gpu])
            return
        self.launch(label, lambda: host.copy_(view), [on_gpu], [])
        self.wait_for_stream(label)
        self.waits.pop()  # it is one copy, counted above

    def queue_copy(self, label: str, host: Tensor, view: Tensor, on_gpu: LagTensor, access: Access) -> None:
        """Queue a copy from or to pinned memory."""
        upload = not access.writes
        before, where = None, f"{label} at {caller()}"
        known = access.memory.conflict(access.begin, access.end, False, self.host_clock) is None
        if upload and known and not self.capture():  # otherwise a queued copy, or a later host, writes the source
            before = host.clone()

        def run() -> None:
            if before is not None:
                check_unchanged(host, before, where)
            if upload:
                view.copy_(host)
            else:
                host.copy_(view)

        reads, writes = ([], [on_gpu]) if upload else ([on_gpu], [])
        self.launch(label, run, reads, writes, [access])


def is_cuda(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def as_argument(value: Any) -> Any:
    """Return a value as tasks get it: tensors and devices of the CPU."""
    if isinstance(value, LagTensor):
        return value.on_cpu()
    return torch.device("cpu") if is_cuda(value) else value


def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    written: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return written


def is_struct(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def own_tensors(value: Any) -> dict[str, Tensor]:
    """Return the attributes of an object that are tensors, such as those of a cache."""
    return {name: each for name, each in getattr(value, "__dict__", {}).items() if isinstance(each, Tensor)}


def on_cpu(value: Any) -> Any:
    """Return a value with every tensor of the device in it replaced by its memory, for tasks."""
    if isinstance(value, LagTensor):
        return value.on_cpu()
    if isinstance(value, Tensor):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(on_cpu, value))
    if isinstance(value, dict):
        return {key: on_cpu(each) for key, each in value.items()}
    if is_struct(value) or own_tensors(value):
        copied = copy.copy(value)
        for name, each in vars(value).items() if is_struct(value) else own_tensors(value).items():
            object.__setattr__(copied, name, on_cpu(each))
        return copied
    return value


def tensors_in(value: Any, kind: type[Tensor] = LagTensor) -> Iterator[Any]:
    """Yield the tensors of a kind in a value: those of the device, or all."""
    if isinstance(value, Tensor):
        if isinstance(value, kind):
            yield value
    elif type(value) in (list, tuple):  # not of a subclass such as DeviceOnlySpans
        for each in value:
            yield from tensors_in(each, kind)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()), kind)
    elif is_struct(value):
        yield from tensors_in(list(vars(value).values()), kind)
    else:
        yield from tensors_in(list(own_tensors(value).values()), kind) if own_tensors(value) else ()
