from localllm.hardware.catalog import device_names
from tools.hardware_docs import PAGE, render


def test_the_table_on_the_page_is_the_catalogue() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert render(page) == page, "docs/hardware.md is stale: run `python tools/hardware_docs.py`"
    assert all(page.count(f"\n| {name} |") == 1 for name in device_names())
