// What the tiny model reads in a text: exactly the window and the entries of its rules, weights that make a whole, the same
// numbers in every form, refusals in words. Beside a server, in `longwave explore`, and the sentence where there is no model.

import { axe, check, page, same, shoot } from "./tools.mjs";

const lit = (opened, row, state) => opened.$$eval(`.cell.${row}.${state}`, (cells) => cells.map((cell) => Number(cell.dataset.index)));
const cell = (row, index) => `#read-picture .cell.${row}[data-index="${index}"]`;
const ready = (opened) => opened.waitForSelector("#read-words button");
const range = (from, to) => Array.from({ length: to - from + 1 }, (_, place) => from + place);

async function layer(opened, number) {
  const answered = opened.waitForResponse((response) => response.url().endsWith("/api/attention"));
  await opened.getByLabel("Layer", { exact: true }).selectOption(String(number));
  const body = await (await answered).json();
  await opened.waitForFunction((wanted) => document.getElementById("read-title").textContent.includes(`layer ${wanted}`), number);
  return body;
}

export async function attentionText(browser, base, place, shots) {
  const url = `${base}#attention?text`;
  const say = (what) => `${place}: text: ${what}`;
  const { page: opened, faults, close } = await page(browser, url);
  if (place === "files") {
    await opened.waitForSelector("#read-about code");
    check(say("an export says what to run"), (await opened.textContent("#read-about")).includes("longwave explore MODEL"));
    same(say("axe finds nothing serious"), await axe(opened), []);
    same(say("no error, nothing leaves the origin"), faults, []);
    return close();
  }
  await ready(opened);
  const body = await layer(opened, 4);
  const tokens = body.tokens.length;
  same(say("layer 4 of the tiny model has picked entries"), body.kind, "c4");
  const wholes = body.reads.map(({ window, weights, sink }) => [...window, ...weights, sink].reduce((sum, weight) => sum + weight, 0));
  check(say("the weights of every token make a whole"), wholes.every((whole) => Math.abs(whole - 1e6) < 15_000), wholes);
  const last = tokens - 1;
  same(say("the last token has its window"), await lit(opened, "token", "window"), range(Math.max(0, last - 127), last));
  same(say("and reads every whole entry of a short text"), await lit(opened, "entry", "read"), range(0, Math.floor(tokens / 4) - 1));
  await opened.hover(cell("token", 12));
  same(say("token 12 reads entries 0..2, as the rules have it"), await lit(opened, "entry", "read"), [0, 1, 2]);
  check(say("a bar for each weight"), (await opened.locator("#read-picture .weight").count()) === 13 + 3);
  check(say("it is named"), (await opened.textContent("#read-title")).startsWith("Token 12 “"));
  const listed = await opened.$$eval("#read-shares .weights .number", (numbers) => numbers.map((number) => parseFloat(number.textContent)));
  const most = [...body.reads[12].window, ...body.reads[12].weights].sort((a, b) => b - a).map((weight) => Number((weight / 1e4).toFixed(1)));
  same(say("the list has the largest weights first"), listed, most.slice(0, 8));
  await opened.hover(cell("entry", 2));
  check(say("an entry tells who reads it"), (await opened.textContent("#read-shares")).includes("Made of tokens 4 to 11"));

  await opened.mouse.move(5, 5);
  await opened.click('#read-words button[data-index="20"]');
  check(say("a word can be chosen"), (await opened.textContent("#read-title")).startsWith("Token 20 “"));
  const inSight = await opened.$eval(cell("token", 20), (chosen) => {
    const [inner, outer] = [chosen, document.getElementById("read-picture")].map((element) => element.getBoundingClientRect());
    return inner.left >= outer.left && inner.right <= outer.right;
  });
  check(say("and the picture shows it"), inSight);
  await opened.keyboard.press("ArrowRight");
  check(say("arrows walk along the words"), (await opened.textContent("#read-title")).startsWith("Token 21 “"));
  await opened.focus(cell("token", 21));
  await opened.keyboard.press("ArrowLeft");
  await opened.keyboard.press("ArrowUp");
  check(say("and in the picture, up to the entries"), (await opened.textContent("#read-title")).startsWith("Entry 5 "));

  const window = await layer(opened, 0);
  same(say("a window layer has no entries"), [window.kind, await opened.locator("#read-picture .cell.entry").count()], ["window", 0]);
  await opened.getByRole("button", { name: "A longer text" }).click();
  await opened.waitForFunction((before) => document.querySelectorAll("#read-words button").length > before, tokens);
  await opened.mouse.move(5, 5);
  const long = await layer(opened, 2);
  const picked = long.reads.at(-1).entries;
  check(say("of more than 64 entries the tiny model picks 64"), picked.length === 64 && Math.floor(long.tokens.length / 4) > 64, picked.length);
  same(say("the picture has the indexer's picks"), await lit(opened, "entry", "read"), picked);
  check(say("what was left out is said"), (await opened.textContent("#read-shares")).includes("left"));
  const dense = await layer(opened, 1);
  same(say("c128 reads all of its entries"), await lit(opened, "entry", "read"), range(0, Math.floor(dense.tokens.length / 128) - 1));
  same(say("in squares of 32 tokens"), await opened.locator("#read-picture .cell.token").count(), Math.ceil(dense.tokens.length / 32));
  same(say("axe finds nothing serious"), await axe(opened), []);
  same(say("no error, nothing leaves the origin"), faults, []);
  await opened.fill("#read-text", "the river ".repeat(400));
  await opened.getByRole("button", { name: "Read", exact: true }).click();
  await opened.waitForFunction(() => document.getElementById("read-error").textContent !== "");
  check(say("a text that is too long is refused in words"), /512 can be shown at most/.test(await opened.textContent("#read-error")), await opened.textContent("#read-error"));
  await close();

  const phone = await page(browser, url, { viewport: { width: 360, height: 740 }, hasTouch: true });
  await ready(phone.page);
  await phone.page.tap('#read-words button[data-index="9"]');
  check(say("a tap chooses a word on a phone"), (await phone.page.textContent("#read-title")).startsWith("Token 9 “"));
  same(say("a phone does not scroll sideways"), await phone.page.evaluate(() => document.documentElement.scrollWidth), 360);
  await phone.close();
  if (place === "server") {
    await shoot(browser, url, "text", shots, ready);
    await shoot(browser, url, "text128", shots, async (shot) => {
      await ready(shot);
      await shot.getByRole("button", { name: "A longer text" }).click();
      await layer(shot, 1);
    });
  }
}
