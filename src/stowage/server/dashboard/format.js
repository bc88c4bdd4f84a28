// How numbers, sizes and times look. What is not known is a dash.
const NONE = "–";

function whole(n) {
  return n == null ? NONE : Math.round(n).toLocaleString("en-US");
}

// Up to a hundred million in full: these numbers are to be compared with those of /metrics.
function count(n) {
  if (n == null || n < 1e8) return whole(n);
  return n < 1e9 ? (n / 1e6).toFixed(1) + " M" : (n / 1e9).toFixed(2) + " G";
}

function size(bytes) {
  if (bytes == null) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (bytes >= 1024 && at < units.length - 1) {
    bytes /= 1024;
    at += 1;
  }
  return (at && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes).toString()) + " " + units[at];
}

function seconds(s) {
  if (s == null) return NONE;
  if (s < 0.0005) return "0 ms";
  if (s < 0.01) return (s * 1000).toFixed(1) + " ms";
  if (s < 1) return Math.round(s * 1000) + " ms";
  if (s < 60) return s.toFixed(s < 10 ? 2 : 1) + " s";
  return duration(s);
}

function duration(s) {
  if (s < 60) return Math.floor(s) + " s";
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return minutes + " min " + Math.floor(s % 60) + " s";
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? hours + " h " + (minutes % 60) + " min" : Math.floor(hours / 24) + " d " + (hours % 24) + " h";
}

function ago(s) {
  if (s < 1) return "now";
  if (s < 60) return Math.floor(s) + " s ago";
  return s < 3600 ? Math.floor(s / 60) + " min ago" : Math.floor(s / 3600) + " h ago";
}

function percent(share) {
  if (share == null) return NONE;
  const hundredth = share * 100;
  return (hundredth > 0 && hundredth < 9.95 ? hundredth.toFixed(1) : Math.round(hundredth)) + " %";
}

function rate(n, unit) {
  if (n == null) return NONE;
  return (unit === "B" ? size(n) : n > 0 && n < 9.95 ? n.toFixed(1) : whole(n)) + (unit === "B" ? "/s" : " " + unit);
}

function money(amount) {
  return amount.toFixed(amount < 10 ? 2 : 0);
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function clock(epoch_s) {
  return new Date(epoch_s * 1000).toLocaleTimeString("en-GB");
}

function plural(n, word, words = word + "s") {
  return whole(n) + " " + (n === 1 ? word : words);
}

const KINDS = { full: "full attention", sliding: "sliding window", chunked: "chunked-local", recurrent: "recurrent state" };
const TONES = ["weights", "device", "host", "disk", "valkey", "object", "computed", "reused"];

// The class that gives a tier its color.
function tone(tier) {
  return TONES.includes(tier) ? tier : "other";
}
