"""Every tile that the tuner tries can be launched, on every architecture that kernels run on."""

import pytest
import torch

from localllm.runtime.kernels.gpu.launch import Gpu, meta_packed_weight, meta_tensor, record_launches
from tools import tune


@pytest.mark.parametrize("kind", tune.KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(128_256, 2048), (2048, 8192), (151_936, 5120)])
def test_every_candidate_can_be_launched(kind: str, rows: int, columns: int) -> None:
    x = meta_tensor(1, columns)
    packed = kind in tune.GROUPS
    weight = meta_packed_weight(kind, rows, columns, tune.GROUPS[kind]) if packed else meta_tensor(rows, columns)
    tiles = list(tune.candidates(kind, rows))
    with record_launches(Gpu(90, 132)) as launches:
        for tile in tiles:
            tune.multiply(x, weight, tile)
    assert len(launches) == len(tiles)
    few_rows = rows < 16_384
    assert ({tile.splits for tile in tiles} >= {1, 2}) or not few_rows


@pytest.mark.parametrize("arch", [80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_every_architecture_is_measured(arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """As where there is such a GPU, whose times are not measured here."""
    compiled: list[tuple[str, int, int]] = []
    file = tmp_path / "tiles.toml"
    file.write_text(tune.TILES_PATH.read_text())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "gpu_of", lambda device: Gpu(arch, 100))
    monkeypatch.setattr(tune, "compile_candidates", lambda gpu, cases, tokens: compiled.extend(cases))
    monkeypatch.setattr(tune, "best", lambda *shape: (tune.Tile(64, 2, 3, 1), 10.0))
    monkeypatch.setattr(tune, "TILES_PATH", file)
    monkeypatch.setattr("sys.argv", ["tune.py", "--rows", "64", "--columns", "128", "--kind", "int4"])
    assert tune.main() == 0
    assert f"arch = {arch}\n" in file.read_text()
    assert compiled == [("int4", 64, 128)]
