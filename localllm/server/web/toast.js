// A sentence that is shown for a while, with something that may be done about it.

import { button, byId } from "./dom.js";

const SHOWN = 6000; // milliseconds
let timer;

/** act: a label and what happens, or nothing. */
export function say(text, act) {
  clearTimeout(timer);
  const done = act && (() => (byId("toast").replaceChildren(), act.run()));
  byId("toast").replaceChildren(text, ...(done ? [" ", button(act.label, null, done)] : []));
  timer = setTimeout(() => byId("toast").replaceChildren(), SHOWN);
}
