// The AI SDK with @ai-sdk/openai-compatible and @ai-sdk/deepseek: node ai_sdk.mjs BASE_URL (see checks.mjs).
import { createDeepSeek } from "@ai-sdk/deepseek";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { base, check, equal, main, model, raises } from "./checks.mjs";

const baseURL = `${base}/v1`;
const providers = {
  "openai-compatible": createOpenAICompatible({ name: "longwave", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true }),
  deepseek: createDeepSeek({ baseURL, apiKey: "none" }),
};
const Person = z.object({ name: z.string(), age: z.number().int() });

async function each(name, provider) {
  const common = { model: provider(model), maxRetries: 0 };
  const answer = await generateText({ ...common, system: "Be brief.", prompt: "What is the capital of Norway?" });
  equal(`${name}: text`, answer.text, "The capital of Norway is Oslo.");
  equal(`${name}: reasoning`, answer.reasoningText, "They ask for a city.");
  equal(`${name}: finish`, answer.finishReason, "stop");
  check(`${name}: usage`, answer.usage.inputTokens > 0 && answer.usage.outputTokens > 0, answer.usage);
  const stream = streamText({ ...common, prompt: "What is the capital of Norway?", onError: () => {} });
  const kinds = new Set();
  let said = "";
  let thought = "";
  for await (const part of stream.fullStream) {
    kinds.add(part.type);
    if (part.type === "text-delta") said += part.text;
    if (part.type === "reasoning-delta") thought += part.text;
  }
  equal(`${name}: streamed`, [thought, said], ["They ask for a city.", "The capital of Norway is Oslo."]);
  const usage = await stream.usage;
  check(`${name}: streamed usage`, usage.inputTokens > 0 && usage.outputTokens > 0, usage);
  const ran = [];
  const get_weather = tool({
    description: "Get the weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      ran.push(city);
      return city === "Paris" ? "21 degrees" : city === "Rome" ? "rome is warm" : "oslo is cold";
    },
  });
  const steps = await generateText({ ...common, prompt: "What is the weather in Paris?", tools: { get_weather }, stopWhen: stepCountIs(3) });
  equal(`${name}: tool and answer`, [ran, steps.text, steps.steps.length], [["Paris"], "It is 21 degrees in Paris.", 2]);
  ran.length = 0;
  const both = streamText({ ...common, prompt: "The weather in Rome and Oslo?", tools: { get_weather }, stopWhen: stepCountIs(3), onError: () => {} });
  equal(`${name}: two tools and answer, streamed`, [await both.text, [...ran].sort()], ["Rome is warm, Oslo is cold.", ["Oslo", "Rome"]]);
  const typed = await generateText({ ...common, prompt: "Give a person as JSON", output: Output.object({ schema: Person }) });
  equal(`${name}: structured output`, typed.output, { name: "Ada", age: 36 });
  const error = await raises(`${name}: error`, Error, () => generateText({ ...common, model: provider("gpt-9"), prompt: "x" }), "gpt-9");
  check(`${name}: error class and status`, APICallError.isInstance(error) && error.statusCode === 404, String(error?.statusCode));
  let broke;
  const broken = streamText({ ...common, prompt: "break the engine", onError: ({ error }) => (broke = error) });
  for await (const part of broken.fullStream) if (part.type === "error") broke = part.error;
  check(`${name}: error in a stream`, JSON.stringify(broke ?? "")?.includes("the engine broke") || String(broke?.message ?? broke).includes("the engine broke"), String(broke?.message ?? broke));
}

async function forced() {
  const get_weather = tool({ inputSchema: z.object({ city: z.string() }) });
  for (const [name, provider] of Object.entries(providers)) {
    const common = { model: provider(model), maxRetries: 0 };
    const answer = await generateText({ ...common, prompt: "forced weather", tools: { get_weather }, toolChoice: "required" });
    equal(`${name}: forced tool`, answer.toolCalls.map((call) => call.input), [{ city: "Paris" }]);
  }
}

async function thinking() {
  const common = { model: providers.deepseek(model), maxRetries: 0 };
  const off = { deepseek: { thinking: { type: "disabled" } } };
  const answer = await generateText({ ...common, prompt: "What is the capital of Sweden?", providerOptions: off });
  equal("deepseek: thinking disabled", answer.text, "The capital of Sweden is Stockholm.");
  const low = await generateText({ model: providers["openai-compatible"](model), prompt: "What is the capital of Norway?", providerOptions: { longwave: { reasoningEffort: "low" } } });
  equal("openai-compatible: effort", low.text, "The capital of Norway is Oslo.");
}

await main(...Object.entries(providers).map(([name, provider]) => async () => each(name, provider)), forced, thinking);
