// Asks the server every second, keeps what it answered, shows it. Waits while nobody looks; when the server is gone says
// so, and asks less and less often.
const EVERY_MS = 1000;
const GIVE_UP_MS = 10000;
const WAIT_MS_MOST = 15000;
const KEPT = 200;
const MOVED_S = 4;
const URL_OF_STATE = new URL("v1/stowage/state", location.origin + location.pathname);

const seen = { state: null, ended: [], samples: [], totals: [], at_ms: 0 };
const view = { span_s: 600, all: false, paused: false, shown: null, charts: null };
let timer = 0;
let failures = 0;
let asking = false;

async function ask() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  const answer = await fetched(seen.state ? seen.state.server.now_s : 0).catch((error) => ({ error }));
  asking = false;
  failures = answer.error ? failures + 1 : 0;
  plan();
  if (answer.error) {
    tellLost(answer.error);
    return;
  }
  take(answer);
  show();
  tellLive();
}

async function fetched(after_s) {
  const url = new URL(URL_OF_STATE);
  url.searchParams.set("after", after_s);
  const response = await fetch(url, { cache: "no-store", signal: AbortSignal.timeout(GIVE_UP_MS) });
  if (response.status === 401) throw new Error("The API key is not known any more. Load the page again.");
  if (!response.ok) throw new Error(`The server answered with status ${response.status}.`);
  const state = await response.json();
  const restarted = seen.state && state.server.started_at !== seen.state.server.started_at;
  if (!restarted) return state;
  seen.state = null;
  seen.ended = seen.samples = seen.totals = [];
  view.charts = null;
  return fetched(0);
}

// Answers hold what is new: it is added to what was known.
function take(state) {
  const known = new Set(seen.ended.map((one) => one.id));
  seen.ended = [...state.requests.ended.filter((one) => !known.has(one.id)), ...seen.ended].slice(0, KEPT);
  const last = seen.samples.length ? seen.samples.at(-1)[0] : -1;
  const oldest = state.server.now_s - 3600;
  seen.samples = [...seen.samples, ...state.history.samples.filter((one) => one[0] > last)].filter((one) => one[0] >= oldest);
  const at_s = state.server.now_s - state.server.age_s;
  seen.totals = [...seen.totals.filter((one) => one.at_s >= at_s - MOVED_S), { at_s, tiers: state.memory.tiers }];
  seen.state = state;
  seen.at_ms = Date.now();
}

function plan() {
  clearTimeout(timer);
  if (document.hidden || view.paused) return;
  const wait_ms = failures ? Math.min(WAIT_MS_MOST, EVERY_MS * 2 ** (failures - 1)) : EVERY_MS;
  timer = setTimeout(ask, wait_ms);
  if (failures) say(byId("lost-when"), `Trying again in ${plural(Math.round(wait_ms / 1000), "second")}.`);
}

function tellLive() {
  const { server } = seen.state;
  let [mood, text] = ["live", "Live"];
  if (view.paused) [mood, text] = ["wait", "Paused"];
  else if (!server.alive) [mood, text] = ["lost", "The engine has stopped"];
  else if (server.stopping) [mood, text] = ["warn", "The server is stopping"];
  else if (server.age_s > 3) [mood, text] = ["warn", `Busy: as of ${ago(server.age_s)}`];
  mark(byId("live"), "data-state", mood);
  say(byId("live-text"), text);
  byId("lost").hidden = true;
  document.body.classList.remove("stale");
}

function tellLost(error) {
  const told = error instanceof Error && error.constructor === Error;
  const since = seen.at_ms ? ` since ${clock(seen.at_ms / 1000)}` : "";
  say(byId("lost-what"), told ? error.message : `The server does not answer${since}.`);
  byId("lost").hidden = false;
  mark(byId("live"), "data-state", "lost");
  say(byId("live-text"), "Connection lost");
  document.body.classList.add("stale");
}

function show() {
  if (!seen.state) return;
  const { server, totals, memory, transfers, requests, history } = seen.state;
  say(byId("model"), server.model);
  mark(byId("model"), "title", server.model);
  say(byId("uptime"), `up ${duration(server.now_s)}`);
  const open = requests.open;
  say(byId("about"), `Stowage ${server.version}. Requests are those of your API key; everything else is about all requests.`);
  const wanted = (location.hash.match(/^#\/requests\/([\w-]+)$/) || [])[1] || "";
  byId("overview").hidden = Boolean(wanted);
  byId("request").hidden = !wanted;
  if (wanted) {
    const found = open.concat(seen.ended).find((one) => one.id === wanted);
    showRequest(found, server.now_s, server.started_at);
  } else {
    showTiles(totals);
    showMemory(memory);
    showBefore(totals);
    showNow(server, totals);
    showTransfers(memory.tiers, transfers, speeds(seen.totals.at(-1), seen.totals[0]));
    showCharts(history.names, memory.tiers.map((tier) => tier.name), server.now_s);
    showOrigins(memory);
    showRequests(open, seen.ended.filter((one) => !open.some((other) => other.id === one.id)), server.now_s, view.all);
  }
  document.title = wanted ? `Request ${wanted.slice(0, 12)} · Stowage` : `${server.model} · Stowage`;
  if (view.shown !== null && view.shown !== wanted) turned(wanted);
  view.shown = wanted;
}

// Another page is shown: who reads by keyboard or by ear begins at its top, or where they had left the list.
function turned(wanted) {
  const link = document.querySelector(`a[href="#/requests/${view.shown}"]`);
  const begin = wanted ? document.querySelector("#request h1") : link || byId("main");
  begin.focus({ preventScroll: !link });
  if (wanted) scrollTo(0, 0);
}

function showOrigins(memory) {
  const origins = ["device", ...(memory.host ? ["host"] : []), ...memory.tiers.map((tier) => tier.name), "computed"];
  list(byId("origins"), origins, (tier) => tier, (tier) => make("span.key." + tone(tier), {}, tier), () => {});
}

function showCharts(names, tiers, now_s) {
  if (!view.charts) {
    byId("charts").replaceChildren();
    view.charts = chartsOf(names, tiers).map((what) => new Chart(byId("charts"), what));
  }
  for (const chart of view.charts) chart.show(seen.samples, now_s, view.span_s);
}

byId("pause").addEventListener("click", () => {
  view.paused = !view.paused;
  mark(byId("pause"), "aria-pressed", view.paused);
  if (view.paused) {
    clearTimeout(timer);
    if (seen.state && !failures) tellLive();
  } else ask();
});
byId("retry").addEventListener("click", ask);
byId("requests").addEventListener("click", (event) => {
  if (event.target.id !== "more") return;
  view.all = !view.all;
  show();
});
for (const button of document.querySelectorAll("[data-span]")) {
  button.addEventListener("click", () => {
    view.span_s = Number(button.dataset.span);
    for (const one of document.querySelectorAll("[data-span]")) mark(one, "aria-pressed", one === button);
    show();
  });
}
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
byId("price").value = storedPrice();
byId("price").addEventListener("input", () => {
  try {
    localStorage.setItem("stowage.price", byId("price").value);
  } catch {
    return; // a browser that keeps nothing
  }
  show();
});
addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : view.paused || ask()));
ask();
