// What was gained, where every byte lies, and what moves between the tiers.

function showTiles(totals) {
  const prompts = totals.tokens_reused + totals.prompt_tokens_computed;
  const waited = totals.tiers_waited_s >= 0.0005 ? `${seconds(totals.tiers_waited_s)} of waiting for tiers taken off` : "nothing waited for tiers";
  const tiles = [
    ["tokens_reused", "Tokens not recomputed", count(totals.tokens_reused), `of ${count(prompts)} prompt tokens`, totals.tokens_reused ? "good" : ""],
    ["seconds_saved", "Compute time saved", seconds(totals.seconds_saved), [waited, moneyOf(totals)].filter(Boolean).join("; "), ""],
    ["hit_rate", "Hit rate", percent(totals.hit_rate), `of prompt tokens; ${plural(totals.requests, "request")}, ${count(totals.answer_tokens)} answer tokens`, ""],
    [
      "corrupt_chunks", "Corrupt chunks", count(totals.corrupt_chunks),
      totals.corrupt_chunks ? "found, dropped, and computed again" : "all that was read has verified", totals.corrupt_chunks ? "bad" : "",
    ],
  ];
  list(
    byId("tiles"), tiles, ([name]) => name,
    ([name, title]) => make("div.tile", {}, make("dt", {}, title), make("dd.number", { "data-metric": name }), make("dd.detail")),
    (node, [name, , text, detail, mood]) => {
      tell(node.children[1], text, totals[name]);
      say(node.children[2], detail);
      mark(node, "data-tone", mood);
    },
  );
}

// What an hour of this machine costs, as whoever looks has said; kept by the browser.
function hourlyPrice() {
  const price = Number(storedPrice());
  return price > 0 && price < 1e6 ? price : 0;
}

function storedPrice() {
  try {
    return localStorage.getItem("stowage.price") || "";
  } catch {
    return ""; // a browser that keeps nothing
  }
}

function moneyOf(totals) {
  const price = hourlyPrice();
  return price ? `worth ${money((totals.seconds_saved / 3600) * price)}` : "";
}

// Every memory as one bar: {key, title, bytes, parts: [{name, bytes, tone, faint, about}], rows: [{key, name, text}]}.
// What no part has is free.
function memoriesOf({ device, host, tiers }) {
  return [deviceMemory(device), ...(host ? [hostMemory(host)] : []), ...tiers.map(tierMemory)];
}

function sumOf(items, name) {
  return items.reduce((sum, item) => sum + item[name], 0);
}

function deviceMemory(device) {
  const { groups, weights_bytes } = device;
  const parts = [
    { name: "weights", bytes: weights_bytes, tone: "weights", about: "what the model computes with" },
    { name: "KV in use", bytes: sumOf(groups, "used_bytes"), tone: "device", about: "of requests that are being computed" },
    { name: "KV cached", bytes: sumOf(groups, "cached_bytes"), tone: "device", faint: true, about: "of earlier prompts, reused at once" },
  ];
  const rows = groups.map((group) => ({
    key: "group" + group.group, name: "KV, " + KINDS[group.kind], value: group.used_bytes,
    text: `${size(group.used_bytes)} in use, ${size(group.cached_bytes)} cached, of ${size(group.bytes)}`,
    about: `${plural(group.layers, "layer")}; ${plural(group.blocks, "block")} of ${group.block_tokens} tokens`,
  }));
  return { key: "device", title: "Device", bytes: weights_bytes + sumOf(groups, "bytes"), parts, rows };
}

function hostMemory(host) {
  const chunks = { name: "KV cached", bytes: sumOf(host.slabs, "bytes_used"), tone: "host", about: "of earlier prompts" };
  const weights = { name: "weights", bytes: host.weights_bytes, tone: "weights", about: "on their way to the device for every step" };
  const rows = host.slabs.map((slab) => ({
    key: "slab" + slab.slab, name: capital(slab.kinds.map((kind) => KINDS[kind]).join(" and ")), value: slab.bytes_used,
    text: `${size(slab.bytes_used)} of ${size(slab.bytes)}`,
  }));
  return { key: "host", title: "Host", bytes: host.weights_bytes + host.bytes, parts: host.weights_bytes ? [weights, chunks] : [chunks], rows };
}

const BREAKERS = { open: ["left alone for a while", "bad"], "half-open": ["being tried again", "warn"] };

function tierMemory(tier) {
  const bounded = tier.bytes_limit > 0 && tier.bytes_used != null;
  const filled = tier.bytes_filled ?? tier.bytes_used;
  const parts = [{ name: "KV cached", bytes: filled, tone: tier.name, about: "of earlier prompts" }];
  if (filled < tier.bytes_used) {
    parts.push({ name: "reserved", bytes: tier.bytes_used - filled, tone: tier.name, faint: true, about: "files that the next chunks are written to" });
  }
  const count = tier.chunks == null ? "" : plural(tier.chunks, tier.shared ? "known chunk" : "chunk");
  return {
    key: "tier " + tier.name, title: capital(tier.name), bytes: bounded ? tier.bytes_limit : 0,
    badges: [tier.shared ? ["shared", ""] : null, BREAKERS[tier.breaker] || null].filter(Boolean),
    parts: bounded ? parts : [],
    rows: [{ key: "chunks", name: "Holds", text: [count, bounded ? "" : "no limit of ours"].filter(Boolean).join(", ") || NONE, value: tier.chunks }],
  };
}

// All bars are to one scale. A tier that is far larger than the memory of the machine is drawn shorter, and says so.
const LONGEST = 8;

function scaleOf(memories) {
  const inMemory = Math.max(...memories.filter(({ key }) => key === "device" || key === "host").map(({ bytes }) => bytes));
  return Math.min(Math.max(...memories.map(({ bytes }) => bytes)), LONGEST * inMemory);
}

function showMemory(memory) {
  const memories = memoriesOf(memory);
  const scale = scaleOf(memories);
  list(
    byId("memory"), memories, (one) => one.key,
    () => make("div.memory", {}, make("div.memory-head", {}, make("h3"), make("span"), make("span.size")), make("div.bar"), make("p.legend"), make("div")),
    (node, one) => {
      const [head, bar, legend, rows] = node.children;
      const [title, badges, room] = head.children;
      const cut = one.bytes > scale;
      say(title, one.title);
      say(room, one.bytes ? size(one.bytes) + (cut ? `, drawn ${Math.round(one.bytes / scale)} times too short` : "") : "");
      list(badges, one.badges || [], ([text]) => text, ([text]) => make("span.badge", {}, text), (badge, [, mood]) => mark(badge, "data-tone", mood));
      bar.hidden = legend.hidden = !one.bytes;
      const free = Math.max(0, one.bytes - sumOf(one.parts, "bytes"));
      const said = [...one.parts, { name: "free", bytes: free, tone: "free", about: "within the limit" }];
      bar.style.width = (100 * Math.min(1, Math.max(0.01, one.bytes / scale))).toFixed(3) + "%";
      mark(bar, "class", cut ? "bar big cut" : "bar big");
      fill(bar, one.parts.map((part) => ({ ...part, share: part.bytes / one.bytes })), `${one.title}: ${said.map(({ name, bytes }) => `${name} ${size(bytes)}`).join(", ")}`);
      list(legend, said, ({ name }) => name, makePart, (part, what) => tell(part.lastElementChild, size(what.bytes), what.bytes));
      list(rows, one.rows.length > 1 || !one.bytes || one.key.startsWith("tier") ? one.rows : [], (row) => row.key, makeDetail, updateDetail);
    },
  );
}

function makePart({ name, tone: look, faint, about }) {
  const key = look === "free" ? "key.key-free" : "key." + tone(look) + (faint ? ".key-cached" : "");
  return make("span." + key, { title: about }, make("span", {}, name + " "), make("b"));
}

function makeDetail() {
  return make("div.detail-row", {}, make("span.name.clip"), make("span.say"));
}

function updateDetail(node, row) {
  const [name, text] = node.children;
  say(name, row.name);
  mark(name, "title", row.about || row.name);
  tell(text, row.text, row.value);
}

// How long people wait for an answer to begin, and would wait if every prompt were computed whole.
function showBefore(totals) {
  const parent = byId("before");
  if (!totals.first_tokens) {
    list(parent, ["none"], (one) => one, () => make("p.empty", {}, "No answer has begun yet."), () => {});
    return;
  }
  const now = totals.first_token_s / totals.first_tokens;
  const before = (totals.first_token_s + totals.seconds_saved) / totals.first_tokens;
  const rows = [
    { name: "Without reuse", tone: "computed", s: before }, { name: "With reuse", tone: "reused", s: now },
  ].map((one) => ({ ...one, parts: [{ share: one.s / before, tone: one.tone }], text: seconds(one.s), value: one.s }));
  list(parent, ["rows", "notes"], (part) => part, (part) => make(part === "rows" ? "div" : "p.dim.small"), () => {});
  list(parent.firstElementChild, rows, (row) => row.name, makeBrief, (node, row) => updateRow(node, row, { title: "Mean time to first token" }));
  const times = before / now;
  say(parent.children[1], `Mean of ${plural(totals.first_tokens, "answer")}${times > 1.05 ? `, ${times.toFixed(times < 10 ? 1 : 0)} times as quick` : ""}. Without reuse: plus the time that computing the reused tokens takes here.`);
}

function makeBrief() {
  return make("div.row.brief", { role: "listitem" }, ...makeRow().children);
}

function makeRow() {
  return make("div.row", {}, make("span.name.clip"), make("div.bar"), make("span.say"));
}

function updateRow(node, row, hold) {
  const [name, bar, text] = node.children;
  say(name, row.name);
  mark(name, "title", row.about || row.name);
  fill(bar, row.parts, `${hold.title}, ${row.name}: ${row.text}`);
  tell(text, row.text, row.value);
}

function showNow(server, totals) {
  const open = { name: "Answers open", parts: [{ share: server.choices_open / server.choices_limit, tone: "reused" }] };
  const rows = [{ ...open, text: `${whole(server.choices_open)} of ${whole(server.choices_limit)}`, value: server.choices_open }];
  const parent = byId("now");
  list(parent, ["rows", "notes"], (part) => part, (part) => make(part === "rows" ? "div" : "ul.notes", { role: "list" }), () => {});
  list(parent.firstElementChild, rows, (row) => row.name, makeBrief, (node, row) => updateRow(node, row, { title: "Now" }));
  const notes = [
    `${whole(server.max_num_seqs)} are computed at a time, others wait; a sequence may have ${whole(server.max_model_len)} tokens`,
    totals.prefill_tokens_per_s ? `Prompts are computed at ${rate(totals.prefill_tokens_per_s, "tokens/s")}` : "",
    totals.preemptions ? `${plural(totals.preemptions, "sequence")} had to make room for others` : "",
    totals.loads_refused ? `${plural(totals.loads_refused, "prefix", "prefixes")} computed because loading would have taken longer` : "",
  ];
  list(parent.children[1], notes.filter(Boolean), (note) => notes.indexOf(note), () => make("li"), say);
}

// What a tier has moved per second, from the totals of this answer and of one some seconds ago.
function speeds(now, before) {
  if (!before || now.at_s <= before.at_s) return {};
  const found = {};
  for (const tier of now.tiers) {
    const old = before.tiers.find((one) => one.name === tier.name);
    if (!old || tier.read_bytes == null) continue;
    const each = (name) => Math.max(0, tier[name] - old[name]) / (now.at_s - before.at_s);
    found[tier.name] = { read: each("read_bytes"), write: each("write_bytes") };
  }
  return found;
}

function showTransfers(tiers, transfers, moved) {
  const parent = byId("transfers");
  if (!transfers || !tiers.length) {
    const text = transfers ? "There is no tier below the host." : "There is no host memory: only the device keeps prefixes.";
    list(parent, [text], (one) => one, () => make("p.empty", {}, text), () => {});
    return;
  }
  list(parent, ["table", "notes"], (part) => part, (part) => (part === "table" ? tableOfTransfers() : make("ul.notes", { role: "list" })), () => {});
  list(parent.firstElementChild.tBodies[0], tiers, (tier) => tier.name, rowOfTransfers, (row, tier) => {
    const speed = moved[tier.name] || {};
    const [, loads, stores, reads, writes] = row.children;
    tell(loads, count(tier.loads_under_way), tier.loads_under_way);
    tell(stores, count(tier.stores_under_way), tier.stores_under_way);
    tellMoved(reads, tier.read_bytes, speed.read);
    tellMoved(writes, tier.write_bytes, speed.write);
  });
  const notes = [
    transfers.spills_waiting ? `${plural(transfers.spills_waiting, "chunk")} to be written` : "",
    transfers.timeouts ? `${plural(transfers.timeouts, "transfer")} passed their deadline` : "",
  ];
  list(parent.children[1], notes.filter(Boolean), (note) => notes.indexOf(note), () => make("li"), say);
}

// Bytes since the start, and below them the speed of now.
function tellMoved(cell, bytes, speed) {
  const [total, now] = cell.children;
  tell(total, size(bytes), bytes);
  say(now, speed ? rate(speed, "B") : "");
}

function tableOfTransfers() {
  const heads = ["Tier", "Loads now", "Stores now", "Read in all", "Written in all"].map((text, n) => make(n ? "th.num" : "th", { scope: "col" }, text));
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody"));
}

function rowOfTransfers(tier) {
  const name = make("span.key." + tone(tier.name), {}, tier.name);
  const moved = () => make("td.num", {}, make("span"), make("span.speed"));
  return make("tr", {}, make("th", { scope: "row" }, name), make("td.num"), make("td.num"), moved(), moved());
}
