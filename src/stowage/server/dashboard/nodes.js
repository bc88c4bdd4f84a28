// Elements: made once, changed where something has changed, so that focus and selection stay. Data becomes text or a
// width, never markup.
const SVG = "http://www.w3.org/2000/svg";

function make(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function draw(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function byId(id) {
  return document.getElementById(id);
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function mark(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

// A number, with its exact value beside what is shown of it.
function tell(node, text, exact) {
  say(node, text);
  mark(node, "data-value", exact == null ? "" : exact);
}

// One child of `parent` for each item, in this order; those that are there already are kept.
function list(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let before = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let node = old.get(name);
    if (!node) {
      node = create(item);
      node.dataset.key = name;
    }
    old.delete(name);
    if (node === before) before = before.nextElementSibling;
    else parent.insertBefore(node, before);
    update(node, item);
  }
  for (const node of old.values()) node.remove();
}

// A bar of parts [{share, tone, faint}], which say in words what it shows.
function fill(bar, parts, words) {
  mark(bar, "role", "img");
  mark(bar, "aria-label", words);
  mark(bar, "title", words);
  while (bar.children.length < parts.length) bar.append(document.createElement("i"));
  while (bar.children.length > parts.length) bar.lastElementChild.remove();
  parts.forEach((part, at) => {
    const node = bar.children[at];
    const look = tone(part.tone) + (part.faint ? " faint" : "");
    if (node.className !== look) node.className = look;
    node.style.width = (100 * Math.min(1, Math.max(0, part.share))).toFixed(3) + "%";
  });
}
