"""`python tools/software_gpu.py` runs the tests of all Triton kernels on a GPU made of software, which executes
their PTX (tools/ptx), and writes what they reached to docs/kernels.md.

`--check` writes nothing. `--quick` runs each kernel once, `--fewer` leaves out tests of the same opcodes,
`--seed N` schedules threads in another order, `--pdl` starts each kernel before the previous one has ended, as on
sm_90. Other arguments are passed on to pytest, such as tests. Ends with 1 where a kernel exceeds its error bound
or commits a fault: a data race, an access out of bounds or of memory that nothing was written to, or a misaligned
one.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "kernels.md"
MARKS = ("<!-- software gpu -->\n", "<!-- end of software gpu -->")
KERNELS = ["tests/runtime/kernels/gpu", "tests/runtime/test_gpu_sampler.py"]
PLANTED, ENGINE = "tests/tools/ptx/planted_in_kernels.py", "tests/tools/ptx/engine_on_kernels.py"
# Tests that together run each kernel once at small shapes, as expressions of pytest's -k.
QUICK = [
    "test_norms and test_rms_norm and 100 and True and bfloat16",
    "test_norms and test_long_rows and 16385-rms_norm",
    "test_angles and test_they_are_those_of_the_reference",
    "test_step and (4-3 or test_end_hands_the_last_choice_on)",
    "test_attention and test_few_tokens and torch.int8",
    "test_attention and test_many_tokens and torch.float8_e4m3fn",
    "test_attention and test_few_tokens and torch.uint8-torch.bfloat16",
    "test_latent and test_few_tokens and torch.int8",
    "test_small_m and test_packed_weights and int4-64-True-dtype0",
    "test_small_m and test_plain_weights and 16-70-130-dtype0",
    "test_small_m and test_a_norm_between and int4-dtype0",
    "test_quantized_gemm and test_columns_shared_out_are_added_up",
    "test_quantized_gemm and test_every_format_is_unpacked_as_it_is and mxfp4 and not gguf",
    "test_experts and test_packed_experts and 2-mxfp4 and not gguf",
    "test_rope_append and test_heads and normed-torch.bfloat16 and not values",
    "test_rope_decode and test_bits_are_those_of_separate_kernels and normed and gated",
    "test_delta_net and test_single_tokens and 9 and bfloat16",
    "test_delta_net and test_spans and 90 and True",
    "test_delta_net and test_convolution and 39 and True-4-True",
    "test_gpu_sampler and (test_ties_are_kept or test_penalties or test_invalid_tokens_are_reported and [0])",
]
# Cases of grids that execute no opcode of a kernel that the other tests do not, according to the opcodes of each
# test: formats, groups and dtypes that are unpacked alike, and what a host computes. `--fewer` leaves them out.
REPEATS = [
    "test_every_format_is_multiplied and (q4_0 or q4_1 or q5_0 or q5_1 or q2_k or q3_k or q6_k or iq4_xs)",
    "test_every_format_is_multiplied and (gguf or fp8-64 or int4-32 or int4-of or zeros and int8)",
    "test_every_format_is_unpacked_as_it_is and (q5_0 or gguf)",
    "test_quantized_gemm and test_a_row_does_not_depend_on_the_others and 2",
    "test_small_m and test_packed_weights and int4-128",
    "test_small_m and test_plain_weights and (1-33-256 or 2-1-77 and not dtype0 or 16-70-130 and not dtype2)",
    "test_small_m and test_nothing_but_the_sum_is_rounded and int4",
    "test_blocks_with_minimums_and_scales_of_scales and (q4_1 or q2_k)",
    "test_attention and test_no_mask_is_made",
    "test_attention and test_sequences_take_turns_in_a_workspace_of_their_tokens and 67108864",
]
Record = dict[str, Any]


def run(tests: list[str], setting: str) -> tuple[int, list[Record]]:
    """Run tests on the software GPU; return pytest's exit status and a record of each test."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        report.touch()
        environment = os.environ | {"SOFTWARE_GPU": setting, "SOFTWARE_GPU_REPORT": str(report)}
        environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, "-m", "pytest", "-n", "0", *tests]
        done = subprocess.run(command, cwd=ROOT, env=environment)
        return done.returncode, [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]


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
        largest = max(each, key=lambda launch: launch["blocks"] * launch["threads"])
        shapes = ", ".join(largest["shapes"][:3])
        size = f"{largest['blocks']} blocks of {largest['threads']}: {shapes}"
        error = f"{max(errors[kernel]):.2f}" if errors[kernel] else ""
        rows.append(f"| `{kernel}` | {len(each)} | {len(opcodes)} | {size} | {error} | 0 |")
    every = {opcode for each in launches.values() for launch in each for opcode in launch["opcodes"]}
    count = sum(len(each) for each in launches.values())
    summary = f"{len(records)} tests, {count} launches of {len(launches)} kernels, {len(every)} opcodes."
    return "\n".join([summary, "", *rows]) + "\n"


def render(page: str, rows: str) -> str:
    before, rest = page.split(MARKS[0])
    return before + MARKS[0] + rows + MARKS[1] + rest.split(MARKS[1])[1]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    for flag in ("--pdl", "--quick", "--fewer", "--check"):
        parser.add_argument(flag, action="store_true")
    options, rest = parser.parse_known_args(arguments)
    chosen = " or ".join(f"({each})" for each in QUICK)
    tests = [*KERNELS, "-m", "slow or not slow", "-k", chosen] if options.quick else KERNELS
    if options.fewer:
        rest = [*(rest or KERNELS), "-k", f"not ({' or '.join(f'({each})' for each in REPEATS)})"]
    setting = f"{options.seed}{',pdl' if options.pdl else ''}"
    status, records = run(rest or tests, setting)
    if status:
        print(f"failed with SOFTWARE_GPU={setting}")
    elif not options.check:
        PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), table(records)), encoding="utf-8")
    print(f"kernels: {' '.join(sorted({each['kernel'] for record in records for each in record['launches']}))}")
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
