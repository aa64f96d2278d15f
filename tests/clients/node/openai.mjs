// The OpenAI SDK for JavaScript on chat completions and responses: node openai.mjs BASE_URL (see checks.mjs).
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { base, check, equal, main, model, raises } from "./checks.mjs";

const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const Person = z.object({ name: z.string(), age: z.number().int() });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const weather = { type: "function", function: { name: "get_weather", description: "Get the weather in a city.", parameters } };
const user = (content) => [{ role: "user", content }];
const ask = (content, more = {}) => client.chat.completions.create({ model, messages: user(content), ...more });

async function answers() {
  const ids = [];
  for await (const one of client.models.list()) ids.push(one.id);
  check("models", ids.includes(model), ids);
  const answer = await ask("What is the capital of Norway?");
  equal("chat", answer.choices[0].message.content, "The capital of Norway is Oslo.");
  equal("chat: reasoning", answer.choices[0].message.reasoning_content, "They ask for a city.");
  const off = await ask("What is the capital of Sweden?", { thinking: { type: "disabled" } });
  equal("chat, no thinking", off.choices[0].message.content, "The capital of Sweden is Stockholm.");
  let text = "";
  let usage;
  for await (const chunk of await ask("What is the capital of Norway?", { stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  equal("chat, streamed", text, "The capital of Norway is Oslo.");
  check("chat, streamed: usage", usage?.completion_tokens > 0, usage);
}

async function tools() {
  const ran = [];
  const runner = client.chat.completions.runTools({
    model,
    messages: user("What is the weather in Paris?"),
    tools: [
      {
        type: "function",
        function: {
          ...weather.function,
          parse: JSON.parse,
          function: ({ city }) => {
            ran.push(city);
            return "21 degrees";
          },
        },
      },
    ],
  });
  equal("runTools: answer", await runner.finalContent(), "It is 21 degrees in Paris.");
  equal("runTools: the tool ran", ran, ["Paris"]);
  const runner2 = client.chat.completions.stream({ model, messages: user("The weather in Rome and Oslo?"), tools: [weather] });
  const final = await runner2.finalChatCompletion();
  const cities = final.choices[0].message.tool_calls.map((call) => JSON.parse(call.function.arguments).city);
  equal("parallel calls, streamed", cities, ["Rome", "Oslo"]);
  equal("parallel calls, streamed: finish", final.choices[0].finish_reason, "tool_calls");
}

async function forcedTools() {
  const forced = await ask("forced weather", { tools: [weather], tool_choice: "required" });
  equal("tool_choice required", forced.choices[0].message.tool_calls?.[0]?.function.name, "get_weather");
}

async function structured() {
  const messages = user("Give a person as JSON");
  const parsed = await client.chat.completions.parse({ model, messages, response_format: zodResponseFormat(Person, "person") });
  equal("parse", parsed.choices[0].message.parsed, { name: "Ada", age: 36 });
  const text = { format: zodTextFormat(Person, "person") };
  const response = await client.responses.parse({ model, input: "Give a person as JSON", text });
  equal("parse, responses", response.output_parsed, { name: "Ada", age: 36 });
}

async function responses() {
  const answer = await client.responses.create({ model, input: "What is the capital of Norway?" });
  equal("responses", answer.output_text, "The capital of Norway is Oslo.");
  const stream = client.responses.stream({ model, input: "What is the capital of Norway?" });
  let delta = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") delta += event.delta;
  equal("responses, streamed: deltas", delta, "The capital of Norway is Oslo.");
  equal("responses, streamed: final", (await stream.finalResponse()).output_text, "The capital of Norway is Oslo.");
  const tool = { type: "function", strict: true, ...weather.function };
  const first = await client.responses.create({ model, input: "What is the weather in Paris?", tools: [tool] });
  const call = first.output.find((item) => item.type === "function_call");
  equal("responses: call", [call?.name, JSON.parse(call?.arguments ?? "{}")], ["get_weather", { city: "Paris" }]);
  const input = [{ type: "function_call_output", call_id: call.call_id, output: "21 degrees" }];
  const last = await client.responses.create({ model, input, previous_response_id: first.id, tools: [tool] });
  equal("responses: answer after the result", last.output_text, "It is 21 degrees in Paris.");
  equal("responses: retrieve", (await client.responses.retrieve(first.id)).id, first.id);
}

async function errors() {
  const bad = await raises("error: temperature", OpenAI.BadRequestError, () => ask("x", { temperature: 9 }), "temperature");
  check("error: param and code", bad?.param === "temperature" && bad?.code, { param: bad?.param, code: bad?.code, type: bad?.type });
  await raises("error: unknown model", OpenAI.NotFoundError, () => ask("x", { model: "gpt-9" }), "gpt-9");
  const read = async () => {
    for await (const _ of await ask("break the engine", { stream: true }));
  };
  await raises("error in a stream", OpenAI.APIError, read, "the engine broke");
  const abort = new AbortController();
  setTimeout(() => abort.abort(), 300);
  const slow = async () => {
    for await (const _ of await client.chat.completions.create({ model, messages: user("a slow answer"), stream: true }, { signal: abort.signal }));
    throw new OpenAI.APIUserAbortError();
  };
  await raises("abort", OpenAI.APIUserAbortError, slow, "");
  equal("after an abort", (await ask("What is the capital of Norway?")).choices[0].finish_reason, "stop");
}

await main(answers, tools, forcedTools, structured, errors, responses);
