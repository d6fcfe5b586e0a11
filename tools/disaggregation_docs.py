"""Writes to docs/simulate.md where computing prompts apart from answers helps: two replicas against one for each.

    python tools/disaggregation_docs.py [--check]

All numbers come from simulations with the assumptions that the page states. `--check` writes nothing, and exits
with 1 if the page has other numbers.
"""

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from localllm.checkpoint.published import published_header  # noqa: E402 (this tree, installed or not)
from localllm.hardware.catalog import find_device  # noqa: E402
from localllm.plan.fit import LoadOptions  # noqa: E402
from localllm.plan.parallel import ASSUMED_LINK_LATENCY_S, Link  # noqa: E402
from localllm.simulate.fleet import FleetSetup  # noqa: E402
from localllm.simulate.load import Lengths, LoadPlan  # noqa: E402
from localllm.simulate.simulation import Simulated, simulate  # noqa: E402
from localllm.simulate.target import Target, roofline_target  # noqa: E402

PAGE = ROOT / "docs" / "simulate.md"
BEGIN, END = "<!-- prompts apart -->\n", "<!-- end of prompts apart -->"
MODEL, GPU, CONTEXT = "llama3.1:8b-bf16", "h100", 16384
LINKS = (1.25e9, 12.5e9, 450e9)  # bytes per second: 10 and 100 Gbit/s, NVLink
LOADS = (
    (500, (20.0, 60.0, 90.0)),
    (2000, (4.0, 10.0, 16.0)),
    (8000, (0.5, 1.5, 2.5)),
)  # prompt tokens, requests/s
ANSWER, SPREAD, REQUESTS = 200, 0.3, 200
TPOT_S, LEAST_TTFT_S, TTFT_PER_TOKEN_S = 0.015, 0.5, 2.5e-4


def run(target: Target, prompt: int, rate: float, fleet: FleetSetup) -> Simulated:
    load = LoadPlan(
        rate=rate,
        requests=REQUESTS,
        prompt=Lengths(prompt, SPREAD),
        output=Lengths(ANSWER, SPREAD),
        max_len=CONTEXT,
    )
    return simulate(load, replace(target.setup, fleet=fleet), target.cost)


def cell(simulated: Simulated, limits: dict[str, float]) -> tuple[float, str]:
    """Return the share of requests within the limits, and it with the 99th percentile of TPOT as text."""
    share, slowest = simulated.met(limits) / simulated.requests, simulated.percentiles("tpot")[2]
    return share, f"{share:.0%}, {slowest * 1e3:.0f} ms"


def table() -> str:
    header = published_header(MODEL)
    assert header
    target = roofline_target(
        header,
        find_device(GPU),
        LoadOptions(CONTEXT, 1, None, "auto", "auto"),
        name=MODEL,
    )
    together = FleetSetup(2, 2)
    apart = [
        FleetSetup(2, 2, prefill=1, link=Link(rate, ASSUMED_LINK_LATENCY_S), token_bytes=target.token_bytes)
        for rate in LINKS
    ]
    heads = [f"1 + 1, {rate / 1e9:g} GB/s" for rate in LINKS]
    lines = [
        f"| prompt | requests/s | `--replicas 2` | {' | '.join(heads)} |",
        f"|---:|---:|---:|{'---:|' * len(LINKS)}",
    ]
    for prompt, rates in LOADS:
        limits = {"ttft": max(LEAST_TTFT_S, TTFT_PER_TOKEN_S * prompt), "tpot": TPOT_S}
        for rate in rates:
            cells = [cell(run(target, prompt, rate, fleet), limits) for fleet in (together, *apart)]
            best = max(share for share, _ in cells)
            texts = [f"**{text}**" if share == best else text for share, text in cells]
            lines.append(f"| {prompt} | {rate:g} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    before, rest = PAGE.read_text().split(BEGIN)
    old, after = rest.split(END)
    new = table()
    if "--check" in sys.argv:
        return int(old != new)
    PAGE.write_text(f"{before}{BEGIN}{new}{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
