"""`python tools/software_gpu.py` runs the tests of all Triton kernels, slow ones included, on a GPU made of
software, which executes their PTX (tools/ptx), and writes what they reached to docs/kernels.md. Nothing else runs
all of them: tests/tools/test_software_gpu.py runs `--fewer`, with another seed and `--pdl`.

`--check` writes nothing. `--quick` runs a few kernels once. `--fewer` leaves out tests that execute no opcode of a
kernel which the others do not, most of the slow ones among them; a run of all names opcodes that are missing then.
`--seed N` schedules threads in another order, `--pdl` starts each kernel before the previous one has ended, as on
sm_90. `--triton FOLDER` compiles with the Triton that is installed there (`make triton`). Other arguments are
passed on to pytest, such as tests. Ends with 1 where a kernel exceeds its error bound or commits a fault: a data
race, an access out of bounds or of memory that nothing was written to, or a misaligned one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "kernels.md"
MARKS = ("<!-- software gpu -->\n", "<!-- end of software gpu -->")
KERNELS = ["tests/runtime/kernels/gpu", "tests/runtime/test_gpu_sampler.py"]
PLANTED, ENGINE = "tests/tools/ptx/planted_in_kernels.py", "tests/tools/ptx/engine_on_kernels.py"
# Tests of what goes wrong in kernels, as files and expressions of pytest's -k: sums across warps; copies in
# flight, assembly and tensor cores; keys and values in blocks, and parts that another kernel combines; a step's
# state.
FOLDER = "tests/runtime/kernels/gpu"
QUICK = {
    f"{FOLDER}/test_norms.py": "test_rms_norm and 100 and True and bfloat16",
    f"{FOLDER}/test_small_m.py": "test_packed_weights and int4-64-True-dtype0",
    f"{FOLDER}/test_attention.py": "test_few_tokens and torch.int8-torch.bfloat16",
    f"{FOLDER}/test_step.py": "test_end_hands_the_last_choice_on",
}
# Cases of grids that execute no opcode of a kernel that the other tests do not, according to the opcodes of each
# test: formats, groups and dtypes that are unpacked alike, and what a host computes. `--fewer` leaves them out.
REPEATS = [
    "test_every_format_is_multiplied and (q4_0 or q4_1 or q5_0 or q5_1 or q2_k or q3_k or q6_k or iq4_xs)",
    "test_every_format_is_multiplied and (gguf or fp8-64 or int4-32 or int4-of or zeros and int8)",
    "test_every_format_is_unpacked_as_it_is and (q5_0 or gguf)",
    "test_quantized_gemm and test_a_row_does_not_depend_on_the_others and 2",
    "test_small_m and test_packed_weights and int4-128",
    "test_small_m and test_plain_weights and (1-33-256 or 2-1-77 and not dtype0 or 16-70-130 and dtype1)",
    "test_small_m and test_nothing_but_the_sum_is_rounded and int4",
    "test_blocks_with_minimums_and_scales_of_scales and (q4_1 or q2_k)",
    "test_attention and test_no_mask_is_made",
    "test_attention and test_sequences_take_turns_in_a_workspace_of_their_tokens and 67108864",
]
# Slow cases that execute opcodes of a kernel which no quick one does, a few for all of them; `--fewer` runs them.
SLOW = [
    "test_every_format_is_unpacked_as_it_is and (int8 and row or int4 and zeros or q4_0)",
    "test_attention and test_few_tokens and (256 or uint8 or int8 and sinks or 130)",
    "test_plain_experts and 16",
    "test_packed_experts and (2-q4_k-dtype0 or 17-int4-dtype0)",
    "test_heads and normed and gated and float32",
    "test_bits_are_those_of_separate_kernels and growing",
    "test_bits_over_a_quantized_cache and (fp8-128 or int4-128 or int8-wide)",
    "test_epilogues_of_a_product and (plain-gelu-dtype2 or int4-swiglu_clamped-dtype1)",
    "test_small_m and test_packed_weights and (int4-None-True-dtype1 or 4-64-True-dtype0 or 8-128-True-dtype0)",
    "test_a_norm_between_two_products_needs_no_kernel and plain-dtype0",
    "test_products_are_those_of_the_reference and 17-80-200-dtype2",
    "test_draws_follow_the_distribution",
]
Record = dict[str, Any]


def any_of(expressions: Iterable[str]) -> str:
    return " or ".join(f"({each})" for each in expressions)


FEWER = ["-k", f"not ({any_of(REPEATS)}) and (not slow or {any_of(SLOW)})"]


def pytest(arguments: list[str], environment: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in environment.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "slow or not slow", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, **options)


def run(tests: list[str], setting: str, triton: str | None) -> tuple[int, list[Record]]:
    """Run tests on the software GPU; return pytest's exit status and a record of each test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        report.touch()
        environment = os.environ | {"SOFTWARE_GPU": setting, "SOFTWARE_GPU_REPORT": str(report)}
        if triton:
            environment |= {"PYTHONPATH": triton}
        done = pytest(tests, environment)
        return done.returncode, [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]


def collected(arguments: list[str]) -> set[str]:
    """Return the ids of the tests that pytest would run."""
    done = pytest(
        [*KERNELS, *arguments, "-q", "--collect-only"], dict(os.environ), capture_output=True, check=True
    )
    return set(done.stdout.splitlines())


def table(records: list[Record]) -> str:
    """Return a row per kernel."""
    launches: dict[str, list[Record]] = defaultdict(list)
    errors: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for launch in record["launches"]:
            launches[launch["kernel"]].append(launch)
        for kernel in {launch["kernel"] for launch in record["launches"]}:
            errors[kernel] += [error for _, error in record["errors"]]
    head = ["kernel", "launches", "opcodes", "largest launch", "error / bound", "faults"]
    rows = ["| " + " | ".join(head) + " |", "| --- | ---: | ---: | --- | ---: | ---: |"]
    for kernel, each in sorted(launches.items()):
        opcodes = set[str]().union(*(launch["opcodes"] for launch in each))
        largest = max(each, key=lambda launch: (launch["blocks"] * launch["threads"], launch["shapes"]))
        shapes = ", ".join(largest["shapes"][:3])
        size = f"{largest['blocks']} blocks of {largest['threads']}: {shapes}"
        error = f"{max(errors[kernel]):.2f}" if errors[kernel] else ""
        rows.append(f"| `{kernel}` | {len(each)} | {len(opcodes)} | {size} | {error} | 0 |")
    every = {opcode for each in launches.values() for launch in each for opcode in launch["opcodes"]}
    count = sum(len(each) for each in launches.values())
    ids = collected(FEWER)
    fewer = [record for record in records if record["test"] in ids]
    pairs, reached = opcodes_of_kernels(records), opcodes_of_kernels(fewer)
    if pairs - reached:
        print(f"executed by no test of --fewer: {sorted(pairs - reached)}")
    summary = [
        f"{len(records)} tests, {count} launches of {len(launches)} kernels, {len(every)} opcodes. "
        f"`--fewer` runs {len(fewer)} of the tests, in which",
        f"{len(reached)} of {len(pairs)} pairs of a kernel and an opcode occur.",
    ]
    return "\n".join([*summary, "", *rows]) + "\n"


def opcodes_of_kernels(records: list[Record]) -> set[tuple[str, str]]:
    launches = [launch for record in records for launch in record["launches"]]
    return {(launch["kernel"], opcode) for launch in launches for opcode in launch["opcodes"]}


def render(page: str, rows: str) -> str:
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + rows + MARKS[1] + rest.split(MARKS[1])[1]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--triton")
    for flag in ("--pdl", "--quick", "--fewer", "--check"):
        parser.add_argument(flag, action="store_true")
    options, rest = parser.parse_known_args(arguments)
    chosen = any_of(QUICK.values())
    tests = [*QUICK, "-k", chosen] if options.quick else KERNELS
    if options.fewer:
        rest = [*(rest or KERNELS), *FEWER]
    setting = f"{options.seed}{',pdl' if options.pdl else ''}"
    status, records = run(rest or tests, setting, options.triton)
    if status:
        print(f"failed with SOFTWARE_GPU={setting}")
    elif not options.check:
        PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), table(records)), encoding="utf-8")
    print(f"kernels: {' '.join(sorted({each['kernel'] for record in records for each in record['launches']}))}")
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
