import math
import tomllib
from pathlib import Path

import pytest

from localllm.errors import UsageError
from localllm.hardware import catalog
from localllm.hardware.catalog import RESERVED_BYTES, device_names, find_device
from localllm.hardware.device import required_arch

CATALOGUE = Path(catalog.__file__).with_name("hardware.toml")


@pytest.mark.parametrize(
    ("spellings", "name"),
    [
        (["H100 SXM", "h100", "H100-80", "h100_sxm5", "NVIDIA H100 80GB HBM3"], "H100 SXM"),
        (["A100", "a100-80", "A100 80 GB", "NVIDIA A100-SXM4-80GB"], "A100 SXM 80GB"),
        (["a100-40", "A100-40GB", "NVIDIA A100-SXM4-40GB"], "A100 40GB"),
        (["4090", "rtx4090", "RTX-4090", "NVIDIA GeForce RTX 4090"], "RTX 4090"),
        (["3060", "rtx 3060 12gb"], "RTX 3060 12GB"),
        (["l4", "NVIDIA L4"], "L4"),
        (["a6000", "NVIDIA RTX A6000"], "RTX A6000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_devices_match_the_names_of_users_and_drivers(spellings: list[str], name: str) -> None:
    assert {find_device(spelling).name for spelling in spellings} == {name}


def test_the_figures_that_everyone_quotes() -> None:
    h100 = find_device("h100")
    assert (h100.device_type, h100.measured) == ("cuda", False)
    assert h100.memory_bytes == 80_000_000_000 - RESERVED_BYTES
    assert (h100.bandwidth, h100.flops) == (3.35e12, 989.5e12)
    assert "datasheet" in h100.source


@pytest.mark.parametrize(
    ("name", "near"), [("4099", "RTX 4090"), ("h1000", "H100 SXM"), ("RTX A600", "RTX A6000")]
)
def test_a_misspelt_name_lists_close_matches(name: str, near: str) -> None:
    with pytest.raises(UsageError) as error:
        find_device(name)
    assert error.value.message == f"the catalogue has no device {name!r}"
    assert near in (error.value.remedy or "")


@pytest.mark.parametrize("name", ["", "abacus", "RTX", "NVIDIA GeForce RTX 4090 Laptop GPU", "🦊" * 1000])
def test_unknown_devices_match_no_entry(name: str) -> None:
    with pytest.raises(UsageError):
        find_device(name)


def test_every_row_is_complete_and_plausible() -> None:
    for name in device_names():
        device = find_device(name)
        assert device.name == name
        assert 8e9 - RESERVED_BYTES <= device.memory_bytes <= 300e9
        assert 2e11 < device.bandwidth < 1e13
        assert 2e13 < device.flops < 1e16
        # A row whose two rates are of different devices, or with sparsity counted, falls out of this.
        assert 60 < device.flops / device.bandwidth < 600
        assert math.isfinite(device.flops) and device.source


def test_no_spelling_names_two_devices_and_no_source_is_left_over() -> None:
    content = tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))
    for name, fields in content["devices"].items():
        for spelling in (name, *fields.get("aliases", ())):
            assert find_device(spelling).name == name
    assert {fields["source"] for fields in content["devices"].values()} == set(content["sources"])
    assert list(content["devices"]) == device_names()


@pytest.mark.parametrize(("name", "arch"), [("Tesla T4", 75), ("v100", 70), ("NVIDIA GeForce RTX 2080 Ti", 75)])
def test_gpus_that_are_too_old_are_named_with_their_architecture(name: str, arch: int) -> None:
    with pytest.raises(UsageError, match=f"it is sm_{arch}, and kernels need sm_80 or newer"):
        find_device(name)


def test_every_unsupported_gpu_is_too_old_and_no_supported_one_is() -> None:
    assert all(required_arch(f"sm_{find_device(name).cores.arch}") is None for name in device_names())
    for name, fields in tomllib.loads(CATALOGUE.read_text(encoding="utf-8"))["unsupported"].items():
        assert required_arch(f"sm_{fields['arch']}")
        for spelling in (name, *fields.get("aliases", ())):
            with pytest.raises(UsageError, match="not supported"):
                find_device(spelling)


@pytest.mark.parametrize(
    ("name", "gigahertz"), [("a100", 1.41), ("l40s", 2.49), ("4090", 2.52), ("h100", 1.83), ("a6000", 1.80)]
)
def test_multiprocessors_and_published_rates_imply_boost_clocks(name: str, gigahertz: float) -> None:
    assert find_device(name).cores.clock_hz == pytest.approx(gigahertz * 1e9, rel=0.01)


def test_geforce_cards_sum_in_32_bits_at_half_the_rate() -> None:
    """Whitepapers count 4 operations per cycle and core, and so do rows computed by us."""
    for name, cores, gigahertz in [("3090", 10496, 1.695), ("4090", 16384, 2.52), ("5090", 21760, 2.407)]:
        assert find_device(name).flops == pytest.approx(4 * cores * gigahertz * 1e9, rel=0.01)
