// The live view: what the running engine holds and does, a few times a second, while this page is looked at.

import { h, legend } from "./dom.js";
import { grouped } from "./memory_data.js";
import { USES, drawPool, drawSteps, unitSize } from "./live_figures.js";
import { means, recent, summed } from "./live_operators.js";
import { follow } from "./live_source.js";

const STEPS_KEPT = 1000;
const INKS = ["ink-free", "ink-c4_main", "ink-window", "ink-c4_index", "ink-c128_main", "ink-text"];
const ENDS = {
  off: "the cache is off", every_position_wanted: "logits of all positions were asked for", too_short: "not longer than a block",
  empty: "nothing was cached", no_such_prefix: "no cached text begins like it", diverged: "the cached text goes on differently",
  cached_text_ends: "the cached text ended", evicted: "the next block had to go", checkpoint_missing: "no checkpoint was kept",
  checkpoint_evicted: "the checkpoint had to go", prompt_end: "all that can be reused",
};

const LATENCIES = { ttft_ms: "To the first token", tpot_ms: "Per token behind it", queue_ms: "Waiting for a seat" };

/** Milliseconds to three digits. */
const ms = (value) => (value >= 1000 ? `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s` : `${value.toFixed(value < 1 ? 2 : value < 100 ? 1 : 0)} ms`);

/** What steps are made of, on average. */
function split(steps) {
  if (steps.length === 0) return "";
  const mean = (place) => steps.reduce((sum, step) => sum + step[place], 0) / steps.length / 1000;
  const [wall, run] = [mean(1), mean(5)];
  return `Of ${ms(wall)} on average, ${ms(run)} in the backend and ${ms(wall - run)} for planning and the rest of the engine.`;
}

/** What the table of operators is made of. */
function operatorsSaid(steps, us) {
  if (steps === 0) return "No times yet. A server that was started with --operator-times takes them while it works and somebody looks.";
  return `Means of ${grouped(steps)} ${steps === 1 ? "step" : "steps"}: ${ms(us / 1000)} in operators. Steps take longer while somebody looks.`;
}

/** The board without its source, so that it can be tried with made-up views. */
export function board() {
  const facts = h("dl", { class: "facts", id: "live-facts" });
  const pools = h("div", { class: "stack tight" });
  const steps = h("canvas", { role: "img", "aria-label": "Wall time of the last steps" });
  const latencies = h("tbody", {});
  const requests = h("tbody", {});
  const tree = h("ul", { class: "tree" });
  const drafts = h("div", { class: "bars" });
  const reports = h("tbody", {});
  const operators = h("tbody", {});
  const operatorNote = h("p", { class: "note", style: "margin-bottom: 8px", id: "live-operator-note" });
  const operatorTable = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Operators", hidden: true },
    h("table", { id: "live-operators" }, head("Operator", "Calls per step", "µs per step", "Share"), operators));
  const ofOperators = recent();
  const stepNote = h("p", { class: "note", style: "margin-top: 8px", id: "live-step-note" });
  const canvases = new Map();
  const kept = [];
  let before = null;
  let rates = { prompt: 0, output: 0 };
  const element = h("div", { class: "stack" },
    h("section", { class: "card", "aria-label": "Now" }, facts),
    h("section", { class: "card" }, h("h2", {}, "Cache, unit by unit"),
      legend(USES.map(([name], use) => [INKS[use], name, true])), pools),
    h("section", { class: "card" }, h("h2", {}, "Steps"),
      legend([["ink-window", "prompts", true], ["ink-c4_main", "answers", true], ["ink-c128_main", "both", true], ["ink-text", "planning", true]]),
      h("div", { style: "margin-top: 12px" }, steps), stepNote),
    h("section", { class: "card" }, h("h2", {}, "Latencies of the last minute"),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Latencies" }, h("table", { id: "live-latencies" },
        head("", "Median", "90 %", "99 %", "Requests"), latencies))),
    h("section", { class: "card" }, h("h2", {}, "Requests"),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Requests" }, h("table", { id: "live-requests" },
        head("Request", "Phase", "Prompt", "From the cache", "Computed", "Answer", "Units: large, middle, small"), requests))),
    h("div", { class: "columns even" },
      h("section", { class: "card" }, h("h2", {}, "Prefix tree"), tree),
      h("section", { class: "card" }, h("h2", {}, "What was reused, and why no more"),
        h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Reuse" }, h("table", { id: "live-reports" },
          head("Prompt", "Reused", "Ended by"), reports)))),
    h("section", { class: "card" }, h("h2", {}, "Drafts that were right, by place"), drafts),
    h("section", { class: "card" }, h("h2", {}, "Operators of a step"), operatorNote, operatorTable));

  function show(view) {
    const now = performance.now() / 1000;
    if (before && now > before.at) {
      const per = (name) => (view[name] - before.view[name]) / (now - before.at);
      // Smoothed over about two seconds.
      const mix = Math.min(1, (now - before.at) / 2);
      rates = { prompt: rates.prompt * (1 - mix) + per("prompt_tokens") * mix, output: rates.output * (1 - mix) + per("output_tokens") * mix };
    }
    before = { at: now, view };
    kept.push(...view.step_list);
    kept.splice(0, Math.max(0, kept.length - STEPS_KEPT));
    const { prefix } = view;
    const fact = (title, value, detail) => h("div", {}, h("dt", {}, title), h("dd", {}, value, h("small", {}, detail)));
    facts.replaceChildren(
      fact("Running", `${view.running}`, `of ${view.seats} seats`),
      fact("Waiting", `${view.waiting}`, view.stalled ? "no step completes" : `${grouped(view.preempted)} gave up their seats`),
      fact("Answers, tokens/s", rates.output.toFixed(0), `${grouped(view.output_tokens)} in all`),
      fact("Prompts, tokens/s", rates.prompt.toFixed(0), `${grouped(view.prompt_tokens)} computed`),
      fact("Last step", kept.length ? ms(kept.at(-1)[1] / 1000) : "none", `number ${grouped(view.steps)}`),
      fact("From the cache", prefix.query_tokens ? `${((100 * prefix.hit_tokens) / prefix.query_tokens).toFixed(0)} %` : "0 %",
        `${grouped(prefix.hit_tokens)} of ${grouped(prefix.query_tokens)} prompt tokens`));
    // One size for all pools, so that they compare.
    const size = unitSize(Math.max(...view.pools.map((pool) => pool.total)), pools.clientWidth || 300);
    for (const pool of view.pools) drawOne(pool, size);
    drawSteps(steps, kept);
    stepNote.textContent = split(kept);
    const timed = ofOperators(view.operators, now);
    const mean = means(timed);
    operatorNote.textContent = operatorsSaid(timed.steps, mean.us);
    operatorTable.hidden = timed.steps === 0;
    rows(operators, mean.lines, "", 4);
    rows(latencies, Object.entries(LATENCIES).map(([name, said]) => {
      const { count, p50, p90, p99 } = view.latencies[name];
      return [said, ...[p50, p90, p99].map((value) => (value === null ? "–" : ms(value))), grouped(count)];
    }), "", 5);
    rows(requests, view.requests.map((one) => [`${one.id}`, one.phase, grouped(one.prompt), grouped(one.cached), grouped(one.committed),
      `${grouped(one.output)} of ${grouped(one.most)}`, one.units.map(grouped).join(", ")]), "Nothing runs.", 7);
    rows(reports, view.reports.map((one) => [grouped(one.prompt_tokens), grouped(one.cached_tokens), ENDS[one.ended_by] ?? one.ended_by]),
      "No request yet.", 3);
    drawTree(view);
    const most = view.drafts_proposed.filter(Boolean).length;
    drafts.replaceChildren(...(most === 0 ? [h("p", { class: "note" }, "Nothing was drafted.")] : view.drafts_proposed.slice(0, most).map((proposed, place) => {
      const share = (100 * view.drafts_accepted[place]) / proposed;
      return h("div", { class: "bar" }, h("div", { class: "what" }, h("span", {}, `Draft ${place + 1}`), h("span", { class: "number" }, `${share.toFixed(0)} % of ${grouped(proposed)}`)),
        h("div", { class: "track", "aria-hidden": "true" }, h("span", { class: "fill-c4_main", style: `width: ${share}%` })));
    })));
  }

  function drawOne(pool, size) {
    if (!canvases.has(pool.name)) {
      const canvas = h("canvas", { role: "img" });
      const text = h("span", { class: "number" });
      pools.append(h("div", {}, h("div", { class: "what" }, h("h3", {}, `${pool.name} pool`), text), canvas));
      canvases.set(pool.name, { canvas, text });
    }
    const { canvas, text } = canvases.get(pool.name);
    const counts = drawPool(canvas, pool, size);
    const said = `${grouped(pool.total - counts[0])} of ${grouped(pool.total)} units used`;
    text.textContent = said;
    canvas.setAttribute("aria-label", `${pool.name} pool: ${USES.map(([name], use) => `${counts[use]} ${name}`).join(", ")}`);
  }

  function drawTree({ tree: runs, tree_hidden: hidden }) {
    const children = Map.groupBy(runs, (run) => run.parent);
    const list = (parent, level) => (children.get(parent) ?? []).flatMap((run) => {
      const uses = run.uses ? `, ${run.uses} ${run.uses === 1 ? "request" : "requests"} began here` : "";
      const item = h("li", { style: `padding-left: ${Math.min(level, 8) * 16}px` },
        h("span", { class: `swatch solid ${run.held ? "ink-c4_main" : "ink-c128_main"}`, "aria-hidden": "true" }),
        h("span", {}, `tokens ${grouped(run.depth * 256)} to ${grouped((run.depth + run.blocks) * 256 - 1)}`,
          h("small", {}, `${run.blocks} ${run.blocks === 1 ? "block" : "blocks"}, ${run.checkpoints} with a checkpoint${uses}`)));
      return [item, ...list(run.id, level + 1)];
    });
    tree.replaceChildren(...list(null, 0).slice(0, 60));
    if (runs.length === 0) tree.append(h("li", { class: "note" }, "Nothing is cached."));
    if (hidden > 0) tree.append(h("li", { class: "note" }, `${grouped(hidden)} more, used longer ago`));
  }

  return { element, show };
}

const head = (...names) => h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name))));

/** Replaces the rows of a table body. */
function rows(body, lines, nothing, columns) {
  body.replaceChildren(...(lines.length ? lines.map((line) => h("tr", {}, line.map((text, place) =>
    (place ? h("td", {}, text) : h("th", { scope: "row" }, text))))) : [h("tr", {}, h("td", { class: "text", colspan: columns }, nothing))]));
}

export function live(main) {
  const { element, show } = board();
  const said = h("p", { class: "note", role: "status", id: "live-said" }, "Waiting for the first view …");
  const typed = h("input", { type: "text", id: "live-key", autocomplete: "off", spellcheck: "false" });
  const form = h("form", { class: "controls card", hidden: true },
    h("div", { class: "field" }, h("label", { for: "live-key" }, "This server asks for a key"), typed),
    h("button", { class: "main", type: "submit" }, "Look"));
  let end = () => {};
  let newest = null;
  let frame = 0;
  const draw = () => { frame = 0; show(newest); };
  const begin = () => {
    form.hidden = true;
    end = follow({
      // A view that came before the last one was drawn takes its place; its steps and operators are kept.
      show: (view) => {
        if (frame) {
          view.step_list = [...newest.step_list, ...view.step_list];
          view.operators = summed([newest.operators, view.operators]);
        }
        newest = view;
        said.textContent = "";
        frame ||= requestAnimationFrame(draw);
      },
      say: (text) => { said.textContent = text; },
      key: () => typed.value.trim(),
      needKey: () => { form.hidden = false; said.textContent = ""; typed.focus(); },
    });
  };
  form.addEventListener("submit", (event) => { event.preventDefault(); end(); begin(); });
  // Nobody looks at a hidden page.
  const hidden = () => { end(); if (!document.hidden) begin(); };
  document.addEventListener("visibilitychange", hidden);
  main.append(h("h1", {}, "What the engine does now"),
    h("p", { class: "lead" }, "Counts and places of this server's requests, never their text. When this page is closed nothing of it is computed."),
    said, form, element);
  begin();
  return () => { document.removeEventListener("visibilitychange", hidden); cancelAnimationFrame(frame); end(); };
}
