"""Compiled machine code is reused by the next process, and only if intact."""

from pathlib import Path

import pytest
import torch

from localllm.runtime.kernels.cpu import compile, matmul_ir
from localllm.runtime.kernels.cpu import compile as compiling
from localllm.runtime.kernels.cpu.compile import CompiledKernel, KernelSource, machine_code


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "localllm" / "kernels"


def planes() -> list[int]:
    """Output of the compiled split kernel for one row."""
    split = matmul_ir.SplitFormat.for_processor("avx512vnni", 4, 2, 1)
    source = KernelSource(lambda p: matmul_ir.emit_split(p, torch.float32, 16, split), "split", 6)
    program = CompiledKernel(source, machine_code(source, (torch.float32, 16, split)))
    x = torch.linspace(-1, 1, 16)
    bytes_, records = torch.zeros(32, dtype=torch.int8), torch.zeros(16, dtype=torch.int8)
    program.run_single(x.data_ptr(), bytes_.data_ptr(), records.data_ptr(), 1, 1, 1)
    return [*bytes_.tolist(), *records.tolist()]


def test_compiled_kernels_are_reused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = planes()
    [file] = home.iterdir()

    def refuse(*_: object) -> None:
        raise AssertionError("it is emitted again")

    monkeypatch.setattr(compiling, "emit_llvm", refuse)
    assert planes() == expected
    monkeypatch.setattr(compiling, "emitters_digest", lambda: "of changed code")
    with pytest.raises(AssertionError, match="emitted again"):
        planes()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home.parents[1]))
    file.unlink()
    monkeypatch.setattr(compiling, "emit_llvm", refuse)
    with pytest.raises(AssertionError, match="emitted again"):
        planes()


@pytest.mark.parametrize(
    "damage", [lambda whole: whole[:-100], lambda whole: b"", lambda whole: bytes(len(whole))]
)
def test_damaged_kernels_are_compiled_again(home: Path, damage) -> None:
    expected = planes()
    [file] = home.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert planes() == expected
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_done_without(home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("no folder")
    assert len(planes()) == 48


def test_other_processors_have_code_of_their_own(home: Path) -> None:
    compile.write_cached(("text", "one"), b"code")
    assert compile.read_cached(("text", "one")) == b"code"
    assert compile.read_cached(("text", "other")) is None


def test_shipped_kernels_are_not_compiled(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, shipped = planes(), tmp_path / "shipped"
    home.rename(shipped)
    monkeypatch.setattr(compile, "SHIPPED_KERNELS", shipped)
    monkeypatch.setattr(compile, "compile_llvm", lambda text: pytest.fail("a shipped kernel is compiled"))
    assert planes() == expected
    assert not home.exists()
