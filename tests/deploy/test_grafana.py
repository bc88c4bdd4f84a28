"""The dashboard is whole: it can be imported, nothing overlaps, and it is what its table says."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from deploy.grafana import dashboard

from stowage import metrics
from tests.deploy.conftest import DEPLOY, succeed
from tests.deploy.promql import selectors

BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "stowage.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


def test_it_is_what_the_table_says() -> None:
    text = (DEPLOY / "grafana" / "stowage.json").read_text()
    assert dashboard.text() == text, "python deploy/grafana/dashboard.py"


def test_its_rows_are_those_that_people_look_for() -> None:
    titles = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert titles == ["What it saved", "Requests", "vLLM", "Device and host", "Disk", "Shared tiers", "Trouble"]


def test_ids_are_unique_and_titles_within_a_row() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    row, seen = "", set()
    for panel in PANELS:
        row = panel["title"] if panel["type"] == "row" else row
        assert (row, panel["title"]) not in seen
        seen.add((row, panel["title"]))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel['id']} {panel['title']}")
def test_each_panel(panel: dict[str, Any]) -> None:
    position = panel["gridPos"]
    assert position["x"] >= 0 and position["w"] > 0 and position["h"] > 0
    assert position["x"] + position["w"] <= COLUMNS
    if panel["type"] == "row":
        return
    assert panel["type"] in ("timeseries", "stat") and panel["title"] and panel["description"]
    assert panel["datasource"] == SOURCE and panel["targets"]
    letters = [target["refId"] for target in panel["targets"]]
    assert len(set(letters)) == len(letters)
    for target in panel["targets"]:
        assert target["datasource"] == SOURCE
        assert 'instance=~"$instance"' in target["expr"] and "{}" not in target["expr"]
        assert target["instant"] != target["range"]


def test_no_panel_lies_on_another() -> None:
    def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
        return (
            one["x"] < other["x"] + other["w"]
            and other["x"] < one["x"] + one["w"]
            and one["y"] < other["y"] + other["h"]
            and other["y"] < one["y"] + one["h"]
        )

    pairs = combinations(PANELS, 2)
    assert [(a["title"], b["title"]) for a, b in pairs if overlap(a["gridPos"], b["gridPos"])] == []


def test_variables_are_those_that_are_used() -> None:
    names = [variable["name"] for variable in BOARD["templating"]["list"]]
    assert names == ["datasource", "instance", "split"]
    assert BOARD["templating"]["list"][0]["type"] == "datasource"
    text = json.dumps(PANELS)
    builtin = ("$__rate_interval", "$__range")
    for name in builtin:
        text = text.replace(name, "")
    assert set(re.findall(r"\$\{?(\w+)", text)) == set(names)


def test_series_can_be_split_by_engine() -> None:
    """Wherever vLLM's engines have numbers of their own; and each shows which one it is."""
    of_vllm = {row.metric for row in (*metrics.VLLM, *metrics.STORE, *metrics.TIER)} - {"stowage_chunk_lookups_total"}
    of_vllm |= {"stowage_chunk_hits_total", "stowage_host_slab_used_bytes"}
    for panel in PANELS:
        for target in panel.get("targets", []) if panel["type"] == "timeseries" else []:
            named = {one.name for one in selectors(target["expr"])}
            by_engine = "$split" in target["expr"]
            assert by_engine == ("{{engine}}" in target["legendFormat"])
            assert by_engine or not named & of_vllm or "{{instance}}" in target["legendFormat"], panel["title"]


def test_each_query_is_one_that_prometheus_takes(promtool: str, tmp_path: Path) -> None:
    """However the series are split."""
    rules = []
    for label in dashboard.SPLITS.values():
        values = {"$__rate_interval": "5m", "$__range": "3h", "$instance": ".*", "$split": label}
        for number, target in enumerate(target for panel in PANELS for target in panel.get("targets", [])):
            query = target["expr"]
            for name, value in values.items():
                query = query.replace(name, value)
            rules.append({"record": f"{label}:query{number}", "expr": query})
    assert len(rules) > 200
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    succeed(promtool, "check", "rules", "queries.yml", where=tmp_path)
