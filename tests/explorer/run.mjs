// The explorer in Chromium: run.mjs path/to/longwave [folder for screenshots]
//
// Starts `longwave serve`, `longwave explore` and an exported copy, opens every view in each, and checks what a person would:
// what is shown and said, the keyboard, accessibility (axe), that nothing leaves the origin and no error is logged.

import { execFileSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";

import { answer } from "./answer.mjs";
import { attention } from "./attention.mjs";
import { attentionText } from "./attention_text.mjs";
import { live } from "./live.mjs";
import { memory } from "./memory.mjs";
import { checks, folder, program } from "./tools.mjs";

const [binary, shots] = process.argv.slice(2);
if (!binary) {
  console.error("usage: run.mjs path/to/longwave [folder for screenshots]");
  process.exit(2);
}
const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox"] });
const exported = mkdtempSync(join(tmpdir(), "longwave-explorer-"));
execFileSync(binary, ["explore", "--export", join(exported, "site")], { stdio: "ignore" });
const places = [
  ["server", await program(binary, ["serve", "--port", "0", "--kv-cache-memory-bytes", "64M"], /ready on (\S+)/)],
  ["local", await program(binary, ["explore", "--port", "0"], /is on (\S+?)\/explore/)],
  ["files", await folder(join(exported, "site"))],
];
try {
  for (const [name, place] of places) {
    const base = name === "files" ? `${place.address}/` : `${place.address}/explore/`;
    await attention(browser, base, name, shots);
    await attentionText(browser, base, name, shots);
    await memory(browser, base, name, binary, shots);
    if (name !== "server") continue;
    await live(browser, place.address, binary, shots);
    await answer(browser, place.address, shots);
  }
} finally {
  places.forEach(([, place]) => place.end());
  await browser.close();
  rmSync(exported, { recursive: true });
}
console.log(`explorer: ${checks.passed} checks passed, ${checks.failed} failed`);
process.exit(checks.failed ? 1 : 0);
