"""Writes `stowage.json`, the Grafana dashboard, from `panels.txt`: ``python deploy/grafana/dashboard.py``.

Change the table, not the JSON: a test holds the two together, and every metric against what a server exports.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("panels.txt")
TARGET = Path(__file__).with_name("stowage.json")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
SPLIT = "$split"
SPLITS = {"all together": "together", "by server": "instance", "by engine": "engine"}
"""No series has a label `together`."""
CHOSEN = 'instance=~"$instance"'


@dataclass
class Panel:
    """One entry of the table. `queries`: PromQL and its legend."""

    title: str
    kind: str
    width: int
    height: int
    unit: str
    about: str
    queries: list[tuple[str, str]] = field(default_factory=list)


def rows() -> dict[str, list[Panel]]:
    """The table: panels by row."""
    found: dict[str, list[Panel]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            found[line[3:]] = []
        elif line.startswith("    "):
            query, _, legend = line.strip().partition(" -> ")
            list(found.values())[-1][-1].queries.append((query, legend))
        elif line and not line.startswith("#"):
            title, look, about = line.split(" | ")
            kind, size, unit = look.split()
            width, height = map(int, size.split("x"))
            list(found.values())[-1].append(Panel(title, kind, width, height, unit, about))
    return found


def scoped(query: str) -> str:
    """The query for the chosen servers: in every selector."""
    return re.sub(r"\{(?!\{)([^}]*)\}", lambda found: "{" + ", ".join(filter(None, (CHOSEN, found[1]))) + "}", query)


def legend_of(query: str, legend: str) -> str:
    """With what the series are split by, where they are; empty labels show nothing."""
    return (legend + " {{instance}} {{engine}}" if SPLIT in query else legend) or "__auto"


def look(one: Panel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Defaults of the fields, and options."""
    defaults: dict[str, Any] = {"unit": one.unit, "min": 0}
    if one.kind in ("line", "area"):
        stacking = {"mode": "normal" if one.kind == "area" else "none"}
        opacity = 25 if one.kind == "area" else 5
        defaults["custom"] = {"fillOpacity": opacity, "stacking": stacking, "showPoints": "never"}
        return defaults, {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if one.kind == "trouble":
        steps = [{"color": "green", "value": None}, {"color": "red", "value": 1}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    color = "background" if one.kind == "trouble" else "value"
    return defaults, {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": color}


def panel(one: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    defaults, options = look(one)
    series = one.kind in ("line", "area")
    targets = [
        {
            "datasource": SOURCE,
            "expr": scoped(query),
            "legendFormat": legend_of(query, legend),
            "refId": chr(ord("A") + place),
            "instant": not series,
            "range": series,
        }
        for place, (query, legend) in enumerate(one.queries)
    ]
    return {
        "id": number,
        "type": "timeseries" if series else "stat",
        "title": one.title,
        "description": one.about,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": one.width, "h": one.height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def panels() -> list[dict[str, Any]]:
    """Row after row, each from left to right."""
    placed: list[dict[str, Any]] = []
    y = 0
    for title, row in rows().items():
        head = {"id": len(placed) + 1, "type": "row", "title": title, "collapsed": False, "panels": []}
        placed.append(head | {"gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})
        y += 1
        x = tallest = 0
        for one in row:
            if x + one.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            placed.append(panel(one, len(placed) + 1, x, y))
            x, tallest = x + one.width, max(tallest, one.height)
        y += tallest
    return placed


def variables() -> list[dict[str, Any]]:
    instances = 'label_values({__name__=~"stowage_choices_limit|stowage_requests_total"}, instance)'
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    server = {"name": "instance", "label": "Server", "type": "query", "datasource": SOURCE, "definition": instances}
    asked = {"query": {"query": instances, "refId": "instances"}, "refresh": 2}
    many = {"includeAll": True, "multi": True, "allValue": ".*"}
    options = [{"text": text, "value": label, "selected": label == "together"} for text, label in SPLITS.items()]
    split = {
        "name": SPLIT[1:],
        "label": "Series",
        "type": "custom",
        "query": ", ".join(f"{text} : {label}" for text, label in SPLITS.items()),
        "options": options,
        "current": options[0],
    }
    return [
        {**source, "current": {}, "hide": 0},
        {**server, **asked, **many, "current": {}, "hide": 0},
        {**split, "hide": 0},
    ]


def dashboard() -> dict[str, Any]:
    return {
        "uid": "stowage",
        "title": "Stowage",
        "description": "What Stowage servers hold, what that saved, and what troubles them.",
        "tags": ["stowage"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": panels(),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
