// The attention lesson: what is lit for a token, an entry, the keyboard, time and every kind of layer.

import { axe, check, page, same, shoot } from "./tools.mjs";

const lit = (opened, row, state) => opened.$$eval(`.cell.${row}.${state}`, (cells) => cells.map((cell) => Number(cell.dataset.index)));
const upTo = (count) => Array.from({ length: count }, (_, index) => index);
const cell = (row, index) => `.cell.${row}[data-index="${index}"]`;
const set = (opened, label, value) => opened.getByLabel(label, { exact: false }).first().fill(String(value));

export async function attention(browser, base, place, shots) {
  const url = `${base}#attention`;
  const { page: opened, faults, close } = await page(browser, url);
  const say = (what) => `${place}: attention: ${what}`;
  await opened.waitForSelector(cell("token", 12));

  await opened.hover(cell("token", 3));
  await opened.hover(cell("token", 12));
  same(say("token 12 of 13 has window 0..12"), await lit(opened, "token", "window"), upTo(13));
  same(say("token 12 of 13 reads entries 0..2"), await lit(opened, "entry", "read"), [0, 1, 2]);
  same(say("entry 3 is not whole"), await lit(opened, "entry", "future"), [3]);
  check(say("the reason is said"), (await opened.textContent("#why")).includes("entry 3 needs token 15"));
  await opened.hover(cell("token", 3));
  same(say("token 3 reads entry 0, which it closes"), await lit(opened, "entry", "read"), [0]);
  await opened.hover(cell("token", 2));
  same(say("token 2 reads no entry"), await lit(opened, "entry", "read"), []);
  await opened.hover(cell("entry", 1));
  same(say("entry 1 is made of tokens 0..7"), await lit(opened, "token", "source"), upTo(8));
  same(say("entry 1 is read from token 7 on"), await lit(opened, "token", "reader"), [7, 8, 9, 10, 11, 12]);
  await opened.hover(cell("entry", 0));
  same(say("entry 0 is made of tokens 0..3"), await lit(opened, "token", "source"), upTo(4));

  // What lies between focus and the end of the page by keyboard alone.
  await opened.mouse.move(5, 5);
  await opened.evaluate(() => document.activeElement.blur());
  const stops = new Set();
  for (let press = 0; press < 30; press++) {
    await opened.keyboard.press("Tab");
    stops.add(await opened.evaluate(() => document.activeElement.closest("[data-row]")?.dataset.row
      ?? document.activeElement.getAttribute("aria-label") ?? document.activeElement.id.split("-")[0] ?? document.activeElement.tagName));
  }
  const wanted = ["token", "entry", "range", "play", "One token back"];
  check(say("Tab reaches every control and both rows"), wanted.every((stop) => stops.has(stop)), [...stops]);
  await opened.focus(cell("token", 12));
  await opened.keyboard.press("ArrowLeft");
  same(say("arrows walk along the tokens"), await lit(opened, "token", "focus"), [11]);
  await opened.keyboard.press("ArrowUp");
  same(say("and up to the entries"), await lit(opened, "entry", "focus"), [2]);
  await opened.keyboard.press("Home");
  same(say("Home is the first entry"), await lit(opened, "entry", "focus"), [0]);
  await opened.keyboard.press("ArrowDown");
  same(say("and down to the token that closes it"), await lit(opened, "token", "focus"), [3]);

  await set(opened, "Tokens", 64);
  same(say("64 tokens, 16 entries"), [await opened.locator(".cell.token").count(), await opened.locator(".cell.entry").count()], [64, 16]);
  await set(opened, "Entries a query picks", 4);
  same(say("four picks of sixteen"), [(await lit(opened, "entry", "read")).length, (await lit(opened, "entry", "passed")).length], [4, 12]);
  await set(opened, "Tokens", 1);
  same(say("one token, no whole entry"), [await lit(opened, "token", "window"), await lit(opened, "entry", "read")], [[0], []]);
  await set(opened, "Tokens", 13);
  await set(opened, "Now at token", 6);
  same(say("at token 6 the rest has not come"), await lit(opened, "token", "future"), [7, 8, 9, 10, 11, 12]);
  await opened.click("#play");
  await opened.waitForFunction(() => document.querySelectorAll(".cell.token.future").length === 4);
  check(say("time goes on when played"), true);

  await opened.getByText("c128a", { exact: true }).click();
  same(say("c128a: 24 squares of 32 tokens, 6 entries"), [await opened.locator(".cell.token").count(), await opened.locator(".cell.entry").count()], [24, 6]);
  same(say("c128a reads all whole entries"), await lit(opened, "entry", "read"), upTo(6));
  same(say("the window is the last four squares"), await lit(opened, "token", "window"), [20, 21, 22, 23]);
  await opened.hover(cell("entry", 2));
  same(say("a c128a entry is four squares without overlap"), await lit(opened, "token", "source"), [8, 9, 10, 11]);
  await opened.getByText("window only", { exact: true }).click();
  same(say("a window layer has no entries"), await opened.locator(".cell.entry").count(), 0);
  same(say("axe finds nothing serious"), await axe(opened), []);
  same(say("no error, nothing leaves the origin"), faults, []);
  await close();

  const phone = await page(browser, url, { viewport: { width: 360, height: 740 }, hasTouch: true });
  await phone.page.waitForSelector(cell("token", 12));
  await phone.page.tap(cell("token", 7));
  same(say("a tap shows a token on a phone"), await lit(phone.page, "entry", "read"), [0, 1]);
  same(say("a phone does not scroll sideways"), await phone.page.evaluate(() => document.documentElement.scrollWidth), 360);
  await phone.close();
  if (place === "server") {
    await shoot(browser, url, "attention", shots, (opened) => opened.waitForSelector(cell("token", 12)));
    await shoot(browser, url, "attention64", shots, async (opened) => {
      await set(opened, "Tokens", 40);
      await set(opened, "Entries a query picks", 5);
    });
    await shoot(browser, url, "attention128", shots, (opened) => opened.getByText("c128a", { exact: true }).click());
  }
}
