// Which rows of the cache a token may read, exactly as the model has it. Pure functions on positions.
//
// Token i reads the last 128 tokens up to itself. Entry j of c4 is made of tokens 4j-4 to 4j+3, of c128 of tokens 128j to
// 128j+127; i may read it from its last token on. Of the visible c4 entries the indexer picks the top k, c128 reads all.

export const WINDOW = 128;

export const KINDS = {
  c4: { name: "c4a", stride: 4, span: 8 },
  c128: { name: "c128a", stride: 128, span: 128 },
  window: { name: "window only", stride: 0, span: 0 },
};

/** Entries that are whole once `tokens` tokens have come. */
export const entries = (kind, tokens) => (KINDS[kind].stride ? Math.floor(tokens / KINDS[kind].stride) : 0);

/** First and last token that entry j is made of. */
export function span(kind, j) {
  const { stride, span: width } = KINDS[kind];
  const last = stride * j + stride - 1;
  return [Math.max(0, last - width + 1), last];
}

/** Whether token i may read entry j: its last token has come. */
export const visible = (kind, i, j) => KINDS[kind].stride > 0 && i >= KINDS[kind].stride * j + KINDS[kind].stride - 1;

/** First and last token of the window of token i. */
export const windowOf = (i) => [Math.max(0, i - WINDOW + 1), i];

/** A made-up score of entry j for token i, from 0 to 1; the model's comes from its indexer. */
export function score(i, j) {
  let x = (i + 1) * 0x9e3779b1 ^ (j + 1) * 0x85ebca6b;
  x = Math.imul(x ^ (x >>> 15), 0x2c1b3c6d);
  x = Math.imul(x ^ (x >>> 12), 0x297a2d39);
  return ((x ^ (x >>> 15)) >>> 0) / 2 ** 32;
}

/** Entries that token i reads, in rising order: the k best visible ones of c4, all visible ones of c128. */
export function read(kind, i, k) {
  const seen = Array.from({ length: entries(kind, i + 1) }, (_, j) => j);
  if (kind !== "c4" || seen.length <= k) return seen;
  // Among equal scores the lower entry wins.
  return seen.sort((a, b) => score(i, b) - score(i, a) || a - b).slice(0, k).sort((a, b) => a - b);
}
