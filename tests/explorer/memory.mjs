// The memory view: its numbers are those of `longwave kv --json`, for settings drawn from a seed.

import { execFileSync } from "node:child_process";

import { axe, check, page, same, shoot } from "./tools.mjs";

const SETTINGS = 20;

/** Numbers below `bound` from a seed (mulberry32). */
function numbers(seed) {
  let state = seed;
  return (bound) => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) % bound;
  };
}

const shown = (opened) => opened.$$eval("main data", (all) => Object.fromEntries(all.map((one) => [one.id, Number(one.value)])));

function wanted(json) {
  const of = (list, name, prefix) => Object.fromEntries(list.map((line) => [`${prefix}-${line[name]}`, line.total_bytes]));
  return {
    payload: json.payload.total_bytes, v32: json.v32.total_bytes, "per-token": json.payload.bytes_per_token, weights: json.weights.bytes,
    ...of(json.payload.caches, "cache", "cache"), ...of(json.allocated.buckets, "bucket", "pool"), allocated: json.allocated.total_bytes,
    fit: json.fit.requests, "fit-cache": json.fit.cache_bytes,
  };
}

export async function memory(browser, base, place, binary, shots) {
  const url = `${base}#memory`;
  const say = (what) => `${place}: memory: ${what}`;
  const { page: opened, faults, close } = await page(browser, url);
  await opened.waitForSelector("#fit");
  await opened.waitForFunction(() => document.querySelectorAll('[data-field="model"] option').length >= 4);
  const below = numbers(7);
  const pick = (list) => list[below(list.length)];
  for (let turn = 0; turn < SETTINGS; turn++) {
    const setting = { model: pick(["flash", "pro", "flash-0731", "pro-0813"]), cache: pick(["fp8", "bf16"]), index: pick(["fp4", "fp8", "bf16"]),
      gpuGb: pick([80, 141, 192, 288]), gpus: pick([1, 2, 4, 8, 16]) };
    const context = place === "files" ? 1024 * 2 ** below(11) : 1 + below(1048576);
    for (const [field, value] of Object.entries(setting)) await opened.selectOption(`[data-field="${field}"]`, String(value));
    if (place === "files") await opened.getByLabel("Context", { exact: false }).first().fill(String(Math.log2(context / 1024)));
    else {
      await opened.fill("#context-typed", String(context));
      await opened.press("#context-typed", "Enter");
    }
    const args = ["kv", setting.model, "--context", context, "--cache", setting.cache, "--index", setting.index, "--gpus", setting.gpus,
      "--gpu-memory", setting.gpuGb * 1e9, "--json"];
    const right = wanted(JSON.parse(execFileSync(binary, args.map(String), { encoding: "utf8" })));
    // The last answer may still be on its way.
    await opened.waitForFunction((numbers) => Object.entries(numbers).every(([id, value]) => Number(document.getElementById(id)?.value) === value), right, { timeout: 10_000 })
      .catch(() => {});
    same(say(`${setting.model}, ${context} tokens, ${setting.cache}, ${setting.index}, ${setting.gpus} x ${setting.gpuGb} GB`), await shown(opened), right);
  }
  if (place !== "files") {
    await opened.fill("#context-typed", "2M");
    await opened.press("#context-typed", "Enter");
    check(say("a context that is too long is said"), (await opened.textContent(".error")).includes("1 to 1,048,576 tokens"));
  }
  same(say("axe finds nothing serious"), await axe(opened), []);
  same(say("no error, nothing leaves the origin"), faults, []);
  await close();
  const phone = await page(browser, url, { viewport: { width: 360, height: 740 } });
  await phone.page.waitForSelector("#fit");
  same(say("a phone does not scroll sideways"), await phone.page.evaluate(() => document.documentElement.scrollWidth), 360);
  await phone.close();
  if (place === "server") await shoot(browser, url, "memory", shots, (opened) => opened.waitForSelector("#fit"));
}
