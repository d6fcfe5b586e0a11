// The turns of a conversation on the page: shown, followed as they grow, at most once a frame. Knows nothing of
// servers or storage.

import { children, path } from "./conversation.js";
import { button, byId, element } from "./dom.js";
import { TurnView } from "./turn.js";

const NEAR = 48; // pixels from the end, within which a reader follows it

export class Thread {
  /** actions: as of TurnView, and `results`, which is given the texts that called functions gave back. */
  constructor(actions) {
    this.actions = actions;
    this.views = new Map(); // by place
    this.following = true;
    this.scroller = byId("thread");
    this.turns = byId("turns");
    this.scroller.addEventListener("scroll", () => this.scrolled());
    byId("to-end").addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.following && this.toEnd()).observe(this.turns);
  }

  /** All turns of the path; running: the place of the one that grows, or -1. */
  show(conversation, running) {
    const below = children(conversation);
    this.views.clear();
    for (const place of path(conversation)) {
      const turn = conversation.turns[place];
      const view = new TurnView(turn, place, below.get(turn.parent), this.actions);
      if (place === running) view.update(true);
      this.views.set(place, view);
    }
    const called = conversation.turns[conversation.leaf]?.calls ?? [];
    const asked = called.length && conversation.leaf !== running ? [this.resultsOf(called)] : [];
    this.turns.replaceChildren(...[...this.views.values()].map(({ node }) => node), ...asked);
    byId("empty").hidden = this.views.size > 0;
    this.toEnd();
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
