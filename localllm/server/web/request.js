// From settings, as they stand in the panel, to the body of a request. Knows nothing of elements or servers.

/** What a visitor wrote makes no sense. Its message is for them. */
export class Senseless extends Error {}

export const SETTINGS = {
  model: "",
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  seed: "",
  thinking: "",
  schema: "",
  more: "",
};
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens"];
const THINKING = {
  on: { chat_template_kwargs: { enable_thinking: true } },
  off: { reasoning_effort: "none" },
  low: { reasoning_effort: "low" },
  medium: { reasoning_effort: "medium" },
  high: { reasoning_effort: "high" },
};

/** The body that asks for an answer to `messages`. What is left empty is as the model recommends, but for the seed:
 * one is drawn, so that every answer can be had again. Throws Senseless. */
export function bodyOf(settings, messages) {
  const numbers = NUMBERS.filter((name) => settings[name] !== "").map((name) => [name, Number(settings[name])]);
  const schema = json("The JSON schema", settings.schema);
  return {
    model: settings.model,
    messages,
    ...Object.fromEntries(numbers),
    seed: settings.seed === "" ? drawn() : Number(settings.seed),
    ...THINKING[settings.thinking],
    ...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } }),
    ...json("What stands in further fields", settings.more),
    stream: true,
    stream_options: { include_usage: true },
    timings_per_token: true,
  };
}

function json(what, text) {
  if (!text.trim()) return null;
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Senseless(`${what} is not JSON: ${error.message}`);
  }
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    throw new Senseless(`${what} is no JSON object, as in {"type": "object"}.`);
  }
  return value;
}

const drawn = () => crypto.getRandomValues(new Uint32Array(1))[0];
