// What the page asks the server, and what goes wrong, in words. Knows nothing of elements.

import { Broken, events } from "./events.js";
import { key } from "./kept.js";

/** The server said no, or nothing. `status` is 0 where it cannot be reached; `after`: seconds until it may be asked
 * again, or null. Its message is for the visitor. */
export class Refusal extends Error {
  constructor(words, status = 0, after = null) {
    super(words);
    this.status = status;
    this.after = after;
  }
}

const GONE = "The server does not answer. Is `localllm serve` still running?";
const BUSY = [429, 503];
const USUAL_WAIT = 5; // seconds, where a busy server does not say how long

/** Names and contexts of the models, as `/v1/models` lists them. */
export async function models() {
  return (await (await ask("/v1/models")).json()).data;
}

/** The text of `/metrics`. */
export async function metrics() {
  return (await ask("/metrics")).text();
}

/** Chunks of an answer, as they come. Throws Refusal; an AbortError where `signal` stops it. */
export async function* chat(body, signal) {
  const response = await ask("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  try {
    for await (const chunk of events(response)) {
      if (chunk.error) throw refused(chunk.error, 500, null);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Broken || error instanceof TypeError) throw new Refusal(`The answer broke off. ${GONE}`);
    throw error;
  }
}

/** A response that is fine. Throws Refusal; an AbortError where `options.signal` stops it. */
export async function ask(path, options = {}) {
  const headers = { ...(options.body && { "Content-Type": "application/json" }) };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(GONE);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw refused(told.error ?? {}, response.status, response.headers.get("Retry-After"));
}

/** What a server wants that refuses the key that is kept, or that there is none. */
export const wantsKey = () => (key() ? "The server does not take this key" : "The server asks for a key");

export function refused(error, status, after) {
  const message = error.message ?? `The server answered with status ${status}.`;
  if (status === 401) return new Refusal(`${wantsKey()}.`, status);
  if (BUSY.includes(status)) return new Refusal(`The server is busy: ${message}`, status, Number(after) || USUAL_WAIT);
  if (error.code === "context_length_exceeded") {
    const [prompt, context] = [error.n_prompt_tokens, error.n_ctx].map((count) => count.toLocaleString("en"));
    const room = `This chat has ${prompt} tokens, and the model has room for ${context}.`;
    return new Refusal(`${room} Begin a new chat, or edit an earlier message.`, status);
  }
  return new Refusal(message, status);
}
