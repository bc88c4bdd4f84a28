"""The dashboard is whole: it can be imported, nothing overlaps, and it is what its table says."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest
from deploy.grafana import dashboard

from tests.deploy.conftest import DEPLOY

BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "stowage.json").read_text())
PANELS: list[dict[str, Any]] = BOARD["panels"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


def test_it_is_what_the_table_says() -> None:
    text = (DEPLOY / "grafana" / "stowage.json").read_text()
    assert dashboard.text() == text, "python deploy/grafana/dashboard.py"


def test_its_rows_are_those_that_people_look_for() -> None:
    titles = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert titles == ["What it saved", "Requests", "Device and host", "Disk", "Shared tiers", "Trouble"]


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
    assert names == ["datasource", "instance"]
    assert BOARD["templating"]["list"][0]["type"] == "datasource"
    text = json.dumps(PANELS)
    builtin = ("$__rate_interval", "$__range")
    for name in builtin:
        text = text.replace(name, "")
    assert set(re.findall(r"\$\{?(\w+)", text)) == set(names)
