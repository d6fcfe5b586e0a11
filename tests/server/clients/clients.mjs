// Asks a server of localllm through the npm packages that programs use. Each case prints what came, as one line of JSON.
//
//     node clients.mjs CASE URL
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { Ollama } from "ollama";
import { createOllama } from "ollama-ai-provider-v2";

const [, , name, url, modelName] = process.argv;
const SCHEMA = {
  type: "object",
  properties: { name: { type: "string", maxLength: 12 }, happy: { type: "boolean" } },
  required: ["name", "happy"],
};
const PROMPT = "Tell a short story.";
const SETTINGS = { maxOutputTokens: 60, temperature: 0, maxRetries: 0 };
const weather = tool({
  description: "The weather of a city",
  inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string", maxLength: 8 } }, required: ["city"] }),
  execute: async () => ({ degrees: 20 }),
});

const providers = {
  "ollama-ai-provider-v2": () => createOllama({ baseURL: `${url}/api` }),
  "@ai-sdk/openai-compatible": () =>
    createOpenAICompatible({ name: "local", baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true }),
  "@ai-sdk/anthropic": () => createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" }),
};

// What the SDK asks of every provider. Where the model is made to call, it has markup of its own.
async function everyProvider(provider) {
  const model = provider(modelName);
  const told = {};
  const text = await generateText({ model, system: "Be short.", prompt: PROMPT, ...SETTINGS });
  told.text = text.text;
  told.usage = text.usage.outputTokens;
  const streamed = streamText({ model, prompt: PROMPT, ...SETTINGS });
  told.streamed = "";
  for await (const piece of streamed.textStream) told.streamed += piece;
  told.finish = await streamed.finishReason;
  const object = await generateText({ model, prompt: PROMPT, ...SETTINGS, output: Output.object({ schema: jsonSchema(SCHEMA) }) });
  told.object = object.output;
  const parts = [{ type: "text", text: PROMPT, providerOptions: { anthropic: { cacheControl: { type: "ephemeral" } } } }];
  told.conversation = (
    await generateText({
      model,
      messages: [
        { role: "user", content: parts },
        { role: "assistant", content: "Once." },
        { role: "user", content: "Go on." },
      ],
      ...SETTINGS,
    })
  ).text;
  return told;
}

async function tools(provider, options) {
  const done = await generateText({
    model: provider(modelName),
    prompt: PROMPT,
    tools: { weather },
    toolChoice: "required",
    stopWhen: stepCountIs(1),
    ...SETTINGS,
    maxOutputTokens: 200,
    providerOptions: options,
  });
  return { calls: done.toolCalls.map((call) => call.toolName), inputs: done.toolCalls.map((call) => call.input), results: done.toolResults.length };
}

const cases = {
  ollama: async () => {
    const client = new Ollama({ host: url });
    const told = { models: (await client.list()).models.map((one) => one.name), version: (await client.version()).version };
    const messages = [{ role: "user", content: PROMPT }];
    const options = { temperature: 0, num_predict: 60 };
    told.chat = (await client.chat({ model: modelName, messages, options, keep_alive: "-1" })).message.content;
    told.streamed = "";
    for await (const part of await client.chat({ model: modelName, messages, options, stream: true })) told.streamed += part.message.content;
    told.object = JSON.parse((await client.chat({ model: modelName, messages, options, format: SCHEMA })).message.content);
    told.generated = (await client.generate({ model: modelName, prompt: PROMPT, options })).response;
    told.vectors = (await client.embed({ model: modelName, input: ["a cat", "a dog"] })).embeddings.map((one) => one.length);
    told.shown = (await client.show({ model: modelName })).capabilities;
    told.running = (await client.ps()).models.map((one) => one.name);
    return told;
  },
};
for (const [package_, make] of Object.entries(providers)) {
  cases[package_] = () => everyProvider(make());
  cases[`${package_} tools`] = () => tools(make());
}
cases["ollama-ai-provider-v2 embed"] = async () => ({
  vector: (await embed({ model: providers["ollama-ai-provider-v2"]().embedding(modelName), value: "a cat" })).embedding.length,
});
cases["@ai-sdk/openai-compatible embed"] = async () => ({
  vector: (await embed({ model: providers["@ai-sdk/openai-compatible"]().embeddingModel(modelName), value: "a cat" })).embedding.length,
});

console.log(JSON.stringify(await cases[name]()));
