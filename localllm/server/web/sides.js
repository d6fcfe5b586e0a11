// The two sides, chats and settings: open or not, kept for the next visit where there is room for them, drawers
// where there is not. And light or dark.

import { byId } from "./dom.js";
import { preference, prefer, preferTheme } from "./kept.js";

const NARROW = matchMedia("(max-width: 60rem)");
const DARK = matchMedia("(prefers-color-scheme: dark)");

export function prepare() {
  for (const [name, usual] of [["chats", true], ["settings", false]]) {
    show(name, !NARROW.matches && preference(name, usual));
    byId(`toggle-${name}`).addEventListener("click", () => toggle(name));
  }
  byId("close-settings").addEventListener("click", () => toggle("settings"));
  byId("scrim").addEventListener("click", closeDrawers);
  byId("toggle-theme").addEventListener("click", toggleTheme);
}

export function toggle(name) {
  const open = !byId(name).classList.contains("open");
  show(name, open);
  if (!NARROW.matches) prefer(name, open);
  if (open && name === "settings") byId(name).querySelector("textarea").focus();
  else if (name === "settings") byId("toggle-settings").focus();
}

/** Gives whether there was one. */
export function closeDrawers() {
  const open = NARROW.matches ? [...document.querySelectorAll(".side.open")] : [];
  open.forEach(({ id }) => show(id, false));
  return open.length > 0;
}

export function toggleTheme() {
  const { theme } = document.documentElement.dataset;
  const dark = theme === "system" ? DARK.matches : theme === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  preferTheme(dark ? "light" : "dark");
}

function show(name, open) {
  byId(name).classList.toggle("open", open);
  byId(name).inert = !open;
  byId(`toggle-${name}`).setAttribute("aria-expanded", open);
}
