// The rules of DeepSeek-V4's attention: what a token may read, and why. Nothing here comes from a model.
//
// Any number of tokens from 1 to 64, one after the other; a token or an entry that is hovered, focused or tapped shows its
// links and the reason in words.

import { choice, h, legend, range } from "./dom.js";
import { build } from "./attention_figure.js";
import { mask } from "./attention_mask.js";
import { KINDS, entries, span, windowOf } from "./rules.js";

const STEP_MS = 700;

export function lesson(main) {
  const state = { kind: "c4", scale: 1, count: 13, time: 12, k: 16, shown: null, hover: null };
  state.shown = { row: "token", index: 12 };
  let figure = null;
  let timer = null;

  const picture = h("div", { class: "scroll", id: "lesson" });
  const matrix = h("div", { class: "scroll" });
  const why = h("div", { class: "why", "aria-live": "polite", id: "why" });
  const keys = h("ul", { class: "legend" });
  const play = h("button", { class: "main", type: "button", id: "play", onclick: () => (timer ? stop() : start()) }, "Play");
  const back = h("button", { type: "button", "aria-label": "One token back", onclick: () => { stop(); at(state.time - 1); } }, "‹");
  const next = h("button", { type: "button", "aria-label": "One token on", onclick: () => { stop(); at(state.time + 1); } }, "›");

  const unit = () => (state.scale === 1 ? "tokens" : `squares of ${state.scale} tokens`);
  const count = range({ label: "Tokens", min: 1, max: 64, value: state.count, show: (n) => `${n * state.scale}`,
    oninput: (n) => { stop(); state.count = n; at(n - 1, true); } });
  const time = range({ label: "Now at token", min: 0, max: 12, value: 12, show: (n) => `${n * state.scale + state.scale - 1}`,
    oninput: (n) => { stop(); at(n); } });
  const picks = range({ label: "Entries a query picks", min: 1, max: 16, value: 16, show: (n) => (n === 16 ? "all" : `${n}`),
    oninput: (n) => { state.k = n; refresh(); } });
  const kinds = choice({ label: "Layer", value: "c4", options: Object.entries(KINDS).map(([key, kind]) => [key, kind.name]),
    onchange: (kind) => { state.kind = kind; scaled(kind === "c4" ? 1 : 32); } });
  const scaleField = h("div", {});

  function scaled(scale) {
    stop();
    const keep = state.scale === scale ? state.count : scale === 1 ? 13 : 24;
    Object.assign(state, { scale, count: keep });
    count.set(keep);
    picks.field.hidden = state.kind !== "c4";
    scaleField.replaceChildren(...(state.kind === "c4" ? [] : [choice({
      label: "One square is", value: String(scale), options: [["1", "1 token"], ["32", "32 tokens"]],
      onchange: (value) => scaled(Number(value)),
    })]));
    at(keep - 1, true);
  }

  /** The newest token is `square`, and it is shown. */
  function at(square, rebuild = false) {
    state.time = Math.max(0, Math.min(state.count - 1, square));
    state.shown = { row: "token", index: state.time };
    state.hover = null;
    time.limit(state.count - 1);
    time.set(state.time);
    if (rebuild) make();
    else refresh();
  }

  function start() {
    if (state.time >= state.count - 1) at(0);
    play.textContent = "Pause";
    timer = setInterval(() => {
      if (state.time >= state.count - 1) stop();
      else at(state.time + 1);
    }, STEP_MS);
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }

  const act = {
    hover: (target) => { state.hover = target; refresh(); },
    choose: (target) => { stop(); state.shown = target; state.hover = null; refresh(); },
    rows: () => figure.rows,
    per: () => KINDS[state.kind].stride / state.scale,
  };

  function make() {
    figure = build({ ...state, width: Math.max(200, picture.clientWidth - 2), act });
    picture.replaceChildren(figure.svg);
    refresh();
    // The newest token stays in sight.
    picture.scrollLeft = picture.scrollWidth;
  }

  function refresh() {
    const shown = state.hover ?? state.shown;
    const found = figure.paint({ ...state, shown });
    const focused = document.activeElement?.closest?.(".cell");
    for (const [row, cells] of Object.entries(figure.rows)) {
      const stopAt = focused?.dataset.row === row ? Number(focused.dataset.index)
        : state.shown.row === row ? state.shown.index : 0;
      cells.forEach((cell, index) => cell.setAttribute("tabindex", index === Math.min(stopAt, cells.length - 1) ? "0" : "-1"));
    }
    back.disabled = state.time === 0;
    next.disabled = state.time >= state.count - 1;
    why.replaceChildren(...explain(state, shown, found));
    const row = shown.row === "token" ? shown.index : null;
    matrix.replaceChildren(mask({ ...state, width: Math.max(200, matrix.clientWidth - 2), row }));
    const ink = state.kind === "c128" ? "ink-c128_main" : "ink-c4_main";
    keys.replaceChildren(...legend([
      ["ink-window", "window"],
      ...(state.kind === "window" ? [] : [[ink, "entry that is read"], ["ink-other", state.kind === "c4" ? "entry that is not picked, or not whole yet" : "entry that is not whole yet"]]),
    ]).children);
  }

  main.append(
    h("div", { class: "stack" },
      h("section", { class: "card", "aria-label": "Lesson" },
        h("div", { class: "controls" }, kinds, count.field, picks.field, scaleField),
        h("div", { style: "margin-top: 24px" }, picture),
        h("div", { class: "controls", style: "margin-top: 8px" },
          h("div", { class: "row" }, back, play, next), time.field, keys)),
      h("div", { class: "columns even" },
        h("div", { class: "pile" },
          h("section", { class: "card" }, h("h2", {}, "Why"), why),
          h("section", { class: "card" }, h("h2", {}, "How the entries come about"),
            ABOUT.map((text) => h("p", { class: "note", style: "margin-top: 8px" }, text)))),
        h("section", { class: "card" }, h("h2", {}, "All tokens at once"),
          h("p", { class: "note" }, "A line for each query, a column for all that it could read."),
          h("div", { style: "margin-top: 12px" }, matrix)))));
  let width = 0;
  const sized = new ResizeObserver(() => {
    if (picture.clientWidth !== width) {
      width = picture.clientWidth;
      make();
    }
  });
  scaled(1);
  sized.observe(picture);
  return () => { stop(); sized.disconnect(); };
}

const ABOUT = [
  "A c4a entry is a weighted mean of 8 tokens: the 4 that it closes with and the 4 before them, so each token goes into two entries. The weights are learned, one per channel. Entries begin every 4 tokens.",
  "A query reads an entry once its last token has come: token i reads entry j when i ≥ 4j + 3. For c128a, whose entries are made of 128 tokens without an overlap, that is i ≥ 128j + 127.",
  "In c4a layers a small indexer scores all whole entries and the query reads the best 512 (Flash) or 1,024 (Pro) of them. Up to 2,048 or 4,096 tokens that is all of them. c128a layers read every entry.",
  "The window is read in every layer beside the entries, and recent tokens are seen twice. Pick fewer entries above to see what picking does; the scores here are made up. “A text of yours” has those of the model.",
];

/** The reason in words. */
function explain({ kind, scale, time, k }, shown, found) {
  const p = (...parts) => h("p", {}, ...parts);
  const strong = (text) => h("strong", {}, text);
  const { stride, name } = KINDS[kind];
  const last = (square) => square * scale + scale - 1;
  const list = (numbers) => (numbers.length > 6
    ? `${numbers.slice(0, 3).join(", ")} … ${numbers.at(-1)} (${numbers.length})` : numbers.join(", "));
  if (shown.row === "entry") {
    const j = shown.index;
    const [from, to] = span(kind, j);
    const out = [p(strong(`Entry ${j}`), ` is made of tokens ${from} to ${to}.`)];
    if (j >= found.whole) out.push(p(`It is not there yet: it needs token ${to}, and the newest is ${last(time)}.`));
    else if (found.readers.length === 0) out.push(p("No token so far reads it: others have better scores."));
    else out.push(p(`Tokens from ${to} on may read it (i ≥ ${stride} · ${j} + ${stride - 1} = ${to}).`));
    if (kind === "c4" && k < 16) out.push(p(`With ${k} picks, ${found.readers.length} of the tokens so far do.`));
    return out;
  }
  const i = last(shown.index);
  if (shown.index > time) return [p(strong(`Token ${i}`), " has not come yet.")];
  const [first] = windowOf(i);
  const out = [
    p(strong(`Token ${i}`), scale === 1 ? " reads:" : ", the last one of its square, reads:"),
    p(strong("Window: "), `tokens ${first} to ${i}, ${i - first + 1} of at most 128, itself included.`),
  ];
  if (kind === "window") return [...out, p("A layer of this kind has no entries. What lies before the window has reached it only through other layers.")];
  const whole = entries(kind, i + 1);
  const open = stride * whole + stride - 1;
  if (whole === 0) out.push(p(strong("Entries: "), `none yet. Entry 0 of ${name} needs token ${stride - 1}.`));
  else {
    out.push(p(strong("Entries: "), `${list(found.read)}. Entry ${whole - 1} was whole at token ${stride * (whole - 1) + stride - 1} ≤ ${i}; entry ${whole} needs token ${open}.`));
    if (found.passed.length > 0) out.push(p(strong("Not picked: "), `${list(found.passed)}, whose scores are lower.`));
  }
  if (found.into.length > 0) out.push(p(strong("Goes into: "), `${found.into.length === 1 ? "entry" : "entries"} ${found.into.join(" and ")}.`));
  return out;
}
