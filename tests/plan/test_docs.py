import re

from localllm.cli.plan_page import plan_json
from tests.plan.example import PAGE, example, render


def test_the_example_on_the_page_is_what_the_program_prints() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert render(page) == page, "docs/plan.md is stale: run `python -m tests.plan.example`"


def test_every_field_of_json_is_on_the_page() -> None:
    table = PAGE.read_text(encoding="utf-8").split("## --json")[1]
    names = [
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    for name in ("serving", "advice"):  # which the command adds
        names.remove(name)
    assert names == list(plan_json(example()))
