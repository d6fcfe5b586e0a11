// Conversations and preferences in the browser's own storage: nothing is sent anywhere. The key of the server is
// kept until the tab is closed.

const CONVERSATION = "localllm.conversation.";

/** Storage is full or switched off. Its message is for the visitor. */
export class NotKept extends Error {}

export function keep(conversation) {
  write(CONVERSATION + conversation.id, JSON.stringify(conversation));
}

export function forget({ id }) {
  localStorage.removeItem(CONVERSATION + id);
}

/** All conversations, the newest first. What is no conversation is left where it is. */
export function conversations() {
  const found = [];
  for (const name of Object.keys(localStorage)) {
    if (!name.startsWith(CONVERSATION)) continue;
    try {
      const kept = JSON.parse(localStorage.getItem(name));
      if (Array.isArray(kept.turns) && kept.settings) found.push(kept);
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
    }
  }
  return found.sort((one, other) => other.changed - one.changed);
}

/** A preference by name, or `usual` where there is none. */
export function preference(name, usual) {
  const text = localStorage.getItem(`localllm.${name}`);
  try {
    return text === null ? usual : JSON.parse(text);
  } catch {
    return usual;
  }
}

/** Where storage is full it holds for this visit only; a chat that is not kept is what the visitor is told of. */
export function prefer(name, value) {
  preferText(name, JSON.stringify(value));
}

/** "light", "dark" or "system"; appearance.js reads it before anything else runs. */
export function preferTheme(theme) {
  preferText("theme", theme);
}

function preferText(name, text) {
  try {
    write(`localllm.${name}`, text);
  } catch (error) {
    if (!(error instanceof NotKept)) throw error;
  }
}

export const key = () => sessionStorage.getItem("localllm.key") ?? "";

export function keepKey(text) {
  sessionStorage.setItem("localllm.key", text);
}

function write(name, text) {
  try {
    localStorage.setItem(name, text);
  } catch {
    throw new NotKept("The browser's storage is full: this is not kept. Export or delete old chats.");
  }
}
