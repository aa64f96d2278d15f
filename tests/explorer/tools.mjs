// What the tests of all views share: programs to talk to, pages that note every fault, checks that are counted.

import { spawn } from "node:child_process";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { join, normalize } from "node:path";

const AXE = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const READY_MS = 120_000;

export const checks = { passed: 0, failed: 0 };

export function check(name, good, detail = "") {
  checks[good ? "passed" : "failed"] += 1;
  if (good) console.log(`ok   ${name}`);
  else console.log(`FAIL ${name}${detail === "" ? "" : `: ${typeof detail === "string" ? detail : JSON.stringify(detail)}`}`);
}

export const same = (name, got, wanted) =>
  check(name, JSON.stringify(got) === JSON.stringify(wanted), `got ${JSON.stringify(got)}, wanted ${JSON.stringify(wanted)}`);

/** Starts the program and waits for the line that names its address. */
export function program(binary, args, line) {
  const child = spawn(binary, args, { stdio: ["ignore", "ignore", "pipe"], env: { ...process.env, NO_COLOR: "1" } });
  return new Promise((resolve, reject) => {
    let log = "";
    const timer = setTimeout(() => reject(new Error(`not ready: ${log}`)), READY_MS);
    child.on("exit", (code) => reject(new Error(`${args[0]} ended with ${code}: ${log}`)));
    child.stderr.on("data", (data) => {
      log += data;
      const found = line.exec(log);
      if (!found) return;
      clearTimeout(timer);
      resolve({ address: found[1], end: () => child.kill("SIGKILL") });
    });
  });
}

/** Serves a folder, as any web server would. */
export function folder(root) {
  const types = { js: "text/javascript", css: "text/css", html: "text/html", json: "application/json" };
  const server = createServer(async (request, answer) => {
    const path = normalize(new URL(request.url, "http://x").pathname);
    const file = path.endsWith("/") ? `${path}index.html` : path;
    try {
      const data = await readFile(join(root, file));
      answer.writeHead(200, { "content-type": types[file.split(".").pop()] ?? "text/plain" }).end(data);
    } catch {
      answer.writeHead(404).end();
    }
  });
  return new Promise((resolve) => {
    server.listen(0, "127.0.0.1", () =>
      resolve({ address: `http://127.0.0.1:${server.address().port}`, end: () => server.close() }));
  });
}

/** A page of its own; `faults` collects console errors, failures and requests to other origins. */
export async function page(browser, url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, reducedMotion: "reduce", ...options });
  const opened = await context.newPage();
  const faults = [];
  opened.on("console", (message) => message.type() === "error" && faults.push(message.text()));
  opened.on("pageerror", (error) => faults.push(String(error)));
  opened.on("request", (request) => {
    const target = request.url();
    if (!target.startsWith(new URL(url).origin) && !target.startsWith("data:")) faults.push(`asks ${target}`);
  });
  opened.on("response", (response) => response.status() >= 400 && faults.push(`${response.status()} ${response.url()}`));
  await opened.goto(url);
  return { page: opened, faults, close: () => context.close() };
}

/** Faults that axe finds serious or critical. */
export async function axe(opened) {
  const context = opened.context();
  // Evaluated, because the page's own policy lets no foreign script in.
  await opened.evaluate(await readFile(AXE, "utf8"));
  const found = await opened.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  void context;
  return found.violations.filter(({ impact }) => ["serious", "critical"].includes(impact))
    .map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map((node) => node.target.join(" ")).join("; ")}`);
}

/** Pictures of a view on a phone, a laptop and a very large screen, light and dark. */
export async function shoot(browser, url, name, folder, ready) {
  if (!folder) return;
  for (const [size, width, height] of [["phone", 360, 740], ["desktop", 1280, 900], ["4k", 3840, 2160]]) {
    for (const colorScheme of ["light", "dark"]) {
      const { page: opened, close } = await page(browser, url, { viewport: { width, height }, colorScheme });
      await ready(opened);
      await opened.screenshot({ path: join(folder, `${name}-${size}-${colorScheme}.png`), fullPage: size !== "4k" });
      await close();
    }
  }
}
