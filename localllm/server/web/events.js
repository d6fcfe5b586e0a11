// Server-sent events of a response, as JSON, one after the other. Knows nothing of what they say.

/** Yields each event's object, and ends at `[DONE]`. Throws Broken where the stream ends before. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Broken("The connection ended in the middle of the answer.");
      text += value;
      const whole = text.split("\n\n");
      text = whole.pop();
      for (const event of whole) {
        if (!event.startsWith("data: ")) continue; // a comment, which keeps the connection open
        if (event === "data: [DONE]") return;
        yield JSON.parse(event.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have ended already
  }
}

/** A stream without an end. */
export class Broken extends Error {}
