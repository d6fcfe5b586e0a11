// The turns of a conversation on the page: shown, followed as they grow, at most once a frame. Knows nothing of
// servers or storage.

import { children, path } from "./conversation.js";
import { button, byId, element } from "./dom.js";
import { TurnView } from "./turn.js";

const NEAR = 48; // pixels from the end, within which a reader follows it
const SOON = 20; // turns that are made at once
const LATER = 100; // and then at a time

export class Thread {
  /** actions: as of TurnView, and `results`, which is given the texts that called functions gave back. */
  constructor(actions) {
    this.actions = actions;
    this.conversation = null;
    this.views = new Map(); // of its turns, by place
    this.following = true;
    this.scroller = byId("thread");
    this.turns = byId("turns");
    this.scroller.addEventListener("scroll", () => this.scrolled());
    byId("to-end").addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.following && this.toEnd()).observe(this.turns);
  }

  /** All turns of the path; running: the place of the one that grows, or -1. What was on the page stays as it is.
   * Of a long conversation the end comes first. */
  show(conversation, running) {
    clearTimeout(this.filling);
    const changed = conversation !== this.conversation;
    const before = changed ? new Map() : this.views;
    const below = children(conversation);
    const places = path(conversation);
    const view = (place) => {
      const turn = conversation.turns[place];
      const siblings = below.get(turn.parent);
      const known = before.get(place);
      const made =
        known?.siblings.length === siblings.length ? known : new TurnView(turn, place, siblings, this.actions);
      if (made.running !== (place === running)) made.update(place === running);
      this.views.set(place, made);
      return made.node;
    };
    this.conversation = conversation;
    this.views = new Map();
    const unmade = places.slice(0, -SOON).findLastIndex((place) => !before.has(place)) + 1;
    const called = running < 0 && conversation.turns[conversation.leaf]?.calls?.length;
    const asked = called ? [this.resultsOf(conversation.turns[conversation.leaf].calls)] : [];
    arrange(this.turns, [...places.slice(unmade).map(view), ...asked]);
    this.fill(places.slice(0, unmade), view);
    byId("empty").hidden = places.length > 0;
    if (changed || running >= 0 || this.following) this.toEnd();
  }

  /** Put earlier turns before those that are shown, some at a time. */
  fill(places, view) {
    if (!places.length) return;
    this.filling = setTimeout(() => {
      this.turns.prepend(...places.slice(-LATER).map(view));
      this.fill(places.slice(0, -LATER), view);
    });
  }

  /** A turn has grown. Nothing happens where it is not on the page. */
  grow(place) {
    this.views.get(place)?.update(true);
    if (this.following) this.toEnd();
  }

  toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.following = true;
    byId("to-end").hidden = true;
  }

  scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    this.following = scrollHeight - scrollTop - clientHeight < NEAR;
    byId("to-end").hidden = this.following;
  }

  /** A field for what each called function gives back: the page calls none itself. */
  resultsOf(calls) {
    const fields = calls.map(() => element("textarea", { rows: "2", class: "mono", spellcheck: "false" }));
    const give = () => this.actions.results(calls.map(({ id }, at) => ({ call_id: id, content: fields[at].value })));
    return element(
      "div",
      { class: "results" },
      ...calls.map((call, at) => element("label", {}, `What ${call.function.name} gives back`, fields[at])),
      button("Send the results", null, give, { class: "main" }),
    );
  }
}

/** Give an element these children. Those that stay are not touched: the browser remembers how high they are. */
function arrange(node, children) {
  const staying = new Set(children);
  for (const child of [...node.children]) if (!staying.has(child)) child.remove();
  let next = node.firstChild;
  for (const child of children) {
    if (child === next) next = next.nextSibling;
    else node.insertBefore(child, next);
  }
}
