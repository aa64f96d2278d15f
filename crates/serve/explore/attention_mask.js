// The same rules for all tokens at once: one line per query, columns for the tokens and, behind a gap, for the entries.
// Drawn as three paths, so that 64 lines cost nothing.

import { s } from "./dom.js";
import { KINDS, entries, read, windowOf } from "./rules.js";

/** A picture of `count` squares of `scale` tokens, `width` pixels wide; the line of `row` is framed. */
export function mask({ kind, scale, count, k, width, row }) {
  const total = kind === "window" ? 0 : Math.floor((count * scale) / KINDS[kind].stride);
  const gap = total ? 1 : 0;
  const columns = count + gap + total;
  const step = Math.min(24, (width - 44) / columns);
  const [left, top] = [40, 22];
  const size = Math.max(1, step - (step > 6 ? 1.5 : 0.5));
  const paths = { window: "", entry: "", passed: "" };
  const put = (name, x, y) => { paths[name] += `M${left + x * step} ${top + y * step}h${size}v${size}h${-size}z`; };
  for (let square = 0; square < count; square++) {
    const i = square * scale + scale - 1;
    const [first] = windowOf(i);
    for (let at = Math.floor(first / scale); at <= square; at++) put("window", at, square);
    const picked = new Set(read(kind, i, k));
    for (let j = 0; j < entries(kind, i + 1); j++) put(picked.has(j) ? "entry" : "passed", count + gap + j, square);
  }
  const height = top + count * step + 4;
  const wide = left + columns * step + 4;
  const svg = s("svg", { width: wide, height, class: `kind-${kind}`, role: "img",
    "aria-label": `What each of ${count} ${scale === 1 ? "tokens" : "squares"} reads` },
  s("text", { class: "soft", x: left, y: 14, "font-size": 12 }, "tokens"),
  total ? s("text", { class: "soft", x: left + (count + gap) * step, y: 14, "font-size": 12 }, "entries") : null,
  ...Object.entries(paths).map(([name, d]) => s("path", { class: `mask-${name}`, d })));
  const every = Math.ceil(16 / step);
  for (let square = 0; square < count; square += every) {
    svg.append(s("text", { class: "soft", x: left - 6, y: top + square * step + Math.min(step, 16) * 0.75, "font-size": 11,
      "text-anchor": "end" }, String(square * scale)));
  }
  if (row !== null && row < count) {
    svg.append(s("rect", { class: "mask-row", x: left - 2, y: top + row * step - 1.5, width: columns * step + 2, height: size + 3 }));
  }
  return svg;
}
