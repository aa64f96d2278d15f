// The shape of an answer: the prompt as the model reads it, then reasoning, content and tool calls as they stream, token by
// token with their probabilities. Only what is typed here is shown; it is an ordinary request to this server.

import { choice, h, legend, range } from "./dom.js";
import { visible } from "./words.js";

const TOOL = {
  type: "function",
  function: {
    name: "get_weather", description: "Get the current weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string", description: "City name" } }, required: ["city"] },
  },
};
/** Tokens of a prompt that are shown. */
const SHOWN = 4000;
const PARTS = { reasoning: "Reasoning", content: "Content", call: "Tool call" };

export function answer(main) {
  const setting = { thinking: "disabled", tool: "no", tokens: 200, ids: "no" };
  let stop = null;

  const text = h("textarea", { id: "answer-text", rows: 3 });
  text.value = "What is the capital of Norway?";
  const key = h("input", { type: "text", id: "answer-key", autocomplete: "off", spellcheck: "false" });
  const keyField = h("div", { class: "field", hidden: true }, h("label", { for: "answer-key" }, "Key of this server"), key);
  const go = h("button", { class: "main", type: "submit" }, "Ask");
  const cancel = h("button", { type: "button", disabled: true, onclick: () => stop?.abort() }, "Stop");
  const said = h("p", { class: "error", role: "alert" });
  const prompt = h("div", { class: "tokens", id: "answer-prompt" });
  const promptNote = h("p", { class: "note" }, "Ask something to see it.");
  const parts = h("div", { class: "pile" });
  const detail = h("div", { class: "why", "aria-live": "polite", id: "answer-detail" }, h("p", { class: "note" }, "Point at a token of the answer, or walk to it."));
  const usage = h("p", { class: "note", role: "status", id: "answer-usage" });
  const form = h("form", { class: "card" },
    h("div", { class: "field" }, h("label", { for: "answer-text" }, "Your message"), text),
    h("div", { class: "controls", style: "margin-top: 16px" },
      choice({ label: "Thinking", value: "disabled", options: [["disabled", "off"], ["enabled", "on"]], onchange: (value) => { setting.thinking = value; } }),
      choice({ label: "Offer get_weather", value: "no", options: [["no", "no"], ["yes", "yes"]], onchange: (value) => { setting.tool = value; } }),
      choice({ label: "Token ids", value: "no", options: [["no", "hide"], ["yes", "show"]], onchange: (value) => { setting.ids = value; results.classList.toggle("ids", value === "yes"); } }),
      range({ label: "At most", min: 10, max: 1000, step: 10, value: 200, show: (n) => `${n} tokens`, oninput: (n) => { setting.tokens = n; } }).field,
      keyField, h("div", { class: "row" }, go, cancel)), said);

  const results = h("div", { class: "stack" },
    h("section", { class: "card" }, h("h2", {}, "The prompt as the model reads it"), promptNote, prompt),
    h("div", { class: "columns" },
      h("section", { class: "card" }, h("h2", {}, "The answer"),
        legend([["ink-c4_index", "chosen above 90 %"], ["ink-window", "above 50 %"], ["ink-c128_main", "below"]]), parts, usage),
      h("section", { class: "card" }, h("h2", {}, "What it chose from"), detail)));
  results.prepend(form);

  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });

  const post = async (route, body) => {
    const headers = { "content-type": "application/json" };
    if (key.value.trim()) headers.authorization = `Bearer ${key.value.trim()}`;
    const reply = await fetch(`../${route}`, { method: "POST", headers, body: JSON.stringify(body), signal: stop.signal });
    if (reply.ok) return reply;
    keyField.hidden = reply.status !== 401 && keyField.hidden;
    throw new Error((await reply.json()).error?.message ?? `status ${reply.status}`);
  };

  async function ask() {
    stop?.abort();
    const mine = stop = new AbortController();
    said.textContent = usage.textContent = "";
    [prompt, parts].forEach((part) => part.replaceChildren());
    cancel.disabled = false;
    const body = { messages: [{ role: "user", content: text.value }], thinking: { type: setting.thinking } };
    if (setting.tool === "yes") body.tools = [TOOL];
    try {
      const { tokens, token_strs: strings } = await (await post("tokenize", { ...body, return_token_strs: true })).json();
      const cut = tokens.length > SHOWN ? ` The first ${SHOWN} are shown.` : "";
      promptNote.textContent = `${tokens.length} tokens. Framed ones are control tokens, which no text can spell.${cut}`;
      prompt.replaceChildren(...strings.slice(0, SHOWN).map((string, place) =>
        h("span", { class: `token ${/^<[｜/].*>$/.test(string) || string === "<think>" ? "control" : ""}`, "data-id": tokens[place] }, visible(string))));
      const reply = await post("v1/chat/completions", { ...body, max_tokens: setting.tokens, stream: true, logprobs: true, top_logprobs: 5, return_token_ids: true,
        stream_options: { include_usage: true } });
      await read(reply.body);
    } catch (error) {
      if (mine === stop) said.textContent = mine.signal.aborted ? "Stopped." : error.message;
    }
    if (mine === stop) cancel.disabled = true;
  }

  async function read(stream) {
    const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
        const chunk = JSON.parse(event.slice(6));
        if (chunk.error) throw new Error(chunk.error.message);
        chunk.choices?.forEach(add);
        if (chunk.usage) {
          const cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
          usage.textContent += ` ${chunk.usage.prompt_tokens} prompt tokens, ${cached} of them from the cache; ${chunk.usage.completion_tokens} tokens of answer.`;
        }
      }
    }
  }

  function add({ delta, logprobs, finish_reason: finish }) {
    for (const one of logprobs?.reasoning_content ?? []) put("reasoning", one);
    for (const one of logprobs?.content ?? []) put("content", one);
    for (const call of delta.tool_calls ?? []) {
      const { name, arguments: piece } = call.function ?? {};
      const list = part("call");
      if (name) list.append(h("span", { class: "token control" }, name));
      if (piece) list.append(h("span", { class: "token" }, visible(piece)));
    }
    if (finish) usage.textContent = `It ended with ${finish}.${usage.textContent}`;
  }

  /** The list of the part that is written now; a new one when the kind changes. */
  function part(kind) {
    const last = parts.lastElementChild;
    if (last?.dataset.kind === kind) return last.lastElementChild;
    const list = h("div", { class: "tokens" });
    parts.append(h("section", { "data-kind": kind }, h("h3", {}, PARTS[kind]), list));
    return list;
  }

  function put(kind, { token, token_id: number, logprob, top_logprobs: others }) {
    const sure = Math.exp(logprob);
    const show = () => detail.replaceChildren(
      h("p", {}, h("strong", {}, visible(token)), ` was chosen at ${percent(sure)}: id ${number}, log-probability ${logprob.toFixed(3)}.`),
      h("ol", { class: "bars" }, (others ?? []).map((other) => h("li", { class: "bar" },
        h("div", { class: "what" }, h("span", { class: "mono" }, visible(other.token), h("span", { class: "soft" }, ` id ${other.token_id}`)), h("span", { class: "number" }, `${percent(Math.exp(other.logprob))} (${other.logprob.toFixed(2)})`)),
        h("div", { class: "track", "aria-hidden": "true" }, h("span", { class: "fill-c4_main", style: `width: ${100 * Math.exp(other.logprob)}%` }))))));
    const level = sure > 0.9 ? "sure" : sure > 0.5 ? "likely" : "unsure";
    part(kind).append(h("button", { type: "button", class: `token ${level}`, "data-id": number, onpointerenter: show, onfocus: show, onclick: show,
      "aria-label": `${visible(token)}, id ${number}, ${percent(sure)}` }, visible(token)));
  }

  main.append(
    h("h1", {}, "The shape of an answer"),
    h("p", { class: "lead" }, "What the model reads and writes for a message of yours, token by token. It is asked of this server like any request."),
    results);
  return () => stop?.abort();
}

const percent = (share) => `${(100 * share).toFixed(share > 0.9995 || share < 0.0005 ? 0 : 1)} %`;
