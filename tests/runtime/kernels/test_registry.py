import pytest

from localllm.runtime.kernels import registry
from localllm.runtime.kernels.registry import choose, explain, find, kernel, run, used


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels, none of them used."""
    monkeypatch.setattr(registry, "KERNELS", registry.defaultdict(list))
    monkeypatch.setattr(registry, "_used", set())


def test_only_kernels_that_were_called_are_used(fresh: None) -> None:
    @kernel("add", "small", lambda a, b: None if a + b < 10 else "too large")
    @kernel("add", "any")
    def add(a: int, b: int) -> int:
        return a + b

    @kernel("negate", "reference")
    def negate(a: int) -> int:
        return -a

    assert find("add", 1, 2).name == explain("add", 1, 2)[0][0]
    assert used() == {}  # a question is no call
    assert run("negate", 3) == -3
    assert used() == {"negate": ("reference",)}
    assert choose("add", 20, 2).run(20, 2) == 22
    assert used() == {"add": ("any",), "negate": ("reference",)}
    assert run("add", 1, 2) == 3
    assert set(used()["add"]) == {"any", "small"}
    assert used()["add"] == tuple(name for name, _ in explain("add", 1, 2))
