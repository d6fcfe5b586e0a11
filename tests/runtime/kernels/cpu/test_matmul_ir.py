"""Products by every instruction that multiplies bytes: exact at their extremes, and the same bits from all.

Variants that this processor lacks are left out, and those of ARM run in an emulator where there is one
(`test_arm.py`); the report of the run says which ran.
"""

import re
from dataclasses import replace

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.hardware import processor
from localllm.quant.tensor import QuantizedTensor
from localllm.runtime.kernels.cpu import matmul_ir, quantized_matmul
from localllm.runtime.kernels.cpu.compile import (
    CompiledKernel,
    KernelSource,
    compile_llvm,
    emit_llvm,
    llvm_target,
    optimize,
)
from localllm.runtime.kernels.cpu.ir import INT, Program, vector_type
from localllm.runtime.kernels.cpu.layout import InterleavedLayout
from localllm.runtime.kernels.cpu.matmul_ir import SplitFormat
from tests.quant.formats.test_interleaved import blocks, integers
from tests.runtime.kernels.cpu.test_quantized_matmul import laned

X86 = ("avx512vnni", "avxvnni", "avx512bw", "avx2", "generic")
EXTREMES = np.array([-128, -127, -1, 0, 1, 126, 127], np.int8)


@pytest.fixture(params=X86)
def variant(request: pytest.FixtureRequest) -> str:
    """A variant that this processor supports."""
    features = processor.features()
    needed = processor.BYTE_PRODUCTS[request.param]
    if not all(features.get(feature) for feature in needed):
        pytest.skip(f"the processor lacks {' '.join(needed)}")
    return request.param


def compiled(variant: str, write, count: int) -> CompiledKernel:
    source = KernelSource(write, "test", count)
    return CompiledKernel(source, compile_llvm(emit_llvm(source, variant)))


def words(a: np.ndarray) -> int:
    return a.ctypes.data


def all_pairs(codes: np.ndarray, count: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Codes and signed bytes [count, 64]: extreme values first, then random ones."""
    a = generator.choice(codes, (count, 64))
    b = np.where(np.arange(count)[:, None] < count // 2, generator.choice(EXTREMES, (count, 64)), 0).astype(
        np.int8
    )
    b[count // 2 :] = generator.integers(-128, 128, b[count // 2 :].shape)
    a[0], b[0] = codes[-1], -128
    a[1], b[1] = codes[-1], 127
    a[2], b[2] = codes[0], -128
    return a, b


@pytest.mark.parametrize("bits", matmul_ir.PAIRS_OF_16_BITS)
def test_four_products_of_bytes_are_exact(variant: str, bits: int) -> None:
    generator, count = np.random.default_rng(0), matmul_ir.PAIRS_OF_16_BITS[bits]
    signed = variant == "dotprod"
    codes = np.arange(-128, 128).astype(np.int8) if signed else np.arange(256).astype(np.uint8)
    if variant not in matmul_ir.FOUR_BYTES:
        codes = np.arange(2**bits).astype(np.uint8)  # what they are made for: so many pairs in 16 bits
    a, b = all_pairs(codes, 64 * count, generator)

    def write(p: Program) -> None:
        x, y, out = p.load_addresses(3)
        with p.loop(p.index_constant(0), p.index_constant(64)) as at:
            total, shorts = p.vector(0, INT), []
            for i in range(count):
                offset = (at * count + i) * 64
                u, s = (p.load(vector_type(INT), p.address(v, offset)) for v in (x, y))
                if p.multiplies_four_bytes:
                    total = p.dot_bytes(total, u, s)
                else:
                    shorts.append(p.dot_byte_pairs(u, s))
            if shorts:
                total = p.dot_pairs(matmul_ir.sum_values(shorts), p.as_shorts(p.vector(0x00010001, INT)))
            p.store(total, out, at * 64)

    found = np.zeros((64, 16), np.int32)
    compiled(variant, write, 3).run_single(words(a), words(b), words(found))
    products = (a.astype(np.int64) * b).reshape(64, count, 16, 4)
    assert (found == products.sum((1, 3))).all()


def test_pairs_of_words_are_exact(variant: str) -> None:
    """Multiplies bytes of -128 .. 127 by values of two planes."""
    generator = np.random.default_rng(1)
    codes = generator.choice(np.concatenate([EXTREMES, generator.integers(-128, 128, 9)]), (64, 64)).astype(
        np.int8
    )
    top = matmul_ir.BYTE_MAX * 256
    x = generator.integers(-top - 128, top + 128, (64, 64)).astype(np.int16)
    codes[0], x[0] = -128, -top - 128
    codes[1], x[1] = -128, top + 127

    def write(p: Program) -> None:
        w, y, out = p.load_addresses(3)
        with p.loop(p.index_constant(0), p.index_constant(64)) as at:
            total = p.vector(0, INT)
            codes_read = p.load(vector_type(INT), w, at * 64)
            for half in range(2):
                shorts = p.extend_bytes(codes_read, half)
                word = p.load(vector_type(INT), p.address(y, at * 128), 64 * half)
                total = total + p.dot_pairs(shorts, p.as_shorts(word))
            p.store(total, out, at * 64)

    found = np.zeros((64, 16), np.int32)
    order = np.ascontiguousarray(np.stack((x[:, 0::2], x[:, 1::2]), 1))
    compiled(variant, write, 3).run_single(words(codes), words(order), words(found))
    expected = (codes.astype(np.int64) * x).reshape(64, 16, 4).sum(2)
    assert (found == expected).all()


def product(variant: str, x: Tensor, weight: QuantizedTensor, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        target = processor.kernel_target()._replace(byte_product=variant)
        patch.setattr(processor, "kernel_target", lambda: target)
        patch.setattr(processor, "byte_product", lambda _: variant)
        for kernels in (quantized_matmul.compile_matmul, quantized_matmul.compile_split):
            patch.setattr(kernels, "compiled_kernels", {})
        return quantized_matmul.matmul_integers(x, weight)


def weights(form: str) -> QuantizedTensor:
    """Weights in a format of GGUF, or in INT4 or INT8 with extreme codes in every group."""
    if form in ("int4", "int8"):
        weight = integers(form, 21, 640, 64, zeros=True)
        q = weight.parts["q"].clone()
        q[:, ::9] = -128 if form == "int8" else 0xFF
        q[:, 1::9] = 127 if form == "int8" else 0
        return QuantizedTensor(form, weight.shape, weight.parts | {"q": q}, weight.group)
    return blocks(form, 37, 1280)


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["q4_0", "q4_1", "q2_k", "q4_k", "q6_k", "q8_0", "int4", "int8"])
def test_products_have_the_same_bits(
    variant: str, form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = laned(weights(form))
    for rows in (1, 5, 13):  # with 13, codes are unpacked in chunks of 512 columns
        x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
        x[0, ::7], x[-1, ::5] = x.abs().max(), -x.abs().max()  # bytes of 127 and of -128
        expected = product("generic", x, weight, monkeypatch)
        exact = x.double() @ laned_numbers(weight).T
        assert (expected.double() - exact).abs().max() <= 2.0**-7 * exact.abs().max()
        assert torch.equal(product(variant, x, weight, monkeypatch), expected)
        assert torch.equal(product(variant, x[-1:], weight, monkeypatch), expected[-1:])


@pytest.mark.parametrize("form", ["q4_0", "q4_k", "q6_k", "q8_0", "int4", "int8"])
def test_products_of_8_bit_activations_have_the_same_bits(
    variant: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = replace(laned(weights(form)), activation_bits=8)
    for rows in (1, 5, 13):
        x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows))
        x[0, ::7], x[-1, ::5] = x.abs().max(), -x.abs().max()
        expected = product("generic", x, weight, monkeypatch)
        exact = x.double() @ laned_numbers(weight).T
        assert (expected.double() - exact).abs().max() <= 2.0**-5 * exact.abs().max()
        assert torch.equal(product(variant, x, weight, monkeypatch), expected)
        assert torch.equal(product(variant, x[-1:], weight, monkeypatch), expected[-1:])


def laned_numbers(weight: QuantizedTensor) -> Tensor:
    from localllm.quant.formats import interleaved

    return interleaved.dequantize(weight, torch.float64)


MACHINES = {  # triple, processor, features; what multiplies codes of 4 and of 8 bits
    "avx512vnni": ("x86_64-linux", "icelake-server", "", "vpdpbusd", "vpdpbusd"),
    "avxvnni": ("x86_64-linux", "alderlake", "", "vpdpbusd", "vpdpbusd"),
    "avx512bw": ("x86_64-linux", "skylake-avx512", "", "vpmaddubsw", "vpmaddwd"),
    "avx2": ("x86_64-linux", "haswell", "", "vpmaddubsw", "vpmaddwd"),
    "i8mm": ("aarch64-linux", "neoverse-v1", "", "sdot", "sdot"),
    "dotprod": ("aarch64-linux", "neoverse-n1", "", "sdot", "sdot"),
    "generic": ("aarch64-linux", "cortex-a53", "", "mla", "mlal"),
}


@pytest.mark.parametrize("form", ["q4_k", "q8_0"])
@pytest.mark.parametrize("name", MACHINES)
def test_programs_compile_for_processors_of_each_variant(name: str, form: str) -> None:
    triple, cpu, features, four, eight = MACHINES[name]
    layout = InterleavedLayout.from_weight(laned(blocks(form, 16, 256)))
    program = Program("multiply", name)
    split = SplitFormat.for_processor(name, layout.bits, 2, 1)
    matmul_ir.emit_matmul(program, layout, split, 1, torch.bfloat16, unpack=False)
    assembly = assembled(program, triple, cpu, features)
    assert (four if form == "q4_k" else eight) in assembly


@pytest.mark.parametrize("form", ["q4_k", "q6_k", "q8_0"])
def test_two_rows_are_multiplied_as_matrices_of_bytes(form: str) -> None:
    layout = InterleavedLayout.from_weight(laned(blocks(form, 16, 256)))
    program, split = Program("multiply", "i8mm"), SplitFormat.for_processor("i8mm", layout.bits, 2, 2)
    matmul_ir.emit_matmul(program, layout, split, 2, torch.float32, unpack=False)
    assembly = assembled(program, "aarch64-linux", "neoverse-v1", "")
    # Each multiplies eight columns of two rows: eight for the 16 rows of a tile, in each of two planes.
    assert assembly.count("smmla") == 2 * 8 * layout.step_columns // 8
    assert "sdot" not in assembly


@pytest.mark.parametrize("unpack", [False, True])
@pytest.mark.parametrize("form", ["q4_0", "q4_k", "q8_0", "q6_k"])
def test_products_of_several_rows_stay_in_the_registers_of_avx2(form: str, unpack: bool) -> None:
    layout = InterleavedLayout.from_weight(laned(blocks(form, 16, 256)))
    program = Program("multiply", "avx2")
    split = SplitFormat.for_processor("avx2", layout.bits, 2, 4)
    matmul_ir.emit_matmul(program, layout, split, 4, torch.float32, unpack=unpack)
    assembly = assembled(program, "x86_64-linux", "haswell", "")
    body = max(re.split(r"^\.LBB.*:", assembly, flags=re.MULTILINE), key=len).splitlines()
    spills = [line for line in body if re.search(r"ymm\d+, -?\d*\(%r[sb]p\)", line)]
    assert sum("vpmaddwd" in line for line in body) >= 64
    assert len(spills) < len(body) / 20  # float sums, once per group; a tenth was spilled before


def assembled(program: Program, triple: str, cpu: str, features: str) -> str:
    llvm_target()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3)
    module = llvm.parse_assembly(program.to_llvm())
    optimize(module, machine)
    return machine.emit_assembly(module)
