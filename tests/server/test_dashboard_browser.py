"""The page at / in headless Chromium: its numbers are those of /metrics, in light and dark, on a phone, by keyboard; it
says when the server has gone, and goes on when it is back. `make browser` runs this.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.browser import chromium
from tests.browser.chromium import PHONE, Browser
from tests.engine.conftest import random_prompt
from tests.nursery import wait_until
from tests.server.process import Server

pytestmark = [pytest.mark.browser, pytest.mark.skipif(bool(chromium.missing()), reason=chromium.missing())]
NASTY = "<img src=x onerror=alert(1)>"
KEY = "key-of-somebody-0123456789"
LIVE = "document.querySelector('#live').dataset.state === 'live'"
GONE = "!document.querySelector('#lost').hidden"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    """With every tier and some requests behind it; its model has a name that would be markup."""
    cache = tmp_path_factory.mktemp("cache") / "disk"
    made = start(
        "--host-memory", "2MiB", "--disk", f"{cache}:64MiB", "--kv-cache-memory", "1MiB", "--served-model-name", NASTY
    )
    for n in range(30):
        prompt = random_prompt(300, seed=n % 9)
        body = {"model": NASTY, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "n": 1 + n % 2}
        httpx.post(made.url + "/v1/completions", json=body, timeout=60).raise_for_status()
    metrics = "stowage_transfers_under_way", "stowage_chunk_spills_waiting"
    wait_until(lambda: made.idle() and not any(made.total(name) for name in metrics), "all is done")
    return made


@pytest.fixture
def page(browser: Browser, server: Server) -> Browser:
    browser.open()
    browser.call("goto", server.url + "/")
    browser.until(LIVE)
    return browser


def number(browser: Browser, name: str) -> str:
    return browser.text(f'[data-metric="{name}"]')


def part(browser: Browser, memory: str, name: str) -> int:
    """Bytes of a part of a memory's bar, as its legend has them."""
    return int(browser.see(f'document.querySelector(\'[data-key="{memory}"] [data-key="{name}"] b\').dataset.value'))


def test_its_numbers_are_those_of_the_metrics(page: Browser, server: Server) -> None:
    metrics = server.metrics()
    page.until("document.querySelectorAll('.requests tbody tr').length > 0")

    def metric(name: str, **labels: str) -> int:
        return int(metrics["stowage_" + name, tuple(sorted(labels.items()))])

    def total(name: str) -> int:
        return int(sum(value for (found, _), value in metrics.items() if found == "stowage_" + name))

    reused, computed = metric("tokens_reused_total"), metric("prompt_tokens_computed_total")
    assert number(page, "tokens_reused") == f"{reused:,}" and reused > 1000
    assert page.text(".tile:first-child .detail") == f"of {reused + computed:,} prompt tokens"
    assert number(page, "hit_rate") == f"{100 * reused / (reused + computed):.0f} %"
    assert number(page, "corrupt_chunks") == f"{metric('tier_corrupt_chunks_total', tier='disk'):,}" == "0"
    asked = sum(v for (n, at), v in metrics.items() if n == "stowage_http_requests_total" and "completions" in str(at))
    assert f"{asked:,.0f} requests, {total('answer_tokens_total'):,} answer tokens" in page.text("#tiles")
    used, kept, blocks = (metric("device_blocks" + name, group="0", kind="full") for name in ("_used", "_cached", ""))
    pool = metric("device_bytes", group="0", kind="full")
    each = pool // blocks
    assert part(page, "device", "KV in use") == used * each and part(page, "device", "KV cached") == kept * each > 0
    assert part(page, "device", "free") == pool - (used + kept) * each
    for memory, name, held, limit in (
        ("host", "KV cached", metric("host_slab_used_bytes", slab="0"), metric("host_slab_bytes", slab="0")),
        ("tier disk", "KV cached", metric("tier_filled_bytes", tier="disk"), metric("tier_limit_bytes", tier="disk")),
    ):
        aside = metric("tier_used_bytes", tier="disk") - held if memory == "tier disk" else 0
        assert part(page, memory, name) == held > 0 and part(page, memory, "free") == limit - held - aside
        share = page.see(f"document.querySelector('[data-key=\"{memory}\"] .bar i').style.width")
        assert float(share.rstrip("%")) == pytest.approx(100 * held / limit, abs=0.001)
    assert f"{metric('tier_chunks', tier='disk'):,} chunks" in page.text('[data-key="tier disk"]')
    assert [
        int(page.see(f"document.querySelectorAll('#transfers td')[{n}].firstChild.dataset.value")) for n in (2, 3)
    ] == [metric("tier_read_bytes_total", tier="disk"), metric("tier_written_bytes_total", tier="disk")]
    assert page.text("#now .say") == f"0 of {metric('choices_limit')}"
    assert page.call("troubles") == []


def test_bars_are_to_one_scale(page: Browser, server: Server) -> None:
    """The longest is the whole width; a tier far beyond the machine's memory is drawn shorter, and says so."""
    memory = httpx.get(server.url + "/v1/stowage/state").json()["memory"]
    device = memory["device"]["weights_bytes"] + sum(group["bytes"] for group in memory["device"]["groups"])
    sizes = {"device": device, "host": memory["host"]["bytes"], "tier disk": memory["tiers"][0]["bytes_limit"]}
    scale = min(max(sizes.values()), 8 * max(sizes["device"], sizes["host"]))
    for key, size in sizes.items():
        width = page.see(f"document.querySelector('[data-key=\"{key}\"] .bar').style.width")
        assert float(width.rstrip("%")) == pytest.approx(min(100, 100 * size / scale), abs=0.001)
        said = page.text(f'[data-key="{key}"] .size')
        assert ("times too short" in said) == (size > scale)


def test_what_was_saved_has_a_price(page: Browser, server: Server) -> None:
    saved = httpx.get(server.url + "/v1/stowage/state").json()["totals"]["seconds_saved"]
    worth = 10 * saved
    page.call("fill", "#price", "36000")
    page.until("document.querySelector('#tiles').textContent.includes('worth')")
    assert f"worth {worth:.{2 if worth < 10 else 0}f}" in page.text("#tiles")
    page.call("reload")
    page.until(LIVE)
    assert page.see("document.querySelector('#price').value") == "36000" and "worth" in page.text("#tiles")
    before, now = (page.see(f"Number(document.querySelectorAll('#before .say')[{n}].dataset.value)") for n in (0, 1))
    assert before > now > 0, "reuse brings first tokens sooner"


def test_requests_and_where_their_prefixes_came_from(page: Browser, server: Server) -> None:
    ended = httpx.get(server.url + "/v1/stowage/state").json()["requests"]["ended"]
    assert len(ended) == 30
    rows = "[...document.querySelectorAll('.requests tbody tr')]"
    assert page.see(f"{rows}.map(row => row.querySelector('a').title)") == [one["id"] for one in ended[:12]]
    said = page.see(f"{rows}.map(row => row.querySelector('.from .say').textContent)")
    for one, words in zip(ended, said, strict=False):
        origins = [f"{tier} {tokens}" for tier, tokens in one["reused_tokens"].items() if tokens]
        assert words == " · ".join([*origins, f"computed {one['computed_tokens']}"])
    page.call("click", "#more")
    assert page.see(f"{rows}.length") == 30 and page.text("#more") == "Show the newest 12"
    page.call("click", "#more")
    assert page.see(f"{rows}.length") == 12


def test_texts_do_not_become_markup(page: Browser) -> None:
    assert page.text("#model") == NASTY and page.see("document.title") == f"{NASTY} · Stowage"
    assert page.see("document.images.length") == 0
    added = "const s = document.createElement('script'); s.textContent = 'window.owned = 1'; document.body.append(s)"
    page.see(f"(() => {{ {added}; }})()")
    page.see("document.body.insertAdjacentHTML('beforeend', '<b onclick=\"window.owned = 1\" id=evil>x</b>')")
    page.see("document.getElementById('evil').click()")
    assert page.see("window.owned === undefined"), "what gets in as code must not run"
    assert any("Content Security Policy" in trouble for trouble in page.call("troubles"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [chromium.WIDE, PHONE, (768, 1024), (320, 568)], ids=str)
def test_it_fits_and_can_be_read(
    browser: Browser, server: Server, scheme: str, size: tuple[int, int], tmp_path: Path
) -> None:
    """No scrolling sideways, on either page; text and its ground differ enough (WCAG AA: 4.5 to 1)."""
    browser.open(size, colorScheme=scheme)
    browser.call("goto", server.url + "/")
    browser.until(LIVE)
    widths = "[document.documentElement.scrollWidth, innerWidth]"
    for hash_of in ("''", "document.querySelector('.requests a').getAttribute('href')"):
        browser.see(f"location.hash = {hash_of}")
        browser.until(f"document.querySelector('#request').hidden === ({hash_of} === '')")
        scrolled, wide = browser.see(widths)
        assert scrolled <= wide == size[0]
        assert browser.see(CONTRAST) == []
        browser.call("screenshot", {"path": str(tmp_path / "page.png"), "fullPage": True})
        assert (tmp_path / "page.png").stat().st_size > 5000
    ground = browser.see("getComputedStyle(document.documentElement).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
    assert lightness > 230 if scheme == "light" else lightness < 40
    assert browser.call("troubles") == []


CONTRAST = """(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [r, g, b] = numbers(color).slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if ((numbers(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const weak = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest("svg, noscript, script, style, .skip")) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) weak.push(node.outerHTML.slice(0, 120));
  }
  return weak;
})()"""


def test_by_keyboard(page: Browser) -> None:
    """Everything that a mouse can do: focus can be seen, goes to the page of a request, and comes back to its link."""
    assert page.see("document.querySelectorAll('[onclick], [tabindex]:not([tabindex=\"-1\"])').length") == 0
    focus = "document.activeElement"
    page.press("Tab")
    assert page.see(f"{focus}.className") == "skip"
    reached = []
    while not page.see(f"{focus}.matches('.requests a')"):
        page.press("Tab")
        reached.append(page.see(f"{focus}.id || {focus}.dataset.span || {focus}.className"))
        style = page.see(f"getComputedStyle({focus}).outlineStyle + getComputedStyle({focus}).outlineWidth")
        assert style == "solid2px", "where the focus is must be seen"
        assert len(reached) < 20
    assert reached[:-1] == ["brand", "pause", "600", "3600"]
    identity = page.see(f"{focus}.title")
    page.call("waitForTimeout", 2500)
    assert page.see(f"{focus}.title") == identity, "new numbers leave the focus where it is"
    page.press("Enter")
    page.until("!document.querySelector('#request').hidden")
    assert page.see(f"{focus}.textContent") == f"Request {identity}"
    assert page.see("document.title") == f"Request {identity[:12]} · Stowage"
    page.press("Shift+Tab")
    assert page.see(f"{focus}.className") == "back"
    page.press("Enter")
    page.until("document.querySelector('#request').hidden")
    assert page.see(f"{focus}.title") == identity
    page.press("Shift+Tab", "Space")
    assert page.see("document.querySelector('[data-span=\"3600\"]').getAttribute('aria-pressed')") == "true"


def test_the_page_of_a_request(page: Browser, server: Server) -> None:
    """Its numbers are those of the state; its timeline is whole; one that is not known is told as such."""
    ended = httpx.get(server.url + "/v1/stowage/state").json()["requests"]["ended"]
    one = next(one for one in ended if sum(one["reused_tokens"].values()))
    page.call("goto", f"{server.url}/#/requests/{one['id']}")
    page.until("!document.querySelector('#request').hidden && document.querySelector('[data-part=origins] tr')")
    origins = [[tier, f"{tokens:,}"] for tier, tokens in one["reused_tokens"].items() if tokens]
    cells = "[...document.querySelectorAll('[data-part=origins] tr')]"
    cells += ".map(row => [...row.children].slice(0, 2).map(cell => cell.textContent))"
    assert page.see(cells) == [*origins, ["computed", str(one["computed_tokens"])]]
    names = page.see("[...document.querySelectorAll('[data-part=times] .name')].map(n => n.textContent)")
    tiers = [tier for tier, tokens in one["reused_tokens"].items() if tokens and tier != "device"]
    fetching = f"Loading from {' and '.join(tiers)}" if tiers else "Looking for its prefix"
    assert names == ["Reading the request", "Waiting in the queue", fetching, "Computing the prompt", "Answering"]
    sizes = page.see("[...document.querySelectorAll('[data-part=times] i')].map(i => parseFloat(i.style.width))")
    assert sum(sizes) == pytest.approx(100, abs=0.2), "the stretches fill the whole time"
    facts = page.text("[data-part=facts]")
    assert f"{one['answer_tokens']} tokens" in facts and "200" in facts and "length" in facts
    page.call("goto", f"{server.url}/#/requests/req-none")
    page.until("document.querySelector('#request').innerText.includes('not known')")
    assert page.call("troubles") == []


def test_the_server_goes_and_comes_back(browser: Browser, start: Callable[..., Server]) -> None:
    """What was known stays, and is said to be old; a new server is shown from its own beginning."""
    first = start("--host-memory", "1MiB")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3, "ignore_eos": True}
    httpx.post(first.url + "/v1/completions", json=body, timeout=60).raise_for_status()
    browser.open()
    browser.call("goto", first.url + "/")
    browser.until(f"{LIVE} && document.querySelectorAll('.requests tbody tr').length === 1")
    first.stop()
    browser.until(GONE)
    assert "The server does not answer since" in browser.text("#lost") and "Trying again in" in browser.text("#lost")
    assert browser.text("#live-text") == "Connection lost"
    assert browser.see("document.querySelectorAll('.requests tbody tr').length") == 1
    assert float(browser.see("getComputedStyle(document.querySelector('#overview')).opacity")) < 1
    browser.until("document.querySelector('#lost-when').textContent.includes('4 seconds')")
    second = start("--port", str(first.port))
    browser.call("click", "#retry")
    browser.until(f"{LIVE} && !({GONE})")
    browser.until("document.querySelector('#requests').innerText.includes('No request yet')")
    assert browser.text('[data-metric="tokens_reused"]') == "0" and "no host memory" in browser.text("#transfers")
    charts = browser.see("[...document.querySelectorAll('.chart h3 span:first-child')].map(n => n.textContent)")
    assert charts[-1] == "Answers", "without host memory nothing is transferred"
    second.stop()


def test_nobody_looks(page: Browser, server: Server) -> None:
    """A hidden page asks nothing, nor does one that is paused; both go on where they were."""

    def asked() -> float:
        return server.total("stowage_http_requests_total", route="/v1/stowage/state")

    for stop, go_on in (
        (lambda: page.call("hide", True), lambda: page.call("hide", False)),
        (lambda: page.call("click", "#pause"), lambda: page.call("click", "#pause")),
    ):
        stop()
        page.call("waitForTimeout", 500)  # what was under way ends
        before = asked()
        page.call("waitForTimeout", 2500)
        assert asked() == before
        go_on()
        wait_until(lambda before=before: asked() > before + 1, "it asks again")  # type: ignore[misc]
        page.until(LIVE)


def test_charts(page: Browser) -> None:
    """They draw what was sampled, say it in words, and tell the values under the pointer."""
    page.until("[...document.querySelectorAll('.plot path')].filter(p => p.getAttribute('d')).length >= 5")
    assert page.see("document.querySelectorAll('.chart').length") == 4
    words = page.see("[...document.querySelectorAll('.plot')].map(p => p.getAttribute('aria-label'))")
    assert words[0].startswith("Prompt tokens: now not recomputed ") and "tokens/s" in words[0]
    assert re.search(r"device \d+ %, host \d+ %, disk [\d.]+ %", words[2])
    box = page.see(
        "(({x, y, width, height}) => [x, y, width, height])(document.querySelector('.plot').getBoundingClientRect())"
    )
    page.see("document.querySelector('#charts').scrollIntoView()")
    box = page.see(
        "(({x, y, width, height}) => [x, y, width, height])(document.querySelector('.plot').getBoundingClientRect())"
    )
    page.call("point", box[0] + box[2] - 4, box[1] + box[3] / 2)
    assert page.see("document.querySelector('.plot .cursor').getAttribute('visibility')") == "visible"
    assert page.text(".chart .when") != ""
    page.call("point", 2, 2)
    assert page.see("document.querySelector('.plot .cursor').getAttribute('visibility')") == "hidden"


def test_nothing_moves_for_who_does_not_want_it(browser: Browser, server: Server) -> None:
    browser.open(reducedMotion="reduce")
    browser.call("goto", server.url + "/")
    browser.until(LIVE)
    moving = "[...document.querySelectorAll('*')].filter(n => { const s = getComputedStyle(n); "
    moving += "return s.animationName !== 'none' || parseFloat(s.transitionDuration) > 0 }).length"
    assert browser.see(moving) == 0


def test_a_key_as_the_password(browser: Browser, start: Callable[..., Server]) -> None:
    """The browser asks for it, and sends it again with every look; a wrong one sees nothing."""
    guarded = start(STOWAGE_API_KEYS=KEY)
    browser.open(httpCredentials={"username": "anybody", "password": KEY})
    assert browser.call("goto", guarded.url + "/") == 200
    browser.until(LIVE)
    assert browser.call("troubles") == []
    assert KEY not in browser.see("document.documentElement.outerHTML + location.href")
    browser.open(httpCredentials={"username": "anybody", "password": KEY + "x"})
    assert browser.call("goto", guarded.url + "/") == 401
