// The Anthropic SDK for JavaScript on the Messages API: node anthropic.mjs BASE_URL (see checks.mjs).
import Anthropic from "@anthropic-ai/sdk";
import { base, check, equal, main, model, raises } from "./checks.mjs";

const client = new Anthropic({ baseURL: base, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { name: "get_weather", description: "Get the weather in a city.", input_schema };
const thinking = { type: "enabled", budget_tokens: 2000 };
const user = (content) => [{ role: "user", content }];
const body = (content, more = {}) => ({ model, max_tokens: 4000, thinking, messages: user(content), ...more });
const text = (message) => message.content.filter((b) => b.type === "text").map((b) => b.text).join("");

async function answers() {
  const message = await client.messages.create(body("What is the capital of Norway?"));
  equal("blocks", message.content.map((b) => b.type), ["thinking", "text"]);
  equal("text", text(message), "The capital of Norway is Oslo.");
  check("signature", message.content[0].signature);
  const off = await client.messages.create(body("What is the capital of Sweden?", { thinking: { type: "disabled" } }));
  equal("no thinking", text(off), "The capital of Sweden is Stockholm.");
  const stream = client.messages.stream(body("What is the capital of Norway?"));
  let said = "";
  let thought = "";
  stream.on("text", (delta) => (said += delta));
  stream.on("thinking", (delta) => (thought += delta));
  const final = await stream.finalMessage();
  equal("streamed", [thought, said, final.stop_reason], ["They ask for a city.", "The capital of Norway is Oslo.", "end_turn"]);
  check("streamed: usage and signature", final.usage.output_tokens > 5 && final.content[0].signature, final.usage);
}

async function tools() {
  const first = await client.messages.create(body("What is the weather in Paris?", { tools: [weather] }));
  const use = first.content.at(-1);
  equal("call", [use.type, use.name, use.input, first.stop_reason], ["tool_use", "get_weather", { city: "Paris" }, "tool_use"]);
  const messages = [
    ...user("What is the weather in Paris?"),
    { role: "assistant", content: first.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "21 degrees" }] },
  ];
  equal("answer after the result", text(await client.messages.create(body("", { messages, tools: [weather] }))), "It is 21 degrees in Paris.");
  const stream = client.messages.stream(body("The weather in Rome and Oslo?", { tools: [weather] }));
  const uses = (await stream.finalMessage()).content.filter((b) => b.type === "tool_use");
  equal("parallel calls, streamed", uses.map((b) => b.input.city), ["Rome", "Oslo"]);
}

async function counting() {
  const { input_tokens } = await client.messages.countTokens({ model, messages: user("What is the capital of Norway?") });
  check("countTokens", input_tokens > 5, input_tokens);
}

async function errors() {
  const bad = await raises("error: temperature", Anthropic.BadRequestError, () => client.messages.create(body("x", { temperature: 9 })), "temperature");
  equal("error: object", [bad?.error?.type, bad?.error?.error?.type], ["error", "invalid_request_error"]);
  await raises("error: unknown model", Anthropic.NotFoundError, () => client.messages.create(body("x", { model: "claude-9" })), "claude-9");
  const read = async () => await client.messages.stream(body("break the engine")).finalMessage();
  await raises("error in a stream", Anthropic.APIError, read, "the engine broke");
}

await main(answers, tools, counting, errors);
