"""A simulated processor without the instructions of the compiled kernels, so that torch computes everything."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from localllm.hardware import processor


@contextmanager
def no_instructions() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "x86_64")
        patch.setattr(processor, "features", dict)
        processor.kernels_supported.cache_clear()
        yield
    processor.kernels_supported.cache_clear()
