"""The dashboard and the alerts in `monitoring/`: every metric and label exists in what a server exports."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from localllm.disaggregation.prefill_tier import PrefillTier
from localllm.llm.llm import LLM
from localllm.server.access import make_access_policy
from localllm.server.prometheus import TokenPrice
from tests.server.conftest import serving

MONITORING = Path(__file__).parents[2] / "monitoring"
DASHBOARD = MONITORING / "grafana/dashboards/localllm.json"
ALERTS = MONITORING / "prometheus/localllm-alerts.yml"
METRIC = re.compile(r"\b(?P<name>localllm_\w+|up)(?P<selector>\{[^}]*\})?")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")
LEGEND = re.compile(r"\{\{\s*\$?(?:labels\.)?(\w+)\s*\}\}")
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
KEY = "a-key-of-the-dashboard"
Exported = dict[str, list[dict[str, str]]]  # labels of the samples of each metric


@pytest.fixture(scope="module")
def exported(demo: LLM) -> Exported:
    headers = {"Authorization": f"Bearer {KEY}"}
    access = make_access_policy("127.0.0.1", [KEY])
    with pytest.MonkeyPatch.context() as patch, serving(demo, access, token_price=TokenPrice(1, 2, 1)) as url:
        patch.setattr(demo.parts.caches, "prefill_tier", PrefillTier([], 0))
        body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 4}
        assert httpx2.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
        text = httpx2.get(f"{url}/metrics", headers=headers).text
    found: Exported = {"up": [{}]}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def check_expression(expression: str, exported: Exported) -> set[str]:
    """Return the labels that the metrics of an expression have. Fails if it uses others."""
    names = list(METRIC.finditer(expression))
    assert names, expression
    labels = set(SCRAPED)
    for match in names:
        assert match["name"] in exported, f"{match['name']} in {expression} is not exported"
        own = {label for sample in exported[match["name"]] for label in sample}
        labels |= own
        for label, operator, value in MATCHER.findall(match["selector"] or ""):
            assert label in own | SCRAPED, f"{match['name']} has no label {label}: {expression}"
            if operator == "=" and label in ("event", "device"):
                assert value in {sample[label] for sample in exported[match["name"]]}, expression
    for group in GROUPING.findall(expression):
        assert {label.strip() for label in group.split(",")} <= labels, expression
    return labels


def dashboard_panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def alert_rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    return group["rules"]


def test_dashboard_uses_exported_metrics(exported: Exported) -> None:
    for panel in dashboard_panels():
        assert panel["title"] and panel["description"] and panel["targets"]
        for target in panel["targets"]:
            labels = check_expression(target["expr"], exported)
            assert set(LEGEND.findall(target["legendFormat"])) <= labels, panel["title"]


def test_variables_use_exported_labels(exported: Exported) -> None:
    variables = {each["name"]: each for each in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(t["expr"] for p in dashboard_panels() for t in p["targets"])))
    assert used - {"__rate_interval"} == variables.keys() - {"datasource"}
    for name in variables.keys() - {"datasource"}:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables[name]["query"]["query"]).groups()  # pyright: ignore[reportOptionalMemberAccess]
        assert label in exported[metric][0]


def test_panels_do_not_overlap() -> None:
    cells: set[tuple[int, int]] = set()
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        grid = panel["gridPos"]
        own = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert grid["x"] + grid["w"] <= 24 and not cells & own, panel["title"]
        cells |= own


def test_alerts_use_exported_metrics(exported: Exported) -> None:
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        labels = check_expression(rule["expr"], exported)
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        grouped = GROUPING.search(rule["expr"])
        kept = {label.strip() for label in grouped[1].split(",")} if grouped else labels
        assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= kept, rule["alert"]


def test_a_metric_that_is_gone_is_noticed(exported: Exported) -> None:
    for wrong in ("rate(localllm_gone_total[5m])", 'localllm_running{key="a"}', "sum by (key) (localllm_running)"):
        with pytest.raises(AssertionError):
            check_expression(wrong, exported)


def test_provisioning_files() -> None:
    [provider] = yaml.safe_load((MONITORING / "grafana/provisioning/dashboards/localllm.yml").read_text())[
        "providers"
    ]
    assert provider["type"] == "file" and provider["options"]["path"]
    [source] = yaml.safe_load((MONITORING / "grafana/provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["type"] == "prometheus"
    config = yaml.safe_load((MONITORING / "prometheus/prometheus.yml").read_text())
    [scrape] = config["scrape_configs"]
    assert config["rule_files"] == [ALERTS.name] and scrape["job_name"] == "localllm"


def expressions() -> Iterator[str]:
    for panel in dashboard_panels():
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "5m")


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_accepts_all(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{i}", "expr": expression} for i, expression in enumerate(expressions())]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    for file in (tmp_path / "panels.yml", ALERTS):
        subprocess.run(["promtool", "check", "rules", file], check=True, capture_output=True)
    subprocess.run(
        ["promtool", "check", "config", MONITORING / "prometheus/prometheus.yml"], check=True, capture_output=True
    )
