// The list of requests, and the page of one.
const STATES = {
  waiting: "waiting", loading: "loading", computing: "computing", answering: "answering", preempted: "preempted",
  done: "done", failed: "failed", left: "client left",
};
const FIRST_SHOWN = 12;

// Where the tokens of a prompt came from: [tier, tokens], fastest first; what was computed is the last.
function origins(request) {
  const tiers = Object.entries(request.reused_tokens).filter(([, tokens]) => tokens > 0);
  return request.computed_tokens > 0 ? [...tiers, ["computed", request.computed_tokens]] : tiers;
}

function barOf(request) {
  const parts = origins(request);
  const words = parts.map(([tier, tokens]) => `${tier} ${whole(tokens)}`).join(" · ");
  return { parts: parts.map(([tier, tokens]) => ({ share: tokens / request.prompt_tokens, tone: tier })), words: words || "not known yet" };
}

function stateOf(request) {
  return request.state === "failed" && request.status !== 200 ? `failed (${request.status})` : STATES[request.state] || request.state;
}

function showRequests(open, ended, now_s, all) {
  const parent = byId("requests");
  const every = [...open, ...ended];
  const shown = all ? every : every.slice(0, Math.max(FIRST_SHOWN, open.length));
  if (!every.length) {
    list(parent, ["none"], (one) => one, () => make("p.empty", {}, "No request yet. Each shows here where its prefix came from."), () => {});
    return;
  }
  const hidden = every.length - shown.length;
  const parts = ["table", ...(hidden || all ? ["more"] : [])];
  list(parent, parts, (part) => part, (part) => (part === "table" ? tableOfRequests() : makeMore()), () => {});
  list(parent.firstElementChild.tBodies[0], shown, (one) => one.id, rowOfRequest, (row, one) => updateRequest(row, one, now_s));
  if (parent.children[1]) say(parent.children[1], all ? `Show the newest ${FIRST_SHOWN}` : `Show ${plural(hidden, "earlier request")}`);
}

function makeMore() {
  return make("button.more", { type: "button", id: "more" });
}

function tableOfRequests() {
  const heads = [["Request"], ["State"], ["Prompt", "num"], ["Prefix from"], ["Answer", "num"], ["First token", "num"], ["Took", "num"]];
  const row = make("tr", {}, ...heads.map(([text, look]) => make(look ? "th." + look : "th", { scope: "col" }, text)));
  return make("table.requests", {}, make("thead", {}, row), make("tbody"));
}

function rowOfRequest(request) {
  const link = make("a.id", { href: "#/requests/" + request.id, title: request.id }, request.id.slice(0, 12));
  const from = make("td.from", {}, make("div.bar.slim"), make("span.say"));
  return make(
    "tr", {}, make("td.who", {}, link, " ", make("span.dim")), make("td.what", {}, make("span.state")),
    make("td.num", { "data-label": "Prompt" }), from, make("td.num", { "data-label": "Answer" }),
    make("td.num", { "data-label": "First token" }), make("td.num", { "data-label": "Took" }),
  );
}

function updateRequest(row, request, now_s) {
  const [who, what, prompt, from, answer, first, took] = row.children;
  const { parts, words } = barOf(request);
  const kind = request.kind + (request.choices > 1 ? ` ×${request.choices}` : "");
  say(who.lastElementChild, `${kind}, ${ago(Math.max(0, now_s - request.arrived_s))}`);
  say(what.firstElementChild, stateOf(request));
  mark(what.firstElementChild, "data-state", request.state);
  tell(prompt, whole(request.prompt_tokens), request.prompt_tokens);
  fill(from.firstElementChild, parts, words);
  say(from.lastElementChild, words);
  tell(answer, whole(request.answer_tokens), request.answer_tokens);
  say(first, seconds(request.times.first_token_s));
  say(took, seconds(tookOf(request, now_s)));
}

function tookOf(request, now_s) {
  return request.times.ended_s ?? Math.max(0, now_s - request.arrived_s);
}

// The stretches of a request's life: [name, tone, from, to], in seconds after it had come.
function stretches(request, now_s) {
  const { submitted_s, admitted_s, started_s, first_token_s } = request.times;
  const end = tookOf(request, now_s);
  const marks = [0, submitted_s, admitted_s, started_s, first_token_s, null];
  const tiers = Object.keys(request.reused_tokens).filter((tier) => tier !== "device" && request.reused_tokens[tier] > 0);
  const names = [
    ["Reading the request", "idle"], ["Waiting in the queue", "queued"],
    [tiers.length ? `Loading from ${tiers.join(" and ")}` : "Looking for its prefix", "device"],
    ["Computing the prompt", "computed"], ["Answering", "reused"],
  ];
  return names.map(([name, look], n) => {
    const from = marks[n];
    return from == null ? null : [name, look, Math.min(from, end), Math.min(marks[n + 1] ?? end, end)];
  }).filter(Boolean);
}

function showRequest(request, now_s, started_at) {
  const parent = byId("request");
  const view = request || { id: "missing" };
  list(parent, [view], (one) => one.id, () => (request ? pageOfRequest(request) : pageOfNone()), () => {});
  if (!request) return;
  const part = (name) => parent.querySelector(`[data-part="${name}"]`);
  const { parts, words } = barOf(request);
  say(part("state"), stateOf(request));
  mark(part("state"), "data-state", request.state);
  say(part("when"), `${clock(started_at + request.arrived_s)}, ${ago(Math.max(0, now_s - request.arrived_s))}`);
  fill(part("bar"), parts, words);
  const reused = Object.values(request.reused_tokens).reduce((sum, tokens) => sum + tokens, 0);
  list(part("origins"), origins(request), ([tier]) => tier, rowOfOrigin, (row, [, tokens]) => {
    tell(row.children[1], whole(tokens), tokens);
    say(row.children[2], percent(tokens / request.prompt_tokens));
  });
  const total = tookOf(request, now_s) || 1;
  list(part("times"), stretches(request, now_s), ([name]) => name, rowOfStretch, (row, [name, , from, to]) => {
    const [, span, text] = row.children;
    span.firstElementChild.style.left = ((100 * from) / total).toFixed(2) + "%";
    span.firstElementChild.style.width = ((100 * (to - from)) / total).toFixed(2) + "%";
    mark(span, "aria-label", `${name}: ${seconds(to - from)}, from ${seconds(from)} on`);
    say(text, seconds(to - from));
  });
  showFacts(part("facts"), request, now_s, reused);
}

function showFacts(parent, request, now_s, reused) {
  const { first_token_s, ended_s } = request.times;
  const answering_s = first_token_s == null ? null : (ended_s ?? now_s - request.arrived_s) - first_token_s;
  const speed = answering_s > 0 && request.answer_tokens > request.choices ? (request.answer_tokens - request.choices) / answering_s : null;
  const facts = [
    ["Prompt", plural(request.prompt_tokens, "token")],
    ["Not recomputed", plural(reused, "token")],
    ["Answer", plural(request.answer_tokens, "token")],
    ["Time to first token", seconds(first_token_s)],
    ["Took", seconds(tookOf(request, now_s))],
    ["Answered at", rate(speed, "tokens/s")],
    ["Kind", request.kind + (request.stream ? ", streamed" : "")],
    ["Choices", whole(request.choices)],
    ["Status", request.status == null ? NONE : String(request.status)],
    ["Ended because", request.reason || NONE],
    ["Preempted", request.preemptions ? plural(request.preemptions, "time") : "never"],
  ];
  const create = ([name]) => make("div", {}, make("dt", {}, name), make("dd"));
  list(parent, facts, ([name]) => name, create, (node, [, text]) => say(node.lastElementChild, text));
}

function pageOfRequest(request) {
  const head = make(
    "div.about-request", {}, make("h1", { tabindex: "-1" }, "Request ", make("span.id", {}, request.id)),
    make("span.state", { "data-part": "state" }), make("span.dim", { "data-part": "when" }),
  );
  const columns = ["From", "Tokens", "Share"].map((text, n) => make(n ? "th.num" : "th", { scope: "col" }, text));
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...columns)), make("tbody", { "data-part": "origins" }));
  const section = (title, ...parts) => make("section.card", {}, make("div.card-head", {}, make("h2", {}, title)), ...parts);
  return make(
    "div", {}, make("a.back", { href: "#/" }, "← All requests"), head,
    make("div.columns", {},
      section("Where its prompt came from", make("div.bar.big", { "data-part": "bar" }), table),
      section("Timeline", make("div", { "data-part": "times" }))),
    section("Facts", make("dl.facts", { "data-part": "facts" })),
  );
}

function pageOfNone() {
  return make(
    "div", {}, make("a.back", { href: "#/" }, "← All requests"), make("div.about-request", {}, make("h1", { tabindex: "-1" }, "This request is not known")),
    make("p.dim", {}, "It has ended long ago, before the server was started anew, or was made with another API key."),
  );
}

function rowOfOrigin([tier]) {
  return make("tr", {}, make("th", { scope: "row" }, make("span.key." + tone(tier), {}, tier)), make("td.num"), make("td.num"));
}

function rowOfStretch([name, look]) {
  return make("div.row.brief", {}, make("span.name", {}, name), make("div.span", { role: "img" }, make("i." + look)), make("span.say"));
}
