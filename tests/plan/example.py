"""Writes the worked example into docs/plan.md (`python -m tests.plan.example`); a test fails if it is stale."""

import re
from pathlib import Path

from localllm.cli.plan_page import format_plan
from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.plan.plan import Plan, plan_model
from tests.plan.published import LLAMA_70B, header_of

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
SECTION = re.compile(r"(<!-- example -->\n).*?(<!-- end -->)", re.DOTALL)


def example() -> Plan:
    wish = LoadOptions(context=4096, quant="int4")
    return plan_model(header_of(LLAMA_70B), find_device("h100"), wish, name="Llama 3.1 70B")


def render(page: str) -> str:
    return SECTION.sub(lambda m: f"{m[1]}```text\n{format_plan(example())}\n```\n{m[2]}", page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
