// The list of conversations at the side. Knows nothing of how they are kept.

import { titled } from "./conversation.js";
import { button, byId, element } from "./dom.js";

/** Show them, the newest first; open and remove are given the one that was chosen. */
export function list(conversations, shown, { open, remove }) {
  byId("list").replaceChildren(
    ...conversations.map((conversation) => {
      const name = titled(conversation);
      return element(
        "li",
        {},
        element(
          "button",
          {
            type: "button",
            class: "chat",
            "aria-current": conversation.id === shown.id ? "true" : null,
            title: name,
            on: { click: () => open(conversation) },
          },
          name,
        ),
        button(`Delete ${name}`, "delete", () => remove(conversation), { class: "quiet" }),
      );
    }),
  );
}
