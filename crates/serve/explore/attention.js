// The attention view: the rules, or what the loaded model reads in a text that is typed. #attention?text opens the latter.

import { choice, h } from "./dom.js";
import { lesson } from "./attention_lesson.js";
import { text } from "./attention_text.js";

export function attention(main, mode) {
  const part = h("div", {});
  let end = null;
  const show = (what) => {
    end?.();
    part.replaceChildren();
    end = (what === "text" ? text : lesson)(part, mode) ?? null;
  };
  const first = location.hash.endsWith("?text") ? "text" : "rules";
  main.append(
    h("h1", {}, "What a token reads"),
    h("p", { class: "lead" }, "DeepSeek-V4 keeps a long text three times: the last 128 tokens as they are, one entry for every 4 tokens, and one for every 128. Point at a token or an entry, or walk with the arrow keys."),
    h("div", { class: "switch" }, choice({ label: "Show", value: first, options: [["rules", "The rules"], ["text", "A text of yours"]], onchange: show })),
    part);
  show(first);
  return () => end?.();
}
