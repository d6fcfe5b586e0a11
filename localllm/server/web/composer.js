// The field where messages are written: Enter sends, Shift and Enter begins a line.

import { byId } from "./dom.js";

export class Composer {
  /** send is given a text; editLast is called for the arrow up in an empty field; stop for the button. */
  constructor({ send, stop, editLast }) {
    this.field = byId("prompt");
    this.submit = () => this.field.value.trim() && send(this.field.value);
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    byId("stop").addEventListener("click", stop);
    this.field.addEventListener("input", () => this.fit());
    this.field.addEventListener("keydown", (event) => {
      if (event.isComposing) return; // Enter ends a word of an input method
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        this.submit();
      } else if (event.key === "ArrowUp" && !this.field.value) {
        event.preventDefault();
        editLast();
      }
    });
  }

  clear() {
    this.field.value = "";
    this.fit();
  }

  focus() {
    this.field.focus();
  }

  /** answering: there is something to stop. */
  show(answering) {
    byId("send").hidden = answering;
    byId("stop").hidden = !answering;
  }

  /** As high as what it holds; the style sheet says how high at most. */
  fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
  }
}
