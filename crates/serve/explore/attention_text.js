// What the loaded model reads in a text that is typed: for a layer and a token the window, the entries and the sink with
// their weights, as the backend's own attention had them. In the picture of the rules, as bars, and in the text itself.

import { h, legend, select } from "./dom.js";
import { build } from "./attention_figure.js";
import { KINDS, span } from "./rules.js";
import { visible } from "./words.js";

const SHORT = "The river runs past the old house. In the house there is a lamp, and under the lamp lies a letter. Who reads the letter? The river does not read, and the lamp does not read, so the old house reads the letter.";
const LONG = Array(6).fill(SHORT).join(" ");
/** Lines of the list of what weighs most. */
const LISTED = 8;
const ELSEWHERE = {
  files: "These are exported files, without a model. `longwave explore MODEL` shows this page with one; without MODEL it has a tiny one of its own.",
};

/** Shares of what a token read, by kind. */
const sums = ({ window, weights, sink }) => {
  const sum = (list) => list.reduce((total, weight) => total + weight, 0) / 1e6;
  return { sink: sink / 1e6, window: sum(window), entries: sum(weights) };
};
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const ink = (kind) => (kind === "c128" ? "c128_main" : "c4_main");

export function text(main, mode) {
  const state = { layer: 0, kind: "window", scale: 1, count: 0, time: 0, query: 0, hover: null, shown: null };
  let answer = null;
  let figure = null;
  let stop = null;
  let ended = false;

  const typed = h("textarea", { id: "read-text", rows: 3, spellcheck: "false" });
  typed.value = SHORT;
  const key = h("input", { type: "text", id: "read-key", autocomplete: "off", spellcheck: "false" });
  const keyField = h("div", { class: "field", hidden: true }, h("label", { for: "read-key" }, "Key of this server"), key);
  const layers = h("div", {});
  const go = h("button", { class: "main", type: "submit" }, "Read");
  const longer = h("button", { type: "button", onclick: () => { typed.value = LONG; ask(); } }, "A longer text");
  const said = h("p", { class: "error", role: "alert", id: "read-error" });
  const form = h("form", { class: "card" },
    h("div", { class: "field" }, h("label", { for: "read-text" }, "Your text"), typed),
    h("div", { class: "controls", style: "margin-top: 16px" }, layers, keyField, h("div", { class: "row" }, go, longer)), said);
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });

  const picture = h("div", { class: "scroll", id: "read-picture" });
  const keys = h("ul", { class: "legend" });
  const shares = h("div", { id: "read-shares", "aria-live": "polite" });
  const words = h("div", { class: "tokens", role: "listbox", "aria-label": "The text, token by token", id: "read-words" });
  const next = h("p", { class: "note", style: "margin-top: 12px" });
  const results = h("div", { class: "stack", hidden: true },
    h("section", { class: "card" }, h("h2", { id: "read-title" }), picture, keys),
    h("div", { class: "columns even" },
      h("section", { class: "card" }, h("h2", {}, "Where the weight goes"), shares),
      h("section", { class: "card" }, h("h2", {}, "The text"),
        h("p", { class: "note" }, "Filled: weight in the window. Underlined: part of an entry that is read. Choose a token to see what it reads."), words, next)));

  async function ask() {
    stop?.abort();
    const mine = stop = new AbortController();
    said.textContent = "";
    go.disabled = true;
    results.setAttribute("aria-busy", "true");
    try {
      const headers = { "content-type": "application/json" };
      if (key.value.trim()) headers.authorization = `Bearer ${key.value.trim()}`;
      const reply = await fetch("api/attention", { method: "POST", headers, signal: mine.signal,
        body: JSON.stringify({ text: typed.value, layer: state.layer }) });
      const body = await reply.json();
      keyField.hidden = reply.status !== 401 && keyField.hidden;
      if (!reply.ok) throw new Error(body.error?.message ?? `status ${reply.status}`);
      take(body);
    } catch (error) {
      if (mine === stop && !mine.signal.aborted) said.textContent = error.message;
    }
    if (mine === stop) {
      go.disabled = false;
      results.removeAttribute("aria-busy");
    }
  }

  /** A new answer; the token stays where the text has one there. */
  function take(body) {
    const same = answer?.tokens.length === body.tokens.length;
    answer = body;
    Object.assign(state, { hover: null, shown: null });
    state.kind = body.kind;
    // Entries of 128 tokens are far apart: squares of 32 tokens keep them in sight.
    state.scale = body.kind === "c128" ? 32 : 1;
    state.count = Math.ceil(body.tokens.length / state.scale);
    state.time = state.count - 1;
    if (!same) state.query = body.tokens.length - 1;
    results.hidden = false;
    const first = body.tokens[0].text;
    words.replaceChildren(...body.tokens.map(({ text: word }, index) => h("button", {
      type: "button", role: "option", class: "token read", "data-index": index, "aria-selected": "false",
      onclick: () => choose(index), onpointerenter: (event) => event.pointerType === "mouse" && peek(index), onpointerleave: () => peek(null),
      onkeydown: (event) => walk(event, index),
    }, visible(index === 0 ? first : word))));
    next.textContent = body.next ? `The likeliest next token is “${visible(body.next.text)}”.` : "";
    make();
  }

  const last = (square) => Math.min(square * state.scale + state.scale, answer.tokens.length) - 1;
  const choose = (query) => {
    Object.assign(state, { query, hover: null, shown: null });
    refresh();
    centre();
  };
  /** The picture where the token is, when that is not in sight. */
  const centre = () => {
    const rect = figure.rows.token[Math.floor(state.query / state.scale)].querySelector("rect");
    const [left, wide] = ["x", "width"].map((name) => Number(rect.getAttribute(name)));
    const hidden = left < picture.scrollLeft || left + wide > picture.scrollLeft + picture.clientWidth;
    if (hidden) picture.scrollLeft = left + wide / 2 - picture.clientWidth / 2;
  };
  const peek = (query) => {
    state.hover = query === null ? null : { row: "token", query };
    refresh();
  };

  function walk(event, index) {
    const to = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: answer.tokens.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const at = Math.max(0, Math.min(answer.tokens.length - 1, to));
    choose(at);
    words.children[at].focus();
  }

  const act = {
    hover: (target) => { state.hover = target; refresh(); },
    choose: (target) => {
      state.hover = null;
      state.shown = target.row === "entry" ? target : null;
      if (target.row === "token" && Math.floor(state.query / state.scale) !== target.index) state.query = last(target.index);
      refresh();
    },
    rows: () => figure.rows,
    per: () => (KINDS[state.kind].stride || 4) / state.scale,
  };

  function make() {
    const shown = state.scale === 1 ? answer.tokens.map(({ text: word }) => visible(word)) : undefined;
    figure = build({ ...state, width: Math.max(200, picture.clientWidth - 2), act, words: shown, reads: answer.reads });
    picture.replaceChildren(figure.svg);
    refresh();
    centre();
  }

  function refresh() {
    if (!figure) return;
    const target = state.hover ?? state.shown ?? { row: "token", query: state.query };
    const query = target.row === "token" ? target.query ?? last(target.index) : state.query;
    const shown = target.row === "token" ? { row: "token", index: Math.floor(query / state.scale) } : target;
    const found = figure.paint({ ...state, shown, reads: answer.reads, query: target.row === "token" ? query : undefined });
    const focused = document.activeElement?.closest?.(".cell");
    for (const [row, cells] of Object.entries(figure.rows)) {
      const at = focused?.dataset.row === row ? Number(focused.dataset.index)
        : row === "token" ? Math.floor(state.query / state.scale) : 0;
      cells.forEach((cell, index) => cell.setAttribute("tabindex", index === at ? "0" : "-1"));
    }
    title.textContent = target.row === "token"
      ? `Token ${query} “${visible(answer.tokens[query].text)}” in layer ${state.layer}, ${KINDS[state.kind].name}`
      : `Entry ${target.index} in layer ${state.layer}, ${KINDS[state.kind].name}`;
    shares.replaceChildren(...(target.row === "token" ? weights(query, found) : entry(target.index, found)));
    shade(query);
    keys.replaceChildren(...legend([
      ["ink-window", "window, weight below"],
      ...(state.kind === "window" ? [] : [[`ink-${ink(state.kind)}`, "entry that is read, weight above"], ["ink-other", "entry that is not"]]),
    ]).children);
  }

  /** Weights as fill and underline of the words. */
  function shade(query) {
    const { window, from, entries, weights: weighed } = answer.reads[query];
    const most = Math.max(1, ...window);
    const lines = new Map();
    entries.forEach((j, place) => {
      const [first, end] = span(state.kind, j);
      for (let at = first; at <= end; at++) lines.set(at, (lines.get(at) ?? 0) + weighed[place]);
    });
    const mostLine = Math.max(1, ...lines.values());
    [...words.children].forEach((word, index) => {
      const chosen = index === state.query;
      word.style.setProperty("--fill", `${Math.round((40 * (window[index - from] ?? 0)) / most)}%`);
      word.style.setProperty("--line", `${Math.round((100 * (lines.get(index) ?? 0)) / mostLine)}%`);
      word.classList.toggle("focus", index === query);
      word.classList.toggle("later", index > query);
      word.setAttribute("aria-selected", String(chosen));
      word.setAttribute("tabindex", chosen ? "0" : "-1");
    });
    words.classList.toggle("kind-c128", state.kind === "c128");
  }

  function weights(query, found) {
    const reads = answer.reads[query];
    const { sink, window, entries } = sums(reads);
    const parts = [["other", "nothing (the sink)", sink], ["window", `${reads.window.length} window tokens`, window],
      ...(state.kind === "window" ? [] : [[ink(state.kind), `${reads.entries.length} entries`, entries]])];
    const phrase = (from, to) => visible(answer.tokens.slice(from, to + 1).map(({ text: word }) => word).join(""));
    const lines = [
      ...reads.window.map((weight, place) => ({ weight, swatch: "ink-window", name: `token ${reads.from + place}`, of: phrase(reads.from + place, reads.from + place) })),
      ...reads.entries.map((j, place) => {
        const [from, to] = span(state.kind, j);
        return { weight: reads.weights[place], swatch: `ink-${ink(state.kind)}`, name: `entry ${j}, tokens ${from} to ${to}`, of: phrase(from, to) };
      }),
    ].sort((a, b) => b.weight - a.weight);
    const rest = lines.slice(LISTED);
    return [
      h("div", { class: "bar" }, h("div", { class: "track", "aria-hidden": "true" }, parts.map(([fill, , share]) =>
        h("span", { class: `fill-${fill}`, style: `width: ${100 * share}%` })))),
      h("ul", { class: "legend parts" }, parts.map(([fill, name, share]) => h("li", {},
        h("span", { class: `swatch solid ink-${fill}`, "aria-hidden": "true" }), `${name} `, h("strong", { class: "number" }, percent(share))))),
      h("ol", { class: "weights" }, lines.slice(0, LISTED).map(({ weight, swatch, name, of }) => h("li", {},
        h("span", { class: `swatch solid ${swatch}`, "aria-hidden": "true" }),
        h("span", { class: "name" }, name, h("span", { class: "mono soft" }, of)), h("span", { class: "number" }, percent(weight / 1e6))))),
      rest.length > 0 && h("p", { class: "note" }, `${rest.length} more have ${percent(rest.reduce((sum, { weight }) => sum + weight, 0) / 1e6)} together.`),
      found.passed.length > 0 && h("p", { class: "note" }, `The indexer left ${found.passed.length} of ${found.passed.length + found.read.length} entries out.`),
      h("p", { class: "note" }, "Averages over the heads. What goes to the sink goes to no row."),
    ].filter(Boolean);
  }

  function entry(j, found) {
    const [from, to] = span(state.kind, j);
    const weigh = (i) => answer.reads[i].weights[answer.reads[i].entries.indexOf(j)] ?? 0;
    const readers = answer.reads.map((_, i) => i).filter((i) => answer.reads[i].entries.includes(j)).sort((a, b) => weigh(b) - weigh(a));
    if (j >= found.whole) return [h("p", {}, `It needs token ${to}, and the text ends before.`)];
    return [
      h("p", {}, `Made of tokens ${from} to ${to}; ${readers.length} of ${answer.tokens.length - to} tokens that may read it do.`),
      h("ol", { class: "weights" }, readers.slice(0, LISTED).map((i) => h("li", {},
        h("span", { class: `swatch solid ink-${ink(state.kind)}`, "aria-hidden": "true" }),
        h("span", { class: "name" }, `token ${i}`, h("span", { class: "mono soft" }, visible(answer.tokens[i].text))), h("span", { class: "number" }, percent(weigh(i) / 1e6))))),
    ];
  }

  const title = results.querySelector("#read-title");
  const about = h("p", { class: "note", role: "status", id: "read-about" }, "Asking what runs here …");
  main.append(h("div", { class: "stack" }, about));
  begin();

  async function begin() {
    const found = mode === "files" ? { why: ELSEWHERE.files }
      : await fetch("api/about").then((reply) => reply.json()).catch((error) => ({ why: `No answer: ${error.message}` }));
    // Another view is here by now.
    if (ended) return;
    if (!found.attention) {
      about.replaceChildren(...found.why.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part)));
      return;
    }
    const { model, layers: kinds, most_tokens: most } = found.attention;
    about.textContent = `${model}, ${kinds.length} layers, texts of up to ${most} tokens. The numbers are those of its own attention, taken while the text runs as one more request.`;
    // A layer whose entries are picked shows most.
    state.layer = Math.max(0, kinds.indexOf("c4"));
    layers.append(select({ label: "Layer", value: String(state.layer),
      options: kinds.map((kind, layer) => [String(layer), `${layer}: ${KINDS[kind].name}`]),
      onchange: (layer) => { state.layer = Number(layer); ask(); } }).field);
    main.firstElementChild.append(form);
    main.append(results);
    ask();
  }

  let width = 0;
  const sized = new ResizeObserver(() => {
    if (answer && picture.clientWidth !== width) {
      width = picture.clientWidth;
      make();
    }
  });
  sized.observe(picture);
  return () => { ended = true; stop?.abort(); sized.disconnect(); };
}
