// An answer as it comes: chunks of a stream gathered into a turn. Knows nothing of elements or servers.

/** A turn that has not said anything yet. `ended` tells why it has: stop, length, tool_calls, stopped, failed. */
export function unanswered({ model, seed }) {
  return { role: "assistant", content: "", thoughts: "", calls: [], model, seed, ended: null, told: {} };
}

/** Take up one chunk. Gives how many tokens it brought, and how many of them were guessed before. */
export function take(turn, chunk) {
  const before = { ...turn.told };
  const choice = chunk.choices.find(({ index }) => index === 0); // of several answers the first
  if (choice) {
    const { content, reasoning_content: thoughts, tool_calls: calls } = choice.delta;
    turn.content += content ?? "";
    turn.thoughts += thoughts ?? "";
    for (const call of calls ?? []) call_of(turn, call);
    turn.ended = choice.finish_reason ?? turn.ended;
  }
  if (chunk.timings) turn.told = chunk.timings;
  if (chunk.usage) turn.usage = chunk.usage;
  const more = (name) => (turn.told[name] ?? 0) - (before[name] ?? 0);
  return { tokens: more("predicted_n"), guessed: more("draft_n_accepted") };
}

/** A call may come whole or in pieces, by its index. */
function call_of(turn, { index, id, function: called }) {
  turn.calls[index] ??= { id: "", function: { name: "", arguments: "" } };
  const call = turn.calls[index];
  call.id ||= id ?? "";
  call.function.name += called?.name ?? "";
  call.function.arguments += called?.arguments ?? "";
}
