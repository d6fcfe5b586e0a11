// Keys. Single letters count only outside of fields; Escape and Ctrl+K everywhere. Help lists them from the commands.

import { byId, element } from "./dom.js";

const FIXED = [
  ["Enter", "Send"],
  ["Shift + Enter", "New line"],
  ["↑ in an empty field", "Edit the last message"],
  ["Esc", "Stop the answer"],
  ["Ctrl / ⌘ + K", "Find a command, a chat or a model"],
];

/** commands: objects {name, key, run}. palette and stop are called for their keys. */
export function listen(commands, { palette, stop }) {
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      event.preventDefault();
      if (!document.querySelector("dialog[open]")) palette();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") {
      stop();
      return;
    }
    const command = commands.find(({ key }) => key === event.key);
    if (!command || event.target.closest("input, textarea, select")) return;
    event.preventDefault();
    command.run();
  });
}

export function help(commands) {
  const keys = [...FIXED, ...commands.filter(({ key }) => key).map(({ key, name }) => [key, name])];
  byId("keys").replaceChildren(
    ...keys.map(([key, name]) => element("div", {}, element("dt", {}, element("kbd", {}, key)), element("dd", {}, name))),
  );
  byId("help").showModal();
}
