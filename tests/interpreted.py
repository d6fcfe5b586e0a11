"""Load the kernels for GPUs as functions of Triton's interpreter, which the fixture `interpreter` enables in a
test. With a GPU they are compiled for it; without Triton, as on macOS and Arm, there are none.

With a seed in the environment variable SOFTWARE_GPU, they are compiled to PTX instead, which tools/ptx executes
(tests/software_gpu.py). With LAGGING_GPU, tests that run on a GPU, if there is one, run on a lagging device
(tests/lagging), with the interpreter's kernels."""

import functools
import importlib.util
import inspect
import math
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

ON_GPU = torch.cuda.is_available()
SOFTWARE_GPU = os.environ.get("SOFTWARE_GPU")
LAGGING_GPU = "LAGGING_GPU" in os.environ
TRITON = importlib.util.find_spec("triton") is not None
launch = None
if ON_GPU:  # before CUDA starts: without, cuBLAS refuses to compute where a test asks for deterministic algorithms
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def interpret_faster() -> None:
    """Spare Triton's interpreter what takes more than half of its time: at each launch and in each call of a
    function within a kernel it looks for functions to replace, and each result gets a shape and a type of its own.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    core = importlib.import_module("triton.language.core")
    replace_builtins_once(interpreter, core)
    keep_types(interpreter, core)


def replace_builtins_once(interpreter: Any, core: Any) -> None:
    """Look for the functions that are replaced once, and replace them in the first call of a launch alone."""
    names: dict[object, list[str]] = {}
    replaced: set[str] = set()  # names of modules, in the current launch
    patch_lang = interpreter._patch_lang

    def builtins_of(package: object) -> list[tuple[str, object]]:
        if package not in names:  # nothing of it is replaced yet
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        found = [(name, getattr(package, name)) for name in names[package][:1]]
        if not found or not core.is_builtin(found[0][1]):
            return []  # all are replaced, as in a function that a kernel calls
        return [(name, getattr(package, name)) for name in names[package]]

    @functools.cache
    def modules_of(fn: Any) -> set[str]:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        return {module.__name__ for module in modules} & {"triton.language", core.__name__}

    def launch_patched(fn: Any) -> Any:
        replaced.clear()
        replaced.update(modules_of(fn))
        return patch_lang(fn)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not modules_of(self.fn) <= replaced:
            replaced.update(modules_of(self.fn))
            patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": builtins_of})
    interpreter._patch_lang = launch_patched
    interpreter.InterpretedFunction.__call__ = call


def keep_types(interpreter: Any, core: Any) -> None:
    """Make each type of a block and each shape of a tensor once."""
    np_dtypes: dict[str, Any] = {}
    block_types: dict[tuple[str, tuple[int, ...]], Any] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    np_dtype = interpreter._get_np_dtype

    def kept_np_dtype(of: Any) -> Any:
        if of.name not in np_dtypes:
            np_dtypes[of.name] = np_dtype(of)
        return np_dtypes[of.name]

    def block_type(element: Any, shape: Any) -> Any:
        key = element.name, tuple(core._unwrap_if_constexpr(each) for each in shape)
        if key not in block_types:
            block_types[key] = core.block_type(element, shape)
        return block_types[key]

    def begin(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape not in shapes:
            shapes[shape] = core.constexpr(math.prod(shape)), core.tuple([core.constexpr(each) for each in shape])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[shape]

    interpreter._get_np_dtype = kept_np_dtype
    interpreter.InterpreterBuilder.get_block_ty = lambda self, element, shape: block_type(element, shape)
    core.block_type.with_element_ty = lambda self, element: block_type(element, self.shape)
    core.tensor.__init__ = begin


if TRITON:
    if not ON_GPU and not SOFTWARE_GPU:
        os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined, Triton's own included
    importlib.import_module("triton.experimental.gluon")
    # The package registers kernels for GPUs, before those for the CPU, if there is a GPU or the interpreter.
    with patch.object(torch.cuda, "is_available", lambda: True) if SOFTWARE_GPU else nullcontext():
        launch = importlib.import_module("localllm.runtime.kernels.gpu.launch")
        importlib.import_module("localllm.runtime.kernels")
    if os.environ.pop("TRITON_INTERPRET", None):
        interpret_faster()
    setattr(launch, "takes_cpu", False)  # noqa: B010
