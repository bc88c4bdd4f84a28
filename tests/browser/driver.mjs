// Drives Chromium for tests in Python: a line of JSON in, a line of JSON out. Every command is a page's own method, or
// one of those below; the answer is what it returned.
//
//     {"call": "open", "with": [{"viewport": {...}, "colorScheme": "dark"}]}
//     {"call": "evaluate", "with": ["document.title"]}

import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const [executablePath, userData] = process.argv.slice(2);
const args = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
const WAIT_MS_MOST = 30000;
const COMMAND_MS_MOST = 60000;
const CLOSE_MS_MOST = 10000;
let context;
let page;
let troubles = [];

// What the driver can do beside the page's own methods.
const own = {
  // A new window, with an empty profile; the one before it is closed.
  async open(options) {
    await context?.close();
    troubles = [];
    context = await chromium.launchPersistentContext(`${userData}/${performance.now()}`, { executablePath, args, ...options });
    page = context.pages()[0] ?? (await context.newPage());
    page.setDefaultTimeout(20000);
    page.on("pageerror", (error) => troubles.push(String(error)));
    page.on("console", (message) => message.type() === "error" && troubles.push(message.text()));
    page.on("request", (request) => troubles.push(...foreign(request.url())));
  },
  async press(key) {
    await page.keyboard.press(key);
  },
  // Until the expression is true. Not the page's own way, which the page's policy does not allow.
  async waitUntil(expression) {
    const until_ms = performance.now() + WAIT_MS_MOST;
    while (!(await page.evaluate(expression))) {
      if (performance.now() > until_ms) throw new Error(`not true in time: ${expression}`);
      await page.waitForTimeout(50);
    }
  },
  async point(x, y) {
    await page.mouse.move(x, y);
  },
  // A hidden page is one in another tab: it is told so.
  async hide(hidden) {
    await page.evaluate((now) => {
      Object.defineProperty(document, "hidden", { value: now, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }, hidden);
  },
  // Errors of the page and of its policy, and requests to other places, since it was opened.
  async troubles() {
    return troubles;
  },
  async screenshot(options) {
    await page.screenshot(options);
  },
  async goto(url) {
    const response = await page.goto(url);
    return response?.status() ?? 0;
  },
};

function foreign(url) {
  const { protocol, hostname } = new URL(url);
  return protocol === "data:" || hostname === "127.0.0.1" ? [] : [`a request to ${url}`];
}

// So that a page or a browser that hangs fails a test, instead of holding it up.
function late(name) {
  return new Promise((_, fail) => setTimeout(() => fail(new Error(`no end of ${name}`)), COMMAND_MS_MOST).unref());
}

function say(answer) {
  process.stdout.write(JSON.stringify(answer) + "\n");
}

say({ ready: true });
for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  try {
    const call = own[asked.call] ?? ((...given) => page[asked.call](...given));
    say({ value: (await Promise.race([call(...asked.with), late(asked.call)])) ?? null });
  } catch (error) {
    say({ error: String(error) });
  }
}
await Promise.race([context?.close(), new Promise((end) => setTimeout(end, CLOSE_MS_MOST))]);
process.exit(0);
