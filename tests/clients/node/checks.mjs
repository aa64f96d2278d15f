// What the JavaScript client tests share: `node NAME.mjs BASE_URL [MODEL]`, where BASE_URL has no /v1, against a server that
// answers from the script of replies.py. One line per check; exits 1 when one failed; a check that throws is a failed check.
import { isDeepStrictEqual } from "node:util";

export const base = (process.argv[2] ?? "http://127.0.0.1:8000").replace(/\/$/, "");
export const model = process.argv[3] ?? "deepseek-v4-flash";
let passed = 0;
let failed = 0;

export function check(name, good, detail = "") {
  if (good) passed += 1;
  else failed += 1;
  const text = typeof detail === "string" ? detail : JSON.stringify(detail);
  console.log(`${good ? "ok  " : "FAIL"} ${name}${text ? `: ${good ? text.slice(0, 150) : text}` : ""}`);
  return good;
}

export function equal(name, got, expected) {
  const good = isDeepStrictEqual(got, expected);
  return check(name, good, good ? JSON.stringify(got) : `${JSON.stringify(got)}, expected ${JSON.stringify(expected)}`);
}

export async function raises(name, kind, body, text) {
  try {
    const result = await body();
    check(name, false, `accepted: ${JSON.stringify(result)?.slice(0, 300)}`);
  } catch (error) {
    const good = error instanceof kind && String(error.message).includes(text);
    check(name, good, `${error.constructor.name}: ${error.message}`);
    return error;
  }
}

export async function main(...groups) {
  for (const group of groups) {
    try {
      await group();
    } catch (error) {
      check(group.name, false, `${error.constructor.name}: ${error.message} ${error.stack?.split("\n").find((line) => line.includes(".mjs") && !line.includes("node_modules"))?.trim()}`);
    }
  }
  console.log(`${passed} passed, ${failed} failed`);
  process.exit(failed ? 1 : 0);
}
