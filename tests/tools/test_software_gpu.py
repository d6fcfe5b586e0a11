"""All Triton kernels run on a GPU made of software, in processes of their own, as this one interprets them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.test_kernel_docs import VERSIONS
from tools.software_gpu import ENGINE, KERNELS, PAGE, PLANTED, QUICK

ROOT = Path(__file__).parents[2]
# Files with tests of kernels, in groups that take about as long.
GROUPS = {
    "attention": ["test_attention.py", "test_latent.py", "test_paged.py", "test_step.py"],
    "products": ["test_small_m.py", "test_quantized_gemm.py", "test_w8a8.py"],
    "experts and others": [
        *("test_experts.py", "test_angles.py", "test_delta_net.py", "test_launch.py", "test_norms.py"),
        *("test_rope_append.py", "test_rope_decode.py", "test_gpu_sampler.py"),
    ],
}
# Kernels that a group must have run; others of its kernels belong to another group.
RAN = {
    "attention": "begin_step combine decode end_step mla per_head_matmul prefill",
    "products": "dequantize quantized_gemm small_m_dense small_m_packed split_k_sum",
    "experts and others": "causal_conv delta_net_chunk delta_net_step draw gated_activation gather_candidates "
    "greedy grouped_matmul levels long_norm mark_history norm peaks rope_angles rope_append rope_decode "
    "weighted_sum",
}


def kernels(group: str) -> set[str]:
    return {f"{name}_kernel" for name in RAN[group].split()}


def software_gpu(*arguments: str) -> set[str]:
    """Run tools/software_gpu.py; return the names of the kernels that ran. Its output has the seed."""
    command = [sys.executable, "tools/software_gpu.py", "--check", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    return set(done.stdout.rpartition("kernels: ")[2].split())


def documented_kernels() -> set[str]:
    """Return the names of all kernels with examples."""
    page = PAGE.read_text(encoding="utf-8").partition("<!-- kernels -->")[2].partition("<!-- end -->")[0]
    return set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))


def kernel_tests() -> list[Path]:
    """Return all files with tests of kernels."""
    paths = [ROOT / path for path in KERNELS]
    return [file for path in paths for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]


def test_every_file_and_kernel_is_in_a_group() -> None:
    assert sorted(name for files in GROUPS.values() for name in files) == sorted(f.name for f in kernel_tests())
    assert set[str]().union(*map(kernels, GROUPS)) == documented_kernels()


@pytest.mark.part_of_slow
@pytest.mark.timeout(900)  # 10 s of CPU time
def test_a_few_kernels() -> None:
    expected = {"combine_kernel", "decode_kernel", "end_step_kernel", "norm_kernel", "small_m_packed_kernel"}
    assert software_gpu("--quick") >= expected


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("triton", [None, *VERSIONS], ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_every_kernel(group: str, triton: Path | None) -> None:
    """With another seed than the table of docs/kernels.md, and starting before the previous kernel has ended."""
    files = [str(file.relative_to(ROOT)) for file in kernel_tests() if file.name in GROUPS[group]]
    version = ["--triton", str(triton)] if triton else []
    assert software_gpu("--seed", "3", "--pdl", "--fewer", *version, *files) >= kernels(group)


@pytest.mark.slow
@pytest.mark.parametrize("triton", [None, *VERSIONS], ids=str)
def test_kernels_are_cached_apart_from_those_that_a_gpu_could_run(
    triton: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here they are compiled to PTX only: machine code of no bytes is nobody else's."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    software_gpu("--quick", *(["--triton", str(triton)] if triton else []))
    assert len(list(tmp_path.rglob("*.ptx"))) >= len(QUICK)
    assert {path.name for path in tmp_path.iterdir()} == {"ptx"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tests", [PLANTED, ENGINE], ids=["faults planted in kernels", "the engine"])
def test_more(tests: str) -> None:
    software_gpu(tests)
