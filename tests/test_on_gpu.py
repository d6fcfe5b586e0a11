import torch

from tests.on_gpu import OnDevice
from tests.tiny import CPU

META = torch.device("meta")


def test_tensors_of_tests_are_moved_and_no_others() -> None:
    generator = torch.Generator().manual_seed(0)
    with OnDevice(META):
        made = [
            torch.randn(2, generator=generator),
            torch.arange(3),
            torch.tensor([1, 2]),
            torch.empty(4, device=CPU),
            torch.zeros(5, device="cpu"),
            torch.zeros(5, device="meta"),
            torch.ones(2).to(CPU),
            torch.ones(2).to(device=CPU, dtype=torch.bfloat16),
        ]
        assert {tensor.device for tensor in made} == {META}
        assert made[-1].dtype == torch.bfloat16
    assert torch.zeros(1).device == CPU


def test_numbers_are_those_of_the_generator() -> None:
    expected = torch.randn(7, generator=torch.Generator().manual_seed(3))
    with OnDevice(CPU):
        assert torch.equal(torch.randn(7, generator=torch.Generator().manual_seed(3)), expected)
