// Pictures of the memory view: shares as bars, one bar per layer, and bytes over the context.

import { h, s } from "./dom.js";
import { bytes, tokens } from "./memory_data.js";

export const CACHES = [
  ["c4_main", "c4 entries"], ["c4_index", "c4 index keys"], ["c128_main", "c128 entries"], ["window", "window"],
];

/** A bar of parts, `whole` being the full width. */
export function bar(title, total, parts, whole) {
  const track = h("div", { class: "track", "aria-hidden": "true" },
    parts.map(([name, count]) => h("span", { class: `fill-${name}`, style: `width: ${(100 * count) / whole}%` })));
  return h("div", { class: "bar" }, h("div", { class: "what" }, h("span", {}, title), h("span", { class: "number" }, bytes(total))), track);
}

/** A bar per layer, first to last. */
export function layerBars(layers, width) {
  const [left, top, height] = [64, 12, 230];
  const most = Math.max(...layers.map((layer) => layer.bytes.reduce((a, b) => a + b)));
  const step = (width - left - 8) / layers.length;
  const svg = s("svg", { width, height: top + height + 44, role: "img",
    "aria-label": `Cache of each of ${layers.length} layers, at most ${bytes(most)}` });
  for (const share of [0, 0.5, 1]) {
    const y = top + height * (1 - share);
    svg.append(s("line", { class: share ? "grid" : "axis", x1: left, x2: width - 8, y1: y, y2: y }),
      s("text", { class: "soft", x: left - 8, y: y + 4, "text-anchor": "end", "font-size": 11 }, bytes(Math.round(most * share))));
  }
  layers.forEach((layer, index) => {
    let y = top + height;
    layer.bytes.forEach((count, cache) => {
      const tall = (height * count) / most;
      if (tall <= 0) return;
      y -= tall;
      svg.append(s("rect", { class: `fill-${CACHES[cache][0]}`, x: left + index * step + step * 0.1, y,
        width: Math.max(1, step * 0.8), height: Math.max(tall, 0.75) }));
    });
  });
  const every = Math.ceil(40 / step);
  for (let index = 0; index < layers.length; index += every) {
    svg.append(s("text", { class: "soft", x: left + (index + 0.5) * step, y: top + height + 16, "text-anchor": "middle",
      "font-size": 11 }, String(index)));
  }
  svg.append(s("text", { class: "soft", x: left + (width - left) / 2, y: top + height + 34, "text-anchor": "middle", "font-size": 12 }, "layer"));
  return svg;
}

/** Bytes over the context, both on logarithmic axes. */
export function curve(rows, current, width) {
  const [left, top, height, right] = [64, 12, 230, 110];
  const wide = Math.max(80, width - left - right);
  const all = rows.flatMap((row) => [row.payload.total_bytes, row.v32.total_bytes]);
  const [low, high] = [Math.floor(Math.log2(Math.min(...all)) / 2) * 2, Math.ceil(Math.log2(Math.max(...all)) / 2) * 2];
  const [first, last] = [Math.log2(rows[0].context), Math.log2(rows.at(-1).context)];
  const x = (context) => left + (wide * (Math.log2(context) - first)) / Math.max(1e-9, last - first);
  const y = (count) => top + height * (1 - (Math.log2(count) - low) / (high - low));
  const svg = s("svg", { width, height: top + height + 44, role: "img", "aria-label": "Cache of one request over its context, "
    + "this model below a V3.2-style stack; both axes are logarithmic" });
  for (let power = low; power <= high; power += (high - low > 16 ? 4 : 2)) {
    svg.append(s("line", { class: power === low ? "axis" : "grid", x1: left, x2: left + wide, y1: y(2 ** power), y2: y(2 ** power) }),
      s("text", { class: "soft", x: left - 8, y: y(2 ** power) + 4, "text-anchor": "end", "font-size": 11 }, bytes(2 ** power).replace(/\.0+ /, " ")));
  }
  const every = Math.ceil(52 / (wide / Math.max(1, rows.length - 1)));
  rows.forEach((row, index) => {
    if ((rows.length - 1 - index) % every) return;
    svg.append(s("text", { class: "soft", x: x(row.context), y: top + height + 18, "text-anchor": "middle", "font-size": 11 }, tokens(row.context)));
  });
  svg.append(s("text", { class: "soft", x: left + wide / 2, y: top + height + 38, "text-anchor": "middle", "font-size": 12 }, "tokens of context"));
  for (const [name, pick, label] of [["v32", (row) => row.v32.total_bytes, "V3.2-style"], ["v4", (row) => row.payload.total_bytes, "V4"]]) {
    const points = rows.map((row) => `${x(row.context).toFixed(1)} ${y(pick(row)).toFixed(1)}`);
    svg.append(s("path", { class: `curve ${name}`, d: `M${points.join("L")}` }));
    const end = rows.at(-1);
    svg.append(s("text", { x: left + wide + 8, y: y(pick(end)) - 2, "font-size": 12 }, label),
      s("text", { class: "soft", x: left + wide + 8, y: y(pick(end)) + 14, "font-size": 12 }, bytes(pick(end))));
    if (rows.length > 1) svg.append(s("circle", { class: "dot", cx: x(Math.max(rows[0].context, current.context)), cy: y(Math.max(2 ** low, pick(current))), r: 4 }));
  }
  return svg;
}
