// The live view beside an engine that works: what it shows, that it asks for a key where one is needed, and that ten
// thousand units are drawn fast enough.

import { axe, check, page, program, same, shoot } from "./tools.mjs";

const FRAMES_PER_S = 30;
const UNITS = 10_000;

async function ask(address, text, tokens) {
  const body = { messages: [{ role: "user", content: text }], max_tokens: tokens, ignore_eos: true, thinking: { type: "disabled" } };
  const answer = await fetch(`${address}/v1/chat/completions`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  return (await answer.json()).usage;
}

/** A server that may time its operators. */
async function operators(browser, binary, shots) {
  const say = (what) => `live, operators: ${what}`;
  const timed = await program(binary, ["serve", "--port", "0", "--kv-cache-memory-bytes", "64M", "--operator-times"], /ready on (\S+)/);
  const url = `${timed.address}/explore/#live`;
  try {
    const { page: opened, faults, close } = await page(browser, url);
    await opened.waitForFunction(() => document.getElementById("live-said").textContent === "");
    await ask(timed.address, "the river and the house", 60);
    await opened.waitForSelector("#live-operators tbody tr:nth-child(10)", { state: "visible" });
    const table = await opened.$$eval("#live-operators tbody tr", (rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent)));
    const [us, shares] = [2, 3].map((column) => table.map((row) => Number.parseFloat(row[column])));
    check(say("each has calls, time and share, the longest first"), table.every((row) => row.length === 4 && Number(row[1]) > 0)
      && us.every((value, index) => index === 0 || value <= us[index - 1]), table);
    const sum = shares.reduce((all, share) => all + share, 0);
    check(say("shares are of all of them"), Math.abs(sum - 100) < 0.05 * shares.length + 0.01, sum);
    check(say("the head is called once a step"), table.some(([name, calls]) => name === "lm_head" && calls === "1"), table);
    check(say("how many steps these are is said"), /^Means of [\d,]+ steps: [\d.]+ ms/.test(await opened.textContent("#live-operator-note")));
    const region = opened.locator("[role=region][aria-label=Operators]");
    await region.focus();
    check(say("the keyboard reaches the table"), await region.evaluate((element) => element === document.activeElement));
    same(say("axe finds nothing serious"), await axe(opened), []);
    same(say("no error, nothing leaves the origin"), faults, []);
    await close();
    const dark = await page(browser, url, { viewport: { width: 360, height: 740 }, colorScheme: "dark" });
    await dark.page.waitForSelector("#live-operators tbody tr:nth-child(10)", { state: "visible" });
    same(say("a phone does not scroll sideways"), await dark.page.evaluate(() => document.documentElement.scrollWidth), 360);
    same(say("axe finds nothing serious in the dark"), await axe(dark.page), []);
    await dark.close();
    await shoot(browser, url, "live-operators", shots, (shot) => shot.waitForSelector("#live-operators tbody tr:nth-child(10)", { state: "visible" }));
  } finally {
    timed.end();
  }
}

export async function live(browser, address, binary, shots) {
  const url = `${address}/explore/#live`;
  const say = (what) => `live: ${what}`;
  const { page: opened, faults, close } = await page(browser, url);
  const long = "the river and the house ".repeat(120);
  await opened.waitForFunction(() => document.getElementById("live-said").textContent === "");
  const asked = [ask(address, long, 400), ask(address, `${long} again`, 400)];
  await opened.waitForFunction(() => [...document.querySelectorAll("#live-requests td")].some((cell) => cell.textContent === "decode"));
  check(say("a request is seen as it decodes"), true);
  check(say("its units are counted"), await opened.$$eval("#live-requests tbody tr", (rows) => rows.some((row) => /[1-9]/.test(row.lastChild.textContent))));
  // The canvases are drawn again when the screenshot has made the page as tall as it is.
  if (shots) await opened.setViewportSize({ width: 1280, height: 2140 });
  if (shots) await opened.waitForTimeout(700);
  if (shots) await opened.screenshot({ path: `${shots}/live-busy.png`, fullPage: true });
  const usage = await Promise.all(asked);
  await opened.waitForFunction(() => document.querySelector("#live-requests tbody").textContent.includes("Nothing runs"));
  const [prompt] = usage.map((one) => one.prompt_tokens);
  const shown = (await opened.textContent("#live-reports tbody")).replaceAll(",", "");
  check(say("its prompt and what was reused of it are told"), shown.includes(String(prompt)), shown);
  const latencies = await opened.$$eval("#live-latencies tbody tr", (rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent)));
  check(say("latencies of the last minute, of both requests"), latencies.length === 3
    && latencies.every((row) => Number(row[4]) >= 2 && row.slice(1, 4).every((value) => /^[\d.]+ (ms|s)$/.test(value))), latencies);
  check(say("what a step is made of is said"), /in the backend/.test(await opened.textContent("#live-step-note")));
  check(say("without the flag no operators, and how to get them"), /--operator-times/.test(await opened.textContent("#live-operator-note"))
    && !(await opened.isVisible("#live-operators")));
  check(say("the tree holds its blocks"), (await opened.textContent(".tree")).includes("tokens 0 to"));
  check(say("pools are described for those who do not see"), /units used/.test(await opened.textContent(".what .number"))
    && /free/.test(await opened.getAttribute("canvas[aria-label*='large pool']", "aria-label")));
  same(say("axe finds nothing serious"), await axe(opened), []);
  same(say("no error, nothing leaves the origin"), faults, []);

  // Made-up views of ten thousand units that change ten times a second, for three seconds.
  const measured = await opened.evaluate(async ([units]) => {
    const { board } = await import("./live.js");
    location.hash = "#memory";
    await new Promise((resolve) => setTimeout(resolve, 300));
    const { element, show } = board();
    document.getElementById("view").replaceChildren(element);
    const view = (turn) => {
      const runs = [];
      for (let at = 0; at < units; at += 4) runs.push((at / 4 + turn) % 6, 4);
      const pool = (name) => ({ name, total: units, runs });
      const list = (count, make) => Array.from({ length: count }, (_, index) => make(index));
      return { running: 32, waiting: 3, seats: 32, steps: turn, prompt_tokens: turn * 90, output_tokens: turn * 32, preempted: 0, stalled: false,
        drafts_proposed: [9, 8, 7, 0], drafts_accepted: [8, 5, 2, 0], prefix: { queries: 1, query_tokens: 9, hits: 1, hit_tokens: 4, blocks: 2, checkpoints: 1, evicted_blocks: 0 },
        pools: [pool("large"), { name: "middle", total: 500, runs: [1, 500] }], step_list: list(4, (index) => [turn * 4 + index, 4000 + index * 900, index, 32, 32, 3900 + index * 800]),
        latencies: Object.fromEntries(["ttft_ms", "tpot_ms", "queue_ms"].map((name) => [name, { count: 9, p50: 1, p90: 2, p99: 3 }])),
        requests: list(32, (id) => ({ id, phase: "decode", prompt: 4096, cached: 2048, committed: 4100 + turn, output: turn, most: 900, units: [20, 16, 16], priority: 0 })),
        tree: list(60, (id) => ({ id, parent: id % 3 ? id - 1 : null, depth: id % 3, blocks: 1, checkpoints: 1, uses: 2, held: true, idle: 0 })), tree_hidden: 0,
        operators: { steps: 4, times: list(30, (index) => ({ name: `operator ${index}`, calls: 4 * index + 4, us: 900 + turn + index })) },
        reports: list(24, () => ({ prompt_tokens: 4096, cached_tokens: 2048, ended_by: "diverged" })) };
    };
    let [frames, turn, next] = [0, 0, 0];
    const began = performance.now();
    await new Promise((resolve) => {
      const frame = (now) => {
        frames += 1;
        if (now >= next) {
          show(view(turn++));
          next = now + 100;
        }
        if (now - began > 3000) resolve();
        else requestAnimationFrame(frame);
      };
      requestAnimationFrame(frame);
    });
    return { frames: (frames * 1000) / (performance.now() - began), turns: turn };
  }, [UNITS]);
  check(say(`${UNITS} units are drawn at more than ${FRAMES_PER_S} frames/s`), measured.frames > FRAMES_PER_S, measured);
  console.log(`     ${measured.frames.toFixed(0)} frames/s, ${measured.turns} views`);
  await close();

  const phone = await page(browser, url, { viewport: { width: 360, height: 740 } });
  await phone.page.waitForFunction(() => document.getElementById("live-said").textContent === "");
  same(say("a phone does not scroll sideways"), await phone.page.evaluate(() => document.documentElement.scrollWidth), 360);
  await phone.close();
  await shoot(browser, url, "live", shots, (shot) => shot.waitForFunction(() => document.querySelectorAll(".tree li").length > 0));

  await operators(browser, binary, shots);

  const locked = await program(binary, ["serve", "--port", "0", "--kv-cache-memory-bytes", "64M", "--api-key", "secret"], /ready on (\S+)/);
  try {
    const asks = await page(browser, `${locked.address}/explore/#live`);
    await asks.page.waitForSelector("#live-key:visible");
    await asks.page.fill("#live-key", "secret");
    await asks.page.click("text=Look");
    await asks.page.waitForSelector("#live-facts dd");
    check(say("a server with keys asks for one"), true);
    await asks.close();
  } finally {
    locked.end();
  }
}
