// A list of all that can be done, which is searched as one types. Arrows choose, Enter does it.

import { byId, element } from "./dom.js";

export class Palette {
  /** entries: gives objects {name, key, run}, each time it is opened. */
  constructor(entries) {
    this.entries = entries;
    this.dialog = byId("palette");
    this.search = byId("search");
    this.found = byId("found");
    this.search.addEventListener("input", () => this.find());
    this.search.addEventListener("keydown", (event) => this.pressed(event));
    this.dialog.addEventListener("click", ({ target }) => target === this.dialog && this.dialog.close());
  }

  open() {
    this.all = this.entries();
    this.search.value = "";
    this.find();
    this.dialog.showModal();
  }

  find() {
    const words = this.search.value.toLowerCase().split(/\s+/);
    this.shown = this.all.filter(({ name }) => words.every((word) => name.toLowerCase().includes(word)));
    this.found.replaceChildren(...this.shown.map((entry, place) => this.option(entry, place)));
    this.choose(0);
  }

  option({ name, key }, place) {
    const keys = key ? [element("kbd", {}, key)] : [];
    const on = { click: () => this.run(place), pointermove: () => place !== this.chosen && this.choose(place) };
    return element("li", { role: "option", id: `found-${place}`, on }, element("span", {}, name), ...keys);
  }

  choose(place) {
    this.chosen = this.shown.length ? (place + this.shown.length) % this.shown.length : -1;
    [...this.found.children].forEach((node, at) => node.setAttribute("aria-selected", at === this.chosen));
    this.search.setAttribute("aria-activedescendant", this.chosen < 0 ? "" : `found-${this.chosen}`);
    this.found.children[this.chosen]?.scrollIntoView({ block: "nearest" });
  }

  pressed(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by) this.choose(this.chosen + by);
    else if (event.key === "Enter") this.run(this.chosen);
    else return;
    event.preventDefault();
  }

  run(place) {
    this.dialog.close();
    this.shown[place]?.run();
  }
}
