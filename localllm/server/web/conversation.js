// A conversation: turns in a tree, of which one path is shown. A turn that is edited or answered again gets a
// sibling, and nothing is lost. Plain objects, kept as JSON. Knows nothing of pages, storage or servers.

/** `leaf` is the place of the last turn that is shown, -1 where there is none; a turn's place never changes. */
export function begun(settings) {
  const now = Date.now();
  const id = `${now.toString(36)}-${Math.floor(Math.random() * 2 ** 48).toString(36)}`;
  return { id, title: "", changed: now, settings: { ...settings }, turns: [], leaf: -1 };
}

/** The place of a new turn below `parent`, which is shown from now on. */
export function add(conversation, parent, turn) {
  conversation.leaf = conversation.turns.push({ parent, ...turn }) - 1;
  conversation.changed = Date.now();
  return conversation.leaf;
}

/** The places from the first turn to `leaf`. */
export function path(conversation, leaf = conversation.leaf) {
  const places = [];
  for (let place = leaf; place >= 0; place = conversation.turns[place].parent) places.push(place);
  return places.reverse();
}

/** The places below each place, and below -1. */
export function children(conversation) {
  const below = new Map();
  conversation.turns.forEach(({ parent }, place) => {
    if (!below.has(parent)) below.set(parent, []);
    below.get(parent).push(place);
  });
  return below;
}

/** Show the branch that goes through `place`, to where it was continued last. */
export function choose(conversation, place) {
  const below = children(conversation);
  conversation.leaf = place;
  while (below.has(conversation.leaf)) conversation.leaf = below.get(conversation.leaf).at(-1);
}

/** The place beside the last turn of the path that has branches, or -1. */
export function beside(conversation, by) {
  const below = children(conversation);
  const branches = path(conversation).map((place) => [place, below.get(conversation.turns[place].parent)]);
  const [place, siblings] = branches.findLast(([, places]) => places.length > 1) ?? [-1, []];
  return siblings[siblings.indexOf(place) + by] ?? -1;
}

/** The last turn of a role on the path, or -1. */
export function last(conversation, role) {
  return path(conversation).findLast((place) => conversation.turns[place].role === role) ?? -1;
}

/** A name from what was said first. */
export function titled(conversation) {
  const said = conversation.turns.find(({ role }) => role === "user")?.content.trim().replace(/\s+/g, " ") ?? "";
  return conversation.title || (said.length > 60 ? `${said.slice(0, 59)}…` : said) || "New chat";
}

/** The path as messages of `/v1/chat/completions`, with the system prompt; answers without anything are left out. */
export function messages(conversation, leaf) {
  const said = path(conversation, leaf).map((place) => conversation.turns[place]);
  const system = conversation.settings.system.trim();
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...said.filter(({ role, content, calls }) => role !== "assistant" || content || calls?.length).map(message),
  ];
}

function message({ role, content, thoughts, calls, call_id }) {
  if (role === "tool") return { role, content, tool_call_id: call_id };
  if (role === "user") return { role, content };
  return {
    role,
    content,
    ...(thoughts && { reasoning_content: thoughts }),
    ...(calls?.length && { tool_calls: calls.map((call) => ({ ...call, type: "function" })) }),
  };
}
