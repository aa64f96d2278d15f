// Elements without a framework: h() makes HTML, s() makes SVG. Text is always set as text, never parsed.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    // Set as data: the page's policy lets no style attribute in.
    else if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
export const s = (name, attributes, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

let ids = 0;
export const freshId = (prefix) => `${prefix}-${++ids}`;

/** A labelled range with its value shown. `show` turns the number into text. */
export function range({ label, min, max, step = 1, value, show = String, oninput }) {
  const id = freshId("range");
  const output = h("output", { for: id }, show(value));
  const input = h("input", { id, type: "range", min, max, step });
  input.value = value;
  input.setAttribute("aria-valuetext", show(value));
  const field = h("div", { class: "field" }, h("label", { for: id }, label, " ", output), input);
  const set = (next) => {
    input.value = next;
    output.textContent = show(Number(next));
    input.setAttribute("aria-valuetext", show(Number(next)));
  };
  input.addEventListener("input", () => {
    set(input.value);
    oninput(Number(input.value));
  });
  return { field, input, set, limit: (most) => { input.max = most; } };
}

/** A labelled select of [value, text] pairs. */
export function select({ label, options, value, onchange }) {
  const id = freshId("select");
  const input = h("select", { id }, options.map(([name, text]) => h("option", { value: name, selected: name === value }, text)));
  input.addEventListener("change", () => onchange(input.value));
  return { field: h("div", { class: "field" }, h("label", { for: id }, label), input), input };
}

/** Radio buttons that look like one row. */
export function choice({ label, options, value, onchange }) {
  const name = freshId("choice");
  const radios = options.map(([key, text]) => {
    const input = h("input", { type: "radio", name, value: key });
    input.checked = key === value;
    input.addEventListener("change", () => onchange(key));
    return h("label", {}, input, text);
  });
  const id = freshId("label");
  return h("div", { class: "field" },
    h("span", { class: "label", id }, label),
    h("div", { class: "choice", role: "radiogroup", "aria-labelledby": id }, radios));
}

export const legend = (items) =>
  h("ul", { class: "legend" }, items.map(([ink, text, solid]) =>
    h("li", {}, h("span", { class: `swatch ${ink} ${solid ? "solid" : ""}`, "aria-hidden": "true" }), text)));
