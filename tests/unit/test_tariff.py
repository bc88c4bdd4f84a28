"""Prices and endurance: the arithmetic, and how people write it; the picture of a simulation."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from stowage.errors import BudgetError, ConfigError
from stowage.simulator.chart import draw
from stowage.simulator.pricing import Endurance, Prices, parse_endurance
from stowage.simulator.results import simulate
from stowage.simulator.scenario import Link, Scenario
from tests import traces

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("600TB", Endurance(bytes_written=600 * 10**12)),
        ("1.2PB", Endurance(bytes_written=12 * 10**14)),
        (" 3 dwpd", Endurance(drive_writes_per_day=3.0)),
        ("0.3DWPD", Endurance(drive_writes_per_day=0.3)),
    ],
)
def test_endurance_as_people_write_it(text: str, found: Endurance) -> None:
    assert parse_endurance(text) == found


@pytest.mark.parametrize("text", ["", "often", "-1TB", "0DWPD", "0", "1 PiWPD", "nanDWPD"])
def test_no_endurance(text: str) -> None:
    with pytest.raises(ConfigError, match="endurance"):
        parse_endurance(text)


def test_years() -> None:
    assert Endurance(bytes_written=730).years(2.0, 1000) == 1.0
    assert Endurance(drive_writes_per_day=1.0).years(500.0, 1000) == 10.0
    assert Endurance(bytes_written=1).years(0.0, 1000) is None


def test_cost() -> None:
    prices = Prices(node_hour=2.0, disk_gib_month=0.1, object_gib_month=0.02, transfer_gb=0.05)
    month_s = 30 * 86400.0
    assert prices.cost(7200.0, 0, 0, 0.0, 0) == 4.0
    assert prices.cost(0.0, 10 * GIB, 0, month_s, 0) == pytest.approx(1.0)
    assert prices.cost(0.0, 0, 10 * GIB, month_s / 2, 0) == pytest.approx(0.1)
    assert prices.cost(0.0, 0, 0, 0.0, 3 * 10**9) == pytest.approx(0.15)
    assert prices.any and not Prices().any
    with pytest.raises(ConfigError, match="node_hour"):
        Prices(node_hour=-1.0)


def test_what_a_scenario_refuses() -> None:
    whole = {"host_bytes": GIB, "kv_bytes_per_token": 1024}
    for changes, text in (
        ({"nodes": 0}, "nodes"),
        ({"routing": "nearest"}, "round-robin"),
        ({"policy": "fifo"}, "lru"),
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s"),
        ({"step_tokens": 100}, "multiple"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ):
        with pytest.raises(ConfigError, match=text):
            Scenario(**whole | changes)  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="524288 bytes"):
        Scenario(**whole | {"host_bytes": 524_287})
    with pytest.raises(BudgetError, match="disk"):
        Scenario(**whole | {"disk_bytes": 524_288})
    for rates in ((0.0, 1.0, 0.0), (1.0, float("inf"), 0.0), (1.0, 1.0, -1.0)):
        with pytest.raises(ConfigError):
            Link(*rates)


def test_figures_and_picture(tmp_path: Path) -> None:
    trace = traces.trace(tmp_path / "t", traces.conversations(60, 1, gap_ms=60_000))
    base = {"kv_bytes_per_token": 256, "block_tokens": 16, "prefill_tokens_per_s": 100.0, "disk_bytes": 1 << 20}
    scenarios = [Scenario(host_bytes=chunks * 4096, **base) for chunks in (20, 200)]  # type: ignore[arg-type]
    found = simulate(trace, scenarios, prices=Prices(node_hour=1.0), endurance=Endurance(bytes_written=10**9))
    for figures in found:
        days = figures.duration_s / 86400
        assert figures.disk_written_bytes_per_day == pytest.approx(figures.written_bytes["disk"] / days)
        assert figures.disk_years == pytest.approx(10**9 / (figures.written_bytes["disk"] / days * 365))
        tokens = figures.input_tokens + figures.output_tokens
        assert figures.cost_per_million_tokens == pytest.approx(figures.duration_s / 3600 / tokens * 1e6)
        assert figures.cost_busy_per_million_tokens == pytest.approx(
            figures.busy * figures.duration_s / 3600 / tokens * 1e6
        )
        waits = figures.ttft_s
        assert 0 < waits.p50 <= waits.p95 <= waits.p99 <= waits.max and figures.busy <= figures.busy_max <= 1
    drawn = draw("60 prompts <&>", [("small", found[0]), ("large", found[1])])
    root = ET.fromstring(drawn)
    texts = [item.text for item in root.iter() if item.text]
    assert "60 prompts <&>" in texts and {"small", "large", "host", "disk", "p99"} <= set(texts)
    assert f"{100 * found[1].hit_rate['all']:.1f}" in texts and "object" not in texts
    heights = [float(item.get("height", 0)) for item in root.iter() if item.tag.endswith("rect")]
    assert all(height >= 0 for height in heights) and "prefers-color-scheme:dark" in drawn
