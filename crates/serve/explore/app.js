// The frame: tabs, one view at a time, and what the views share. A view is a function that fills an element and may return
// a function that ends it.

import { h } from "./dom.js";
import { attention } from "./attention.js";
import { memory } from "./memory.js";
import { live } from "./live.js";
import { answer } from "./answer.js";

/** "server" beside a running engine, "local" from `longwave explore`, "files" when exported. */
export const mode = document.querySelector('meta[name="explorer"]').content;

const VIEWS = [
  { name: "attention", title: "Attention", show: attention },
  { name: "memory", title: "Memory", show: memory },
  { name: "live", title: "Live", show: live, needs: "server" },
  { name: "answer", title: "Answer", show: answer, needs: "server" },
];

const main = document.getElementById("view");
const offered = VIEWS.filter((view) => !view.needs || view.needs === mode);
let end = null;

function open() {
  const name = location.hash.slice(1).split("?")[0];
  const view = offered.find((candidate) => candidate.name === name) ?? offered[0];
  end?.();
  main.replaceChildren();
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.hash === `#${view.name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view.title} · Longwave explorer`;
  end = view.show(main, mode) ?? null;
}

document.getElementById("tabs").append(
  ...offered.map((view) => h("li", {}, h("a", { href: `#${view.name}` }, view.title))));
document.getElementById("about").textContent = {
  server: "Served by a running Longwave. Nothing here leaves it.",
  local: "Served by longwave explore. Nothing here leaves this machine.",
  files: "Exported by longwave explore --export. Counted when it was exported, without a model.",
}[mode];
addEventListener("hashchange", open);
open();
