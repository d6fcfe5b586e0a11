// One turn of a conversation as an element: what was said, thought and called, why it ended, and what can be done
// with it. Knows nothing of servers or storage.

import { button, element, icon } from "./dom.js";
import { copy, Growing } from "./markdown.js";
import { count, milliseconds, rate } from "./strip.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result" };
const ENDS = { length: "reached its limit of tokens", stopped: "stopped" };

/** What `TurnView` can be asked to do, each with the turn's place: choose, edit, again, retry. */
export class TurnView {
  constructor(turn, place, siblings, actions) {
    this.turn = turn;
    this.place = place;
    this.siblings = siblings;
    this.actions = actions;
    this.node = element("article", { class: `turn ${turn.role}`, "aria-label": NAMES[turn.role], data: { place } });
    this.body = element("div", { class: "said" });
    this.foot = element("div", { class: "foot" });
    this.node.append(this.body, this.foot);
    if (turn.role === "assistant") this.prepare();
    this.update(false);
  }

  /** An answer's parts, which grow. */
  prepare() {
    this.summary = element("summary", {}, "Thoughts");
    this.thoughts = new Growing(element("div", { class: "prose" }));
    this.folded = element("details", { class: "thoughts", hidden: true }, this.summary, this.thoughts.node);
    this.content = new Growing(element("div", { class: "prose" }));
    this.calls = element("div", { class: "calls" });
    this.trouble = element("p", { class: "trouble", role: "alert", hidden: true });
    this.body.append(this.folded, this.content.node, this.calls, this.trouble);
  }

  /** running: more is to come. */
  update(running) {
    this.running = running;
    this.node.setAttribute("aria-busy", running);
    this.node.classList.toggle("running", running);
    if (this.turn.role === "assistant") this.updateAnswer(running);
    else this.body.replaceChildren(this.turn.content);
    this.foot.replaceChildren(...(running ? [] : this.doable()));
  }

  updateAnswer(running) {
    const { thoughts, content, calls, failed, waiting } = this.turn;
    this.folded.hidden = !thoughts;
    this.summary.textContent = running && !content && !calls.length ? "Thinking" : "Thoughts";
    this.thoughts.show(thoughts);
    this.content.show(content);
    if (this.calls.childElementCount !== calls.length || calls.length) this.calls.replaceChildren(...calls.map(called));
    this.node.classList.toggle("empty", running && !content && !thoughts && !calls.length);
    const told = waiting ?? (running ? null : failed ?? broken(this.turn));
    this.trouble.hidden = !told;
    if (told && this.trouble.dataset.told !== told) {
      const retry = waiting ? null : button("Try again", null, () => this.actions.again(this.place));
      this.trouble.replaceChildren(told, " ", ...(retry ? [retry] : []));
    }
    this.trouble.dataset.told = told ?? "";
  }

  /** Branches, buttons, and how the answer went. */
  doable() {
    const { role, content } = this.turn;
    const parts = [];
    if (this.siblings.length > 1) parts.push(this.switcher());
    const copied = button("Copy", "copy", () => copy(content, copied, this.body), { class: "quiet" });
    if (content) parts.push(copied);
    if (role === "user") parts.push(button("Edit", "edit", () => this.actions.edit(this.place), { class: "quiet" }));
    if (role === "assistant") {
      parts.push(button("Answer again", "again", () => this.actions.again(this.place), { class: "quiet" }));
      parts.push(element("span", { class: "told" }, told(this.turn)));
    }
    return parts;
  }

  switcher() {
    const at = this.siblings.indexOf(this.place);
    const step = (label, picture, by) =>
      button(label, picture, () => this.actions.choose(this.siblings[at + by]), {
        class: "quiet",
        disabled: this.siblings[at + by] === undefined,
      });
    return element(
      "span",
      { class: "branches", role: "group", "aria-label": "Branches" },
      step("Branch before", "left", -1),
      `${at + 1}/${this.siblings.length}`,
      step("Next branch", "right", 1),
    );
  }

  /** A field in place of what was said. `done` is given the new text, or null where nothing is to change. */
  edit(done) {
    const field = element("textarea", { "aria-label": "Edit the message", rows: "3" });
    const give = (text) => {
      this.update(false);
      done(text);
    };
    field.value = this.turn.content;
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape" || (event.key === "Enter" && !event.shiftKey && !event.isComposing)) {
        event.preventDefault();
        event.stopPropagation();
        give(event.key === "Enter" ? field.value : null);
      }
    });
    this.body.replaceChildren(field);
    this.foot.replaceChildren(
      button("Send", null, () => give(field.value), { class: "main" }),
      button("Leave it", null, () => give(null)),
    );
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }
}

function called({ function: { name, arguments: written } }) {
  return element("figure", { class: "call" }, element("figcaption", {}, icon("call"), name), element("pre", {}, pretty(written)));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not yet whole
  }
}

const broken = ({ ended }) => (ended === null ? "This page was left before the answer ended." : null);

function told({ model, seed, ended, told = {} }) {
  return [
    model,
    told.predicted_n && `${count(told.predicted_n)} tokens`,
    told.predicted_per_second && rate(told.predicted_per_second),
    told.ttft_ms && `first after ${milliseconds(told.ttft_ms)}`,
    seed !== undefined && `seed ${seed}`,
    ENDS[ended],
  ]
    .filter(Boolean)
    .join(" · ");
}
