// Elements from names, attributes and children. Text becomes text nodes: nothing is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. attributes: `on` holds listeners by event, `data` its dataset; true and false set and leave out an
 * attribute, and so do texts and null.
 */
export function element(name, attributes = {}, ...children) {
  return dressed(document.createElement(name), attributes, children);
}

/** An icon of the sheet at the end of index.html. It says nothing to a screen reader: its button has a label. */
export function icon(name) {
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  return dressed(document.createElementNS(SVG, "svg"), { class: "icon", "aria-hidden": "true" }, [use]);
}

/** A button that shows an icon, or where there is none its label. */
export function button(label, picture, press, attributes = {}) {
  const named = picture ? { "aria-label": label, title: label } : {};
  const on = { click: press };
  return element("button", { type: "button", ...named, on, ...attributes }, picture ? icon(picture) : label);
}

export const byId = (id) => document.getElementById(id);

function dressed(made, { on = {}, data = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  for (const [event, heard] of Object.entries(on)) made.addEventListener(event, heard);
  Object.assign(made.dataset, data);
  made.append(...children.filter((child) => child !== null));
  return made;
}
