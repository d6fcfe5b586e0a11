import pytest

from localllm.runtime.kernels import registry
from localllm.runtime.kernels.registry import choose, dispatch, find, kernel, used_kernels


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty registries of kernels and of used kernels."""
    monkeypatch.setattr(registry, "KERNELS", registry.defaultdict(list))
    monkeypatch.setattr(registry, "_used", set())


def test_only_kernels_that_were_called_are_used(fresh: None) -> None:
    @kernel("add", "small", lambda a, b: None if a + b < 10 else "too large")
    def add_small(a: int, b: int) -> int:
        return a + b

    @kernel("add", "any")
    def add(a: int, b: int) -> int:
        return a + b

    @kernel("negate", "reference")
    def negate(a: int) -> int:
        return -a

    assert (find("add", 1, 2).name, find("add", 20, 2).name) == ("small", "any")
    assert used_kernels() == {}  # a question is no call
    assert dispatch("negate", 3) == -3
    assert used_kernels() == {"negate": ("reference",)}
    assert choose("add", 20, 2).run(20, 2) == 22
    assert used_kernels() == {"add": ("any",), "negate": ("reference",)}
    assert dispatch("add", 1, 2) == 3
    assert used_kernels()["add"] == ("small", "any")
