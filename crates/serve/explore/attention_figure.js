// The picture of attention: a row of entries above a row of tokens, with what the shown one reads. By the rules, or as the
// model did (`reads`, one per token): then cells have the words, and bars and lines the weights.
//
// build() makes the elements once for a number of squares; paint() only sets classes and lines, so hovering is cheap and
// the keyboard's focus survives. A square stands for `scale` tokens; all limits of the model are multiples of it.

import { s } from "./dom.js";
import { KINDS, entries, read, span, visible, windowOf } from "./rules.js";

const LEAST = 22;
const LEAST_WORD = 46;
const MOST = 84;
const BAR = 44;

/** What is shown, in squares. `shown` is {row: "token" | "entry", index}; `query` the token, where a square holds several. */
export function relations({ kind, scale, time, k, shown, reads, query }) {
  const last = (square) => Math.min(square * scale + scale, reads?.length ?? Infinity) - 1;
  const readBy = (i) => (reads ? reads[i].entries : read(kind, i, k));
  const squares = ([from, to]) => [Math.floor(from / scale), Math.floor(to / scale)];
  const whole = entries(kind, last(time) + 1);
  const out = { whole, window: null, read: [], passed: [], sources: null, readers: [], into: [] };
  if (shown.row === "token") {
    const i = query ?? last(shown.index);
    out.window = squares(reads ? [reads[i].from, i] : windowOf(i));
    out.read = readBy(i);
    out.passed = Array.from({ length: entries(kind, i + 1) }, (_, j) => j).filter((j) => !out.read.includes(j));
    out.into = Array.from({ length: whole }, (_, j) => j).filter((j) => {
      const [from, to] = squares(span(kind, j));
      return shown.index >= from && shown.index <= to;
    });
  } else {
    out.sources = squares(span(kind, shown.index));
    for (let square = 0; square <= time; square++) {
      const i = last(square);
      if (visible(kind, i, shown.index) && readBy(i).includes(shown.index)) out.readers.push(square);
    }
  }
  return out;
}

/** Weights of what a token read, as shares by square and by entry. */
function weigh({ window, from, entries: read, weights }, scale) {
  const [tokens, entries] = [new Map(), new Map()];
  window.forEach((weight, place) => {
    const square = Math.floor((from + place) / scale);
    tokens.set(square, (tokens.get(square) ?? 0) + weight / 1e6);
  });
  read.forEach((j, place) => entries.set(j, weights[place] / 1e6));
  return { tokens, entries, most: Math.max(1e-6, ...tokens.values(), ...entries.values()) };
}

/** The elements for `count` squares; `act` is told of hover and choice. `words` are shown in place of numbers. */
export function build({ kind, scale, count, width, act, words, reads }) {
  const cell = Math.max(words ? LEAST_WORD : LEAST, Math.min(MOST, Math.floor(width / count)));
  const bar = reads ? BAR : 0;
  const perEntry = Math.max(1, KINDS[kind].stride / scale);
  const lanes = kind === "c4" ? 2 : 1;
  const total = kind === "window" ? 0 : Math.ceil((count * scale) / KINDS[kind].stride);
  const wide = cell - 4;
  const size = Math.max(30, Math.min(46, wide));
  const entryTop = 28 + bar;
  const laneTop = entryTop + size + 10;
  const tokenTop = total ? laneTop + lanes * 9 + 78 : 28;
  const height = tokenTop + size + 62 + bar;
  const center = (square) => square * cell + cell / 2;
  const entryCenter = (j) => (Math.min(count, perEntry * (j + 1)) + perEntry * j) / 2 * cell;
  // The last entry may have come only in part.
  const entryWidth = (j) => Math.min(Math.min(count, perEntry * (j + 1)) * cell - perEntry * j * cell - 8, 72);
  const svg = s("svg", { width: Math.max(width, count * cell), height, class: `figure kind-${kind}`, role: "group",
    "aria-label": "Entries and tokens" });
  const lines = s("g", { "aria-hidden": "true" });

  const square = (row, index, x, y, broad, text) => s("g", {
    class: `cell ${row}`, role: "option", "aria-selected": "false", tabindex: "-1", "data-row": row, "data-index": index,
    onpointerenter: (event) => event.pointerType === "mouse" && act.hover({ row, index }),
    onclick: () => act.choose({ row, index }),
    onfocus: () => act.choose({ row, index }),
    onkeydown: (event) => move(event, row, index, act),
  }, s("rect", { x: x - broad / 2, y, width: broad, height: size, rx: 4 }),
  s("text", { x, y: y + size / 2 + 0.5, "font-size": words && row === "token" ? 11 : Math.max(11, Math.min(15, broad * 0.5)) }, text));

  const list = (label) => s("g", { role: "listbox", "aria-label": label, "aria-orientation": "horizontal" });
  const tokenRow = list("Tokens");
  const tokens = Array.from({ length: count }, (_, index) =>
    square("token", index, center(index), tokenTop, wide, words ? short(words[index], wide) : scale === 1 ? String(index) : ""));
  tokenRow.append(...tokens);
  const spans = Array.from({ length: total }, (_, j) => {
    const [from, to] = span(kind, j).map((token) => Math.min(count * scale - 1, token));
    const y = laneTop + (j % lanes) * 9;
    const [left, right] = [Math.floor(from / scale) * cell + 5, (Math.floor(to / scale) + 1) * cell - 5];
    return s("path", { class: "span", d: `M${left} ${y + 6}V${y}H${right}V${y + 6}` });
  });
  const entryRow = list("Entries");
  const entryCells = Array.from({ length: total }, (_, j) =>
    square("entry", j, entryCenter(j), entryTop, entryWidth(j), String(j)));
  entryRow.append(...entryCells);
  const label = (text, y) => s("text", { class: "soft", x: 2, y, "font-size": 13 }, text);
  svg.append(lines, s("g", { "aria-hidden": "true" }, spans));
  if (total) svg.append(label("Entries", 16), entryRow, label("Tokens", tokenTop - 10));
  else svg.append(label("Tokens", 16));
  svg.append(tokenRow);
  if (scale > 1) {
    for (let at = 0; at < count; at += 4) {
      svg.append(s("text", { class: "soft", x: at * cell + 2, y: tokenTop + size + 16, "font-size": 11 }, String(at * scale)));
    }
  }
  svg.addEventListener("pointerleave", () => act.hover(null));

  function paint(state) {
    const { time, shown } = state;
    const found = relations(state);
    const within = (index, bounds) => bounds !== null && index >= bounds[0] && index <= bounds[1];
    tokens.forEach((element, index) => mark(element, {
      future: index > time,
      focus: shown.row === "token" && shown.index === index,
      window: within(index, found.window),
      source: within(index, found.sources),
      reader: found.readers.includes(index),
    }, words ? `Token ${index}, ${words[index]}` : `Token ${scale === 1 ? index : `${index * scale} to ${index * scale + scale - 1}`}`));
    entryCells.forEach((element, j) => mark(element, {
      future: j >= found.whole,
      focus: shown.row === "entry" && shown.index === j,
      read: found.read.includes(j),
      passed: found.passed.includes(j),
    }, `Entry ${j}`));
    spans.forEach((element, j) => {
      const lit = shown.row === "entry" ? shown.index === j : found.read.includes(j) || found.into.includes(j);
      element.setAttribute("class", `span ${j >= found.whole ? "open" : lit ? "" : "quiet"}`);
    });
    const from = entryTop + size + 2;
    const weights = reads && shown.row === "token" ? weigh(reads[state.query ?? shown.index], scale) : null;
    const link = (j, index, how) => {
      const [x, y] = [entryCenter(j), from];
      const [toX, toY] = [center(index), tokenTop - 3];
      const bend = (toY - y) * 0.7;
      const share = how === "" && weights ? weights.entries.get(j) / weights.most : null;
      return s("path", { class: `link ${how}`, "stroke-width": share === null ? null : 0.5 + 5 * share, d: `M${x} ${y}C${x} ${y + bend} ${toX} ${toY - bend} ${toX} ${toY}` });
    };
    lines.replaceChildren();
    if (found.window) {
      const y = tokenTop + size + (scale > 1 ? 24 : 8) + bar;
      const [left, right] = [found.window[0] * cell + 3, (found.window[1] + 1) * cell - 3];
      lines.append(s("path", { class: "bracket", d: `M${left} ${y}V${y + 8}H${right}V${y}` }));
      const text = s("text", { y: y + 24, "font-size": 13, "text-anchor": "middle" }, "window");
      // Under the token that reads, where the bracket may be longer than what is in sight.
      const middle = reads ? right - 30 : (left + right) / 2;
      text.setAttribute("x", Math.min(Math.max(middle, 26), count * cell - 26));
      lines.append(text);
      if (weights) lines.append(...bars(weights));
      lines.append(...found.read.map((j) => link(j, shown.index, "")));
      lines.append(...found.into.filter((j) => !found.read.includes(j)).map((j) => link(j, shown.index, "into")));
    } else {
      lines.append(...found.readers.map((index) => link(shown.index, index, "")));
    }
    return found;
  }

  /** Bars of the weights, under the tokens and above the entries, to one measure. */
  function bars({ tokens: byToken, entries: byEntry, most }) {
    const one = (how, x, broad, y, up, share) => {
      const tall = Math.max(1, ((BAR - 6) * share) / most);
      return s("rect", { class: `weight ${how}`, x: x - broad / 2, y: up ? y - tall : y, width: broad, height: tall, rx: 1.5 });
    };
    const under = tokenTop + size + (scale > 1 ? 20 : 4);
    return [
      ...[...byToken].map(([index, share]) => one("window", center(index), wide, under, false, share)),
      ...[...byEntry].map(([j, share]) => one("entry", entryCenter(j), entryWidth(j), entryTop - 4, true, share)),
    ];
  }

  function mark(element, states, name) {
    const on = Object.keys(states).filter((state) => states[state]);
    element.setAttribute("class", ["cell", element.dataset.row, ...on].join(" "));
    element.setAttribute("aria-selected", String(Boolean(states.focus)));
    const said = { future: "not there yet", window: "in the window", source: "part of the entry", reader: "reads the entry",
      read: "read", passed: "visible, not picked" };
    element.setAttribute("aria-label", [name, ...on.map((state) => said[state]).filter(Boolean)].join(", "));
    if (states.focus) element.setAttribute("tabindex", "0");
  }

  const rows = { token: tokens, entry: entryCells };
  return { svg, paint, rows };
}

/** As much of a word as a cell holds. */
const short = (word, wide) => {
  const most = Math.floor(wide / 6.6);
  return word.length > most ? `${word.slice(0, most - 1)}…` : word;
};

/** Arrow keys, Home and End: along a row, and between an entry and the token that closes it. */
function move(event, row, index, act) {
  const [rows, per] = [act.rows(), act.per()];
  const to = {
    ArrowLeft: [row, index - 1], ArrowRight: [row, index + 1], Home: [row, 0], End: [row, rows[row].length - 1],
    ArrowUp: ["entry", row === "token" ? Math.floor(index / per) : index],
    ArrowDown: ["token", row === "entry" ? Math.floor(index * per + per - 1) : index],
  }[event.key];
  if (!to) return;
  event.preventDefault();
  const cells = rows[to[0]];
  const stays = to[0] === row && ["ArrowUp", "ArrowDown"].includes(event.key);
  if (cells.length > 0 && !stays) cells[Math.max(0, Math.min(cells.length - 1, to[1]))].focus();
}
