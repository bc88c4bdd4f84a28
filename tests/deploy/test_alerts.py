"""The alerts are rules that Prometheus takes; each fires when it should, and not while all is well, and is explained.

With `promtool`, where it is installed (Debian: it comes with the package prometheus).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.conftest import DEPLOY, ROOT, succeed

PROMETHEUS = DEPLOY / "prometheus"
RULES: list[dict[str, Any]] = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
NAMES = [rule["alert"] for rule in RULES]
SERVER = 'instance="s:8000", job="stowage"'

WELL = {
    f"up{{{SERVER}}}": "1x200",
    f'stowage_http_requests_total{{{SERVER}, route="/v1/completions", status="200"}}': "0+60x200",
    f'stowage_http_requests_total{{{SERVER}, route="/v1/completions", status="429"}}': "3x200",
    f'stowage_http_requests_total{{{SERVER}, route="/v1/completions", status="500"}}': "2x200",
    f'stowage_http_requests_total{{{SERVER}, route="/v1/completions", status="504"}}': "1x200",
    f"stowage_choices_open{{{SERVER}}}": "20x200",
    f"stowage_choices_limit{{{SERVER}}}": "144x200",
    f'stowage_time_to_first_token_seconds_bucket{{{SERVER}, route="/v1/completions", le="1"}}': "0+60x200",
    f'stowage_time_to_first_token_seconds_bucket{{{SERVER}, route="/v1/completions", le="30"}}': "0+60x200",
    f'stowage_time_to_first_token_seconds_bucket{{{SERVER}, route="/v1/completions", le="+Inf"}}': "0+60x200",
    f'stowage_tier_faults_total{{{SERVER}, tier="disk"}}': "0x200",
    f'stowage_tier_corrupt_chunks_total{{{SERVER}, tier="disk"}}': "4x200",
    f'stowage_tier_unreadable_segments_total{{{SERVER}, tier="disk"}}': "0x200",
    f'stowage_tier_stat{{{SERVER}, tier="valkey", stat="unreadable"}}': "0x200",
    f'stowage_tier_stat{{{SERVER}, tier="valkey", stat="healthy"}}': "1x200",
    f'stowage_tier_breaker_state{{{SERVER}, tier="disk", state="closed"}}': "1x20 0 1x200",
    f'stowage_tier_read_errors_total{{{SERVER}, tier="disk"}}': "7x200",
    f'stowage_tier_write_errors_total{{{SERVER}, tier="disk"}}': "0x200",
    f'stowage_tier_timed_out_chunks_total{{{SERVER}, tier="disk"}}': "5x200",
    f'stowage_tier_disk_full_total{{{SERVER}, tier="disk"}}': "1x200",
    f'stowage_tier_no_room_total{{{SERVER}, tier="disk"}}': "1x200",
    f"stowage_host_chunks_no_room_total{{{SERVER}}}": "9x200",
    f"stowage_chunks_stored_total{{{SERVER}}}": "0+600x200",
    f"stowage_chunk_spills_dropped_total{{{SERVER}}}": "0+6x200",
    f"stowage_preemptions_total{{{SERVER}}}": "0+1x200",
    f"stowage_prompt_tokens_computed_total{{{SERVER}}}": "0+20000x200",
    f"stowage_tokens_reused_total{{{SERVER}}}": "0+20000x200",
    f"process_open_fds{{{SERVER}}}": "90x200",
    f"process_max_fds{{{SERVER}}}": "1024x200",
}
"""An hour of a server that is well: what once was does not count, and one minute of an open breaker neither."""

TROUBLE: dict[str, dict[str, str]] = {
    "StowageDown": {"up{": "0x200"},
    "StowageInternalErrors": {'status="500"': "2x30 3+1x200"},
    "StowageFaults": {"faults": "0x10 1x200"},
    "StowageCorruptChunks": {"corrupt": "4x30 4+1x200"},
    "StowageUnreadableChunks": {'stat="unreadable"': "0x30 5x200"},
    "StowageTierLeftAlone": {"breaker": "1x10 0x200"},
    "StowageSharedTierSilent": {"healthy": "0x200"},
    "StowageTierErrors": {"write_errors": "0+2x200"},
    "StowageTierTooSlow": {"timed_out": "0+2x200"},
    "StowageDiskFull": {"disk_full": "1x30 2+1x200"},
    "StowageTierNoRoom": {"tier_no_room": "1+1x200"},
    "StowageHostNoRoom": {"host_chunks_no_room": "0+3x200"},
    "StowageSpillsDropped": {"spills_dropped": "0+300x200"},
    "StowageQueueFilling": {"choices_open": "140x200"},
    "StowageRequestsRefused": {'status="429"': "0+5x200"},
    "StowageRequestsTooLong": {'status="504"': "0+5x200"},
    "StowageSlowFirstToken": {'le="1"': "0+30x200"},
    "StowagePreemptions": {"preemptions": "0+12x200"},
    "StowageNothingReused": {"tokens_reused": "7x200"},
    "StowageFewFiles": {"open_fds": "1000x200"},
}
"""What is different when each is to fire. It alone."""
AT = {"StowageNothingReused": "2h5m"}


def test_the_rules_are_what_prometheus_takes(promtool: str) -> None:
    succeed(promtool, "check", "rules", "alerts.yml", where=PROMETHEUS)


def test_the_configuration_is_what_prometheus_takes(promtool: str, tmp_path: Path) -> None:
    secret = tmp_path / "api_key"
    secret.write_text("key")
    text = (PROMETHEUS / "prometheus.yml").read_text()
    assert text.count("/run/secrets/api_key") == 1
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/api_key", str(secret)))
    shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
    succeed(promtool, "check", "config", "prometheus.yml", where=tmp_path)


def scenario(changes: dict[str, str], at: str, expected: list[str]) -> dict[str, Any]:
    """One test of promtool's: which alerts fire at that time."""
    for part in changes:
        assert [name for name in WELL if part in name], f"nothing is named {part}"
    series = {
        name: next((values for part, values in changes.items() if part in name), values)
        for name, values in WELL.items()
    }
    firing = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected]
    asked = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": at, "exp_samples": firing}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [asked],
    }


@pytest.mark.slow
def test_each_alert_fires_in_its_trouble_and_no_other(promtool: str, tmp_path: Path) -> None:
    assert sorted(TROUBLE) == sorted(NAMES)
    shutil.copy(PROMETHEUS / "alerts.yml", tmp_path)
    tests = [scenario(changes, AT.get(name, "50m"), [name]) for name, changes in TROUBLE.items()]
    tests += [scenario({}, at, []) for at in ("10m", "21m", "50m", "2h30m")]
    made = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(made))
    succeed(promtool, "test", "rules", "tests.yml", where=tmp_path)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_each_alert_is_explained(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    notes = rule["annotations"]
    assert notes.keys() == {"summary", "description", "action", "runbook"}
    assert all(len(text) > 10 for text in notes.values()) and "{{" in notes["description"]
    page, _, anchor = notes["runbook"].partition("#")
    assert anchor == rule["alert"].lower()
    heading = rf"^### {rule['alert']}\n\n(?s:.+?)^\*\*Do:\*\*"
    assert re.search(heading, (ROOT / page).read_text(), re.MULTILINE), f"{page} does not say what to do"


def test_the_page_explains_no_alert_that_is_gone() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert sorted(re.findall(r"^### (Stowage\w+)$", page, re.MULTILINE)) == sorted(NAMES)
