// A conversation as a file: Markdown of what is shown, or JSON of all of it. Knows nothing of the page.

import { path, titled } from "./conversation.js";

const SPEAKERS = { user: "You", assistant: "Answer", tool: "Tool" };

export function markdown(conversation) {
  const system = conversation.settings.system.trim();
  const parts = [`# ${titled(conversation)}`, ...(system ? ["## System", system] : [])];
  for (const place of path(conversation)) {
    const { role, content, calls = [], model } = conversation.turns[place];
    parts.push(`## ${SPEAKERS[role]}${model ? ` (${model})` : ""}`, ...(content ? [content] : []));
    for (const call of calls) parts.push(fenced(`${call.function.name} ${call.function.arguments}`));
  }
  return parts.join("\n\n") + "\n";
}

export const json = (conversation) => JSON.stringify(conversation, null, 2) + "\n";

/** Let the browser save a text. */
export function save(name, text, kind) {
  const address = URL.createObjectURL(new Blob([text], { type: kind }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address));
}

/** Letters and digits of any script, as a file's name may have them. */
export const fileName = (conversation, end) =>
  `${titled(conversation).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat"}.${end}`;

/** With a fence that the text does not hold. */
function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}
