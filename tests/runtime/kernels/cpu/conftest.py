import pytest

from localllm.runtime.kernels.cpu.compile import cpu_supported


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Leave out what calls programs by themselves where none can run."""
    if not cpu_supported():
        pytest.skip("no kernel is compiled for this processor")
