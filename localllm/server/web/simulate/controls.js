// The form: a field for each option that the server describes. Knows nothing of simulations.

import { byId, element } from "../dom.js";

const POSITIONS = 100; // of a logarithmic slider
const MOST_CHARACTERS = 10; // of a short value

export class Controls {
  /** description: as of `/simulate/options`; changed is called when the visitor has changed something. */
  constructor(description, changed) {
    this.fields = new Map();
    this.changed = changed;
    for (const option of description.options) {
      const field = new Field(option, () => this.onChange(option));
      this.fields.set(option.flag, field);
      byId(option.is_main ? "main-options" : "more-options").append(field.node);
    }
    byId("models").replaceChildren(...description.models.map((name) => element("option", { value: name })));
    byId("model").addEventListener("change", changed);
    byId("controls").addEventListener("submit", (event) => {
      event.preventDefault();
      changed();
    });
  }

  onChange({ flag, excludes }) {
    if (this.fields.get(flag).value() !== null) excludes.forEach((other) => this.fields.get(other)?.set(null));
    this.settle();
    this.changed();
  }

  show(model, options) {
    byId("model").value = model;
    for (const [flag, field] of this.fields) field.set(options[flag] ?? null);
    this.settle();
    byId("more").open ||= [...this.fields.values()].some((field) => !field.option.is_main && field.value() !== null);
  }

  /** Fields that would have no effect are off, and not sent. */
  settle() {
    for (const field of this.fields.values()) {
      const { needs } = field.option;
      field.enable(!needs.length || needs.some(([flag, values]) => {
        const value = this.fields.get(flag)?.value() ?? null;
        return value !== null && (!values.length || values.includes(value));
      }));
    }
  }

  model() {
    return byId("model").value.trim();
  }

  options() {
    const given = {};
    for (const [flag, field] of this.fields) {
      const value = field.enabled ? field.value() : null;
      if (value !== null) given[flag] = value;
    }
    return given;
  }

  /** Whether every number is one; focuses the first that is not. */
  valid() {
    return byId("controls").reportValidity();
  }
}

class Field {
  constructor(option, changed) {
    this.option = option;
    this.enabled = true;
    const on = { change: changed };
    const said = option.help;
    if (option.type === "switch") {
      this.negated = option.flag.startsWith("--no-");
      this.input = element("input", { type: "checkbox", on, name: option.flag, title: said });
      this.node = element("label", { class: "field switch", title: said }, option.label, this.input);
      return;
    }
    if (option.type === "choice") {
      const choices = option.choices.map((value) => element("option", { value }, value));
      this.input = element("select", { on, name: option.flag, title: said }, element("option", { value: "" }, "default"), ...choices);
      this.node = element("label", { class: "field", title: said }, option.label, this.input);
      return;
    }
    const kind = option.type === "number" ? { type: "number", step: "any" } : { type: "text", autocomplete: "off", spellcheck: "false" };
    this.input = element("input", { ...kind, name: option.flag, placeholder: usual(said), title: said, on });
    const long = option.type === "text" && option.metavar.length > MOST_CHARACTERS ? " long" : "";
    this.node = element("label", { class: `field${long}`, title: said }, option.label, this.input);
    if (option.low === null) return;
    const positions = option.logarithmic ? { min: 0, max: POSITIONS, step: 1 } : { min: option.low, max: option.high, step: option.step };
    this.byKey = false;
    this.slider = element("input", { type: "range", ...positions, "aria-label": `${option.label}, slider`, on: {
      keydown: () => (this.byKey = true),
      pointerdown: () => (this.byKey = false),
      input: () => this.slide(),
      change: changed,
    } });
    this.input.addEventListener("input", () => this.moveSlider());
    this.node.append(this.slider);
    this.moveSlider();
  }

  /** A number, a text, true, or null for the default. */
  value() {
    if (this.option.type === "switch") return this.input.checked !== this.negated ? true : null;
    const text = this.input.value.trim();
    if (text === "") return null;
    if (this.option.type !== "number") return text;
    return text === "0" && this.option.flag === "--drafts" ? null : Number(text);
  }

  set(value) {
    if (this.option.type === "switch") {
      this.input.checked = (value === true) !== this.negated;
      return;
    }
    if (this.option.type === "choice" && value !== null && !this.option.choices.includes(value)) {
      this.input.append(element("option", { value }, value));
      this.option.choices.push(value);
    }
    this.input.value = value ?? "";
    this.moveSlider();
  }

  enable(enabled) {
    this.enabled = enabled;
    this.input.disabled = !enabled;
    if (this.slider) this.slider.disabled = !enabled;
    this.node.classList.toggle("off", !enabled);
  }

  /** Take the number of the slider. A key always changes it, however close two positions are. */
  slide() {
    const old = this.number();
    let value = this.ofSlider();
    if (this.byKey && value === old) {
      const { low, high, step } = this.option;
      const up = Number(this.slider.value) > this.position(old);
      value = Number(Math.min(high, Math.max(low, old + (up ? step : -step))).toPrecision(6));
    }
    this.input.value = value;
    if (this.byKey) this.moveSlider();
  }

  ofSlider() {
    const { low, high, step, logarithmic } = this.option;
    const at = Number(this.slider.value);
    if (!logarithmic) return Number(at.toPrecision(6));
    const exact = low * (high / low) ** (at / POSITIONS);
    const fine = Math.max(step, 10 ** Math.floor(Math.log10(exact) - 1) / 2); // about two digits
    return Number(Math.min(high, Math.max(low, Math.round(exact / fine) * fine)).toPrecision(6));
  }

  /** The number that counts, within the bounds of the slider. */
  number() {
    const { low, high } = this.option;
    return Math.min(high, Math.max(low, Number(this.input.value || this.input.placeholder) || low));
  }

  position(value) {
    const { low, high, logarithmic } = this.option;
    return logarithmic ? Math.round((Math.log(value / low) / Math.log(high / low)) * POSITIONS) : value;
  }

  moveSlider() {
    if (!this.slider) return;
    this.slider.value = this.position(this.number());
    this.slider.setAttribute("aria-valuetext", this.input.value || "default");
  }
}

/** The default or an example, as the help says it; "default" where it is more than a value. */
function usual(help) {
  const example = /such as ([^ :]+)/.exec(help);
  if (example) return example[1];
  const value = /default: ([^,;]+?)(?:[,;]|\.$)/.exec(help)?.[1] ?? "";
  return value.length > MOST_CHARACTERS ? "default" : value;
}
