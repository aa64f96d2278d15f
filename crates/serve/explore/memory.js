// The memory view: what the cache of one request takes, beside a stack as V3.2 had it, and how many requests a machine holds.
// Every number comes from `longwave kv`'s own code (memory_data.js); here they are only shown.

import { h, legend, range, select } from "./dom.js";
import { bytes, grouped, memory as count, models, table, tokens } from "./memory_data.js";
import { CACHES, bar, curve, layerBars } from "./memory_figures.js";

const GPUS = [[80, "H100, 80 GB"], [141, "H200, 141 GB"], [192, "B200, 192 GB"], [288, "B300, 288 GB"]];
const STEPS_PER_DOUBLING = 4;
const LEAST = 1024;

export function memory(main, mode) {
  const setting = { model: "flash", context: 131072, cache: "fp8", index: "fp4", gpus: 4, gpuGb: 141 };
  const steps = mode === "files" ? 1 : STEPS_PER_DOUBLING;
  let most = 1048576;
  let last = 0;
  let shown = null;

  const headline = h("div", {});
  const parts = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "By kind" });
  const perLayer = h("div", { class: "scroll" });
  const growth = h("div", { class: "scroll" });
  const pools = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "By pool" });
  const fit = h("div", {});
  const error = h("p", { class: "error", role: "alert" });

  const contextOf = (step) => Math.min(most, Math.round((LEAST * 2 ** (step / steps)) / 256) * 256);
  const stepOf = (context) => Math.round(Math.log2(context / LEAST) * steps);
  const context = range({ label: "Context", min: 0, max: stepOf(most), value: stepOf(setting.context),
    show: (step) => tokens(contextOf(step)), oninput: (step) => { setting.context = contextOf(step); typed.value = tokens(setting.context); update(); } });
  const typed = h("input", { type: "text", id: "context-typed", inputmode: "text", size: 9, autocomplete: "off" });
  typed.value = tokens(setting.context);
  typed.addEventListener("change", () => {
    const found = /^\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*$/.exec(typed.value.replace(/,/g, ""));
    const value = found ? Math.round(Number(found[1]) * { "": 1, k: 1024, m: 1048576 }[found[2].toLowerCase()]) : NaN;
    const good = value >= 1 && value <= most;
    typed.setAttribute("aria-invalid", String(!good));
    error.textContent = good ? "" : `Context: write 1 to ${grouped(most)} tokens, for example 128K.`;
    if (!good) return;
    setting.context = value;
    context.set(Math.max(0, stepOf(value)));
    update();
  });
  const pick = (label, field, options) => select({ label, options, value: setting[field], onchange: (value) => {
    setting[field] = typeof setting[field] === "number" ? Number(value) : value;
    update();
  } });
  const model = pick("Model", "model", [["flash", "flash"]]);
  const cache = pick("Entries", "cache", [["fp8", "fp8, 584 B"], ["bf16", "bf16, 1,024 B"]]);
  const index = pick("Index keys", "index", [["fp4", "fp4, 68 B"], ["fp8", "fp8, 132 B"], ["bf16", "bf16, 256 B"]]);
  const gpu = pick("GPU", "gpuGb", GPUS.map(([gb, name]) => [gb, name]));
  gpu.input.value = setting.gpuGb;
  const gpus = pick("How many", "gpus", [1, 2, 4, 8, 16].map((n) => [n, String(n)]));
  gpus.input.value = setting.gpus;
  for (const [field, control] of Object.entries({ model, cache, index, gpuGb: gpu, gpus })) control.input.dataset.field = field;

  async function update() {
    const mine = ++last;
    try {
      const [numbers, rows] = await Promise.all([count(mode, setting), table(mode, setting)]);
      // A later choice has its own answer.
      if (mine !== last) return;
      error.textContent = "";
      shown = { numbers, rows };
      draw();
    } catch (failure) {
      if (mine === last) error.textContent = `The calculator says: ${failure.message}`;
    }
  }

  const value = (id, number, text) => h("data", { id, value: number }, text);

  function draw() {
    const { numbers, rows } = shown;
    const { payload, v32, allocated, weights } = numbers;
    main.dataset.context = numbers.context;
    headline.replaceChildren(
      h("dl", { class: "facts" },
        fact("One request takes", value("payload", payload.total_bytes, bytes(payload.total_bytes)), `${grouped(payload.total_bytes)} B`),
        fact("V3.2-style, as many layers", value("v32", v32.total_bytes, bytes(v32.total_bytes)), `${v32.times_larger.toFixed(1)} times as much`),
        fact("Each further token", value("per-token", payload.bytes_per_token, bytes(Math.round(payload.bytes_per_token))), `${grouped(payload.bytes_per_token)} B in the long run`),
        fact("Weights", value("weights", weights.bytes, bytes(weights.bytes)), `${grouped(weights.tensors)} tensors`)),
      h("div", { class: "bars", style: "margin-top: 24px" },
        bar(`V4: ${setting.model}`, payload.total_bytes, payload.caches.map((line) => [line.cache, line.total_bytes]), v32.total_bytes),
        bar("V3.2-style: a latent and an index key for every token and layer, bf16", v32.total_bytes, [["other", v32.total_bytes]], v32.total_bytes)),
      h("div", { style: "margin-top: 12px" }, legend(CACHES.map(([name, text]) => [`ink-${name}`, text, true]))));
    parts.replaceChildren(h("table", {},
      h("caption", {}, "Payload, as published: entries and keys that a request holds"),
      h("thead", {}, h("tr", {}, ["Cache", "Layers", "Entries per layer", "Bytes of one", "All layers"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, payload.caches.map((line, place) => h("tr", {},
        h("th", { scope: "row" }, CACHES[place][1]), h("td", {}, line.layers), h("td", {}, grouped(line.entries)), h("td", {}, grouped(line.entry_bytes)),
        h("td", {}, value(`cache-${line.cache}`, line.total_bytes, bytes(line.total_bytes))))),
      h("tr", { class: "sum" }, h("th", { scope: "row" }, "Sum"), h("td"), h("td"), h("td"), h("td", {}, bytes(payload.total_bytes))))));
    pools.replaceChildren(h("table", {},
      h("caption", {}, "Allocated while it decodes: whole blocks of 256 tokens, compressor states and the MTP window included"),
      h("thead", {}, h("tr", {}, ["Pool", "Bytes of a unit", "For its life", "Sliding", "Bytes"].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, allocated.buckets.map((line) => h("tr", {},
        h("th", { scope: "row" }, line.bucket), h("td", {}, grouped(line.unit_bytes)), h("td", {}, grouped(line.long_lived_units)),
        h("td", {}, grouped(line.sliding_units)), h("td", {}, value(`pool-${line.bucket}`, line.total_bytes, bytes(line.total_bytes))))),
      h("tr", { class: "sum" }, h("th", { scope: "row" }, "Sum"), h("td"), h("td"), h("td"), h("td", {}, value("allocated", allocated.total_bytes, bytes(allocated.total_bytes)))))));
    const room = numbers.fit;
    fit.replaceChildren(h("dl", { class: "facts" },
      fact("Requests of this context", value("fit", room.requests, grouped(room.requests)), room.cache_bytes > 0 ? "each GPU has the whole cache of all" : "the weights do not fit"),
      fact("Weights on each GPU", bytes(room.weights_bytes), `of ${grouped(room.gpu_bytes / 1e9)} GB`),
      fact("Cache on each GPU", value("fit-cache", room.cache_bytes, bytes(room.cache_bytes)), `${bytes(room.kept_bytes)} kept for scratch`)),
    h("p", { class: "note", style: "margin-top: 16px" }, "Weights are spread evenly, each GPU has the whole cache of every request, 10 % of each is kept for scratch and the driver, and seven drafts may be in flight. Arithmetic, not a measurement."));
    perLayer.replaceChildren(layerBars(numbers.layers, Math.max(280, perLayer.clientWidth)));
    growth.replaceChildren(curve(rows, numbers, Math.max(280, growth.clientWidth)));
  }

  main.append(
    h("h1", {}, "What the cache takes"),
    h("p", { class: "lead" }, "The memory of one request, counted by the same code as ", h("code", {}, "longwave kv"), "."),
    h("div", { class: "stack" },
      h("section", { class: "card", "aria-label": "Setting" },
        h("div", { class: "controls" }, model.field, context.field,
          mode === "files" ? null : h("div", { class: "field" }, h("label", { for: "context-typed" }, "or exactly"), typed),
          cache.field, index.field), error),
      h("section", { class: "card" }, h("h2", {}, "One request"), headline),
      h("div", { class: "columns even" },
        h("section", { class: "card" }, h("h2", {}, "Layer by layer"), perLayer),
        h("section", { class: "card" }, h("h2", {}, "As the context grows"), growth)),
      h("div", { class: "columns even" },
        h("section", { class: "card" }, h("h2", {}, "By kind"), parts),
        h("section", { class: "card" }, h("h2", {}, "By pool"), pools)),
      h("section", { class: "card" }, h("h2", {}, "How many fit"),
        h("div", { class: "controls" }, gpu.field, gpus.field), h("div", { style: "margin-top: 20px" }, fit))));

  models(mode).then((list) => {
    model.input.replaceChildren(...list.map(({ name, describes }) => h("option", { value: name }, `${name} · ${describes}`)));
    model.input.value = setting.model;
    model.input.addEventListener("change", () => {
      most = list.find(({ name }) => name === setting.model).context;
      setting.context = Math.min(setting.context, most);
      context.limit(stepOf(most));
      context.set(stepOf(setting.context));
      typed.value = tokens(setting.context);
      update();
    });
  }).catch((failure) => { error.textContent = failure.message; });
  update();
  const sized = new ResizeObserver(() => shown && draw());
  sized.observe(perLayer);
  return () => { last++; sized.disconnect(); delete main.dataset.context; };
}

function fact(title, number, detail) {
  return h("div", {}, h("dt", {}, title), h("dd", {}, number, h("small", {}, detail)));
}
