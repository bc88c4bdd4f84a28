"""What the dashboard and the alerts ask for is what a server or the plugin exports: names, labels, and their values."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from stowage.metrics import VLLM
from tests.deploy.conftest import DEPLOY, Exported
from tests.deploy.promql import Selector, selectors

FROM_PROMETHEUS = {"up": {"job", "instance"}}
"""Metrics and labels that Prometheus adds by itself."""
NOT_YET_SEEN = {"status": {"429", "500", "504"}}
"""Values that only trouble brings."""


def expressions() -> dict[str, str]:
    """All PromQL, by where it stands."""
    board = json.loads((DEPLOY / "grafana" / "stowage.json").read_text())
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in board["panels"]
        for target in panel.get("targets", [])
    }
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            found[variable["name"]] = variable["definition"].replace(", instance", "")
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return found | {rule["alert"]: rule["expr"] for group in rules["groups"] for rule in group["rules"]}


def problems(one: Selector, exported: Exported) -> list[str]:
    known = FROM_PROMETHEUS.get(one.name)
    if known is None and one.name not in exported:
        return [f"nobody exports {one.name}"]
    labels = exported.get(one.name, {})
    wrong = [
        f"{one.name} has no label {label}"
        for label, _, _ in one.matchers
        if label not in (known or set()) | labels.keys() | {"instance", "job"}
    ]
    for label, operator, value in one.matchers:
        values = labels.get(label, set()) | NOT_YET_SEEN.get(label, set())
        plain = operator in ("=", "!=") and label in labels
        pattern = operator in ("=~", "!~") and label in labels
        if (plain and value not in values) or (pattern and not any(re.fullmatch(value, one) for one in values)):
            wrong.append(f"{label} of {one.name} is never {value}")
    return wrong


def test_everything_that_is_asked_for_is_exported(exported: Exported) -> None:
    asked = expressions()
    assert len(asked) > 80
    exported = {row.metric: {"engine": {"0"}, "model_name": {"tiny"}} for row in VLLM} | exported
    wrong = {
        where: found
        for where, expression in asked.items()
        if (found := [text for one in selectors(expression) for text in problems(one, exported)])
    }
    assert wrong == {}


def test_every_expression_asks_for_something() -> None:
    assert [where for where, expression in expressions().items() if not selectors(expression)] == []


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ('sum by (tier) (rate(a_total{tier!="disk", job="x"}[5m])) / b', ["a_total", "b"]),
        ("histogram_quantile(0.95, sum by (le) (rate(c_bucket{}[$__rate_interval])))", ["c_bucket"]),
        ('label_values({__name__=~"a|b"})', ["a", "b"]),
        ('increase(d[1h]) > 100000 and e{x="or and sum(q)"} == 0 or vector(0)', ["d", "e"]),
    ],
)
def test_the_reader_of_expressions(expression: str, names: list[str]) -> None:
    assert [one.name for one in selectors(expression)] == names


def test_what_is_wrong_is_found() -> None:
    exported: Exported = {"a": {"tier": {"disk"}}}
    assert problems(Selector("b"), exported) and problems(Selector("a", (("x", "=", "1"),)), exported)
    assert problems(Selector("a", (("tier", "=", "dusk"),)), exported)
    assert problems(Selector("a", (("tier", "=~", "d.+k"), ("instance", "=~", ".*"))), exported) == []
