// What was gained, where every byte lies, and what moves between the places.

function showTiles(totals) {
  const prompts = totals.tokens_reused + totals.prompt_tokens_computed;
  const waited = totals.tiers_waited_s >= 0.0005 ? `less ${seconds(totals.tiers_waited_s)} of waiting for tiers` : "nothing waited for tiers";
  const tiles = [
    ["tokens_reused", "Tokens not recomputed", count(totals.tokens_reused), `of ${count(prompts)} prompt tokens`, totals.tokens_reused ? "good" : ""],
    ["seconds_saved", "Compute time saved", seconds(totals.seconds_saved), waited, ""],
    ["hit_rate", "Hit rate", percent(totals.hit_rate), `${plural(totals.requests, "request")}, ${count(totals.answer_tokens)} answer tokens`, ""],
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

function holdsOf(memory) {
  const { device, host, tiers } = memory;
  const groups = device.groups.map(deviceRow);
  const total = device.weights_bytes + device.groups.reduce((sum, group) => sum + group.bytes, 0);
  const weights = { key: "weights", name: "Weights", parts: [{ share: 1, tone: "device" }], text: size(device.weights_bytes), value: device.weights_bytes };
  const holds = [{ key: "device", title: "Device", size: size(total), rows: [weights, ...groups] }];
  if (host) holds.push({ key: "host", title: "Host", size: size(host.bytes), rows: host.slabs.map(hostRow) });
  return holds.concat(tiers.map(tierHold));
}

function deviceRow(group) {
  const parts = [{ share: group.used / group.blocks, tone: "device" }, { share: group.cached / group.blocks, tone: "device", faint: true }];
  const text = `${whole(group.used)} in use, ${whole(group.cached)} kept, of ${plural(group.blocks, "block")}`;
  return {
    key: "group" + group.group, name: "KV, " + KINDS[group.kind], parts, text, value: group.used,
    about: `${plural(group.layers, "layer")}, ${size(group.bytes)}, ${group.block_tokens} tokens per block`,
  };
}

function hostRow(slab) {
  const kinds = slab.kinds.map((kind) => KINDS[kind]).join(" and ");
  const text = `${size(slab.bytes_used)} of ${size(slab.bytes)}`;
  const name = kinds[0].toUpperCase() + kinds.slice(1);
  return { key: "slab" + slab.slab, name, parts: [{ share: slab.bytes_used / slab.bytes, tone: "host" }], text, value: slab.bytes_used };
}

const BREAKERS = { open: ["left alone for a while", "bad"], "half-open": ["being tried again", "warn"] };

function tierHold(tier) {
  const bounded = tier.bytes_limit > 0 && tier.bytes_used != null;
  const parts = bounded ? [{ share: tier.bytes_used / tier.bytes_limit, tone: tier.name }] : [];
  const text = bounded ? `${size(tier.bytes_used)} of ${size(tier.bytes_limit)}` : "no limit of ours";
  const name = tier.chunks == null ? "Chunks" : plural(tier.chunks, tier.shared ? "known chunk" : "chunk");
  return {
    key: "tier " + tier.name, title: tier.name[0].toUpperCase() + tier.name.slice(1), size: bounded ? size(tier.bytes_limit) : "",
    badges: [tier.shared ? ["shared", ""] : null, BREAKERS[tier.breaker] || null].filter(Boolean),
    rows: [{ key: "chunks", name, parts, text, value: bounded ? tier.bytes_used : tier.chunks }],
  };
}

function showMemory(memory) {
  list(
    byId("memory"), holdsOf(memory), (hold) => hold.key,
    () => make("div.hold", {}, make("div.hold-head", {}, make("h3"), make("span"), make("span.size")), make("div")),
    (node, hold) => {
      const [title, badges, room] = node.firstElementChild.children;
      say(title, hold.title);
      say(room, hold.size);
      list(badges, hold.badges || [], ([text]) => text, ([text]) => make("span.badge", {}, text), (badge, [, mood]) => mark(badge, "data-tone", mood));
      list(node.children[1], hold.rows, (row) => row.key, makeRow, (row, what) => updateRow(row, what, hold));
    },
  );
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
  const open = { name: "Choices open", parts: [{ share: server.choices_open / server.choices_limit, tone: "reused" }] };
  const rows = [{ ...open, text: `${whole(server.choices_open)} of ${whole(server.choices_limit)}`, value: server.choices_open }];
  const parent = byId("now");
  list(parent, ["rows", "notes"], (part) => part, (part) => make(part === "rows" ? "div" : "ul.notes", { role: "list" }), () => {});
  list(parent.firstElementChild, rows, (row) => row.name, () => make("div.row.brief", { role: "listitem" }, ...makeRow().children), (node, row) => updateRow(node, row, { title: "Now" }));
  const notes = [
    `${whole(server.max_num_seqs)} are computed at a time; a sequence may have ${whole(server.max_model_len)} tokens`,
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
    tell(reads, speed.read ? rate(speed.read, "B") : size(tier.read_bytes), tier.read_bytes);
    tell(writes, speed.write ? rate(speed.write, "B") : size(tier.write_bytes), tier.write_bytes);
    mark(row, "title", `${tier.name}: ${size(tier.read_bytes)} read and ${size(tier.write_bytes)} written since the start`);
  });
  const notes = [
    `${plural(transfers.transfers_under_way, "transfer")} under way; ${plural(transfers.spills_waiting, "chunk")} to be written`,
    `${plural(transfers.promoted, "chunk")} loaded into host, ${size(transfers.promoted_bytes)}`,
    `${plural(transfers.spills, "chunk")} written to tiers, ${size(transfers.spilled_bytes)}`,
    transfers.timeouts ? `${plural(transfers.timeouts, "transfer")} passed their deadline` : "",
  ];
  list(parent.children[1], notes.filter(Boolean), (note) => notes.indexOf(note), () => make("li"), say);
}

function tableOfTransfers() {
  const heads = ["Tier", "Loads", "Stores", "Read", "Written"].map((text, n) => make(n ? "th.num" : "th", { scope: "col" }, text));
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody"));
}

function rowOfTransfers(tier) {
  const name = make("span.key." + tone(tier.name), {}, tier.name);
  return make("tr", {}, make("th", { scope: "row" }, name), ...Array.from({ length: 4 }, () => make("td.num")));
}
