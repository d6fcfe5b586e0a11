// The panel of settings: fields that belong to the conversation that is shown. Knows nothing of requests.

import { byId } from "./dom.js";
import { toggle } from "./sides.js";

export class Settings {
  /** changed: called when the visitor has changed a setting. */
  constructor(changed) {
    this.form = byId("fields");
    this.model = byId("model");
    this.settings = {};
    this.changed = changed;
    this.form.addEventListener("input", () => this.read());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.model.addEventListener("change", () => this.read());
  }

  show(settings) {
    this.settings = settings;
    for (const field of this.form.elements) if (field.name) field.value = settings[field.name];
    for (const folded of this.form.querySelectorAll("details")) {
      folded.open = [...folded.querySelectorAll("textarea")].some(({ value }) => value);
    }
    this.choose(settings.model);
  }

  /** The models that may be chosen; the conversation keeps its own also where it is not among them. */
  offer(models) {
    const chosen = this.settings.model;
    this.model.replaceChildren(...models.map(({ id }) => new Option(id)));
    this.choose(chosen || models[0]?.id || "");
  }

  choose(model) {
    if (model && ![...this.model.options].some(({ value }) => value === model)) {
      this.model.add(new Option(`${model} (not listed)`, model));
    }
    this.model.value = model || this.model.options[0]?.value || "";
    this.settings.model = this.model.value;
  }

  /** Is every number within its bounds? Where one is not, the visitor is shown. */
  valid() {
    const wrong = [...this.form.elements].find((field) => !field.checkValidity());
    if (wrong) {
      if (byId("settings").inert) toggle("settings");
      wrong.reportValidity();
    }
    return !wrong;
  }

  read() {
    for (const field of this.form.elements) if (field.name) this.settings[field.name] = field.value;
    this.settings.model = this.model.value;
    this.changed();
  }
}
