// Where the numbers of the memory view come from: the program's calculator, or tables that it exported. Nothing is counted
// here, so the view and `longwave kv` cannot differ.

const tables = new Map();

async function get(path) {
  const answer = await fetch(path);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `status ${answer.status}`);
  return body;
}

export const models = async (mode) => (await get(mode === "files" ? "memory/models.json" : "api/models")).models;

/** Settings over contexts: a row for each power of two. */
export async function table(mode, { model, cache, index }) {
  const path = mode === "files" ? `memory/${model}-${cache}-${index}.json`
    : `api/table?${new URLSearchParams({ model, cache, index })}`;
  if (!tables.has(path)) tables.set(path, await get(path));
  return tables.get(path);
}

/** One setting. Exported tables have powers of two and usual GPUs only. */
export async function memory(mode, setting) {
  const { model, context, cache, index, gpus, gpuGb } = setting;
  if (mode !== "files") {
    return get(`api/memory?${new URLSearchParams({ model, context, cache, index, gpus, gpu_memory: gpuGb * 1e9 })}`);
  }
  const rows = await table(mode, setting);
  const row = rows.find((candidate) => candidate.context >= context) ?? rows.at(-1);
  return { ...row, fit: row.fits.find((fit) => fit.gpus === gpus && fit.gpu_bytes === gpuGb * 1e9) };
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Bytes to three digits, as `longwave kv` writes them. */
export function bytes(count) {
  let [value, unit] = [count, 0];
  while (value >= 1024 && unit < 3) [value, unit] = [value / 1024, unit + 1];
  if (unit === 0) return `${count} B`;
  return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${UNITS[unit]}`;
}

export const grouped = (count) => String(count).replace(/\B(?=(\d{3})+(?!\d))/g, ",");

/** 131072 as 128K. */
export const tokens = (count) => (count % 1048576 === 0 ? `${count / 1048576}M` : count % 1024 === 0 ? `${count / 1024}K` : grouped(count));
