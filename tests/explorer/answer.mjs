// The answer view beside the tiny model: the prompt in tokens, a thought, a call, probabilities, errors in words.

import { axe, check, page, same, shoot } from "./tools.mjs";

const press = (opened, name) => opened.getByRole("button", { name, exact: true }).click();
const ended = (opened) => opened.waitForFunction(() => document.getElementById("answer-usage").textContent.includes("ended with"));

export async function answer(browser, address, shots) {
  const url = `${address}/explore/#answer`;
  const say = (what) => `answer: ${what}`;
  const { page: opened, faults, close } = await page(browser, url);
  await press(opened, "Ask");
  await ended(opened);
  // The answer is sampled: it need not be Oslo.
  const written = await opened.$$eval('[data-kind="content"] .token', (tokens) => tokens.map((token) => token.textContent));
  check(say("the content is shown token by token"), written.length >= 4 && written.some((token) => token.includes("·")), written.join("|"));
  const control = await opened.$$eval("#answer-prompt .control", (tokens) => tokens.length);
  check(say("control tokens of the prompt are framed"), control >= 3, control);
  await opened.focus('[data-kind="content"] button.token');
  check(say("a focused token tells what it was chosen from"), (await opened.locator("#answer-detail .bar").count()) === 5);

  check(say("with id and log-probability"), /id \d+, log-probability -?\d/.test(await opened.textContent("#answer-detail")), await opened.textContent("#answer-detail"));
  await opened.getByText("show", { exact: true }).click();
  const shown = await opened.$$eval("#answer-prompt .token", (tokens) => tokens.map((token) => Number(getComputedStyle(token, "::after").content.replaceAll('"', ""))));
  const prompt = await (await fetch(`${address}/tokenize`, { method: "POST", headers: { "content-type": "application/json" },
    body: JSON.stringify({ messages: [{ role: "user", content: "What is the capital of Norway?" }], thinking: { type: "disabled" } }) })).json();
  same(say("ids are shown when they are asked for"), shown, prompt.tokens);
  await opened.fill("#answer-text", "What is the weather in Paris?");
  await opened.getByText("on", { exact: true }).click();
  await opened.getByText("yes", { exact: true }).click();
  await press(opened, "Ask");
  await ended(opened);
  same(say("reasoning, then a call"), await opened.$$eval("[data-kind]", (parts) => parts.map((part) => part.dataset.kind)), ["reasoning", "call"]);
  check(say("the call is named"), (await opened.textContent('[data-kind="call"]')).includes("get_weather"));
  same(say("axe finds nothing serious"), await axe(opened), []);
  same(say("no error, nothing leaves the origin"), faults, []);
  await opened.fill("#answer-text", "x ".repeat(1_100_000));
  await press(opened, "Ask");
  await opened.waitForFunction(() => document.querySelector(".error").textContent !== "");
  check(say("what the server refuses is said"), /context|token|body/.test(await opened.textContent(".error")), await opened.textContent(".error"));
  await close();
  const phone = await page(browser, url, { viewport: { width: 360, height: 740 } });
  await press(phone.page, "Ask");
  await ended(phone.page);
  same(say("a phone does not scroll sideways"), await phone.page.evaluate(() => document.documentElement.scrollWidth), 360);
  await phone.close();
  await shoot(browser, url, "answer", shots, async (shot) => {
    await press(shot, "Ask");
    await ended(shot);
  });
}
