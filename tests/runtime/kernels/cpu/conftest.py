import pytest

from localllm.runtime.kernels.cpu.compile import cpu_supported


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Skip tests that call compiled kernels directly if none can run."""
    if not cpu_supported():
        pytest.skip("no kernel is compiled for this processor")
