// Markdown as elements. `marked` takes the text apart; what its tokens say becomes elements with text nodes here, so
// that no text of a model is ever HTML. Nothing is loaded: images become links, HTML is shown as it is written.

import { button, element } from "./dom.js";
import { Lexer } from "./marked/marked.esm.js";

const SAFE = /^(https?:|mailto:)/i;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const ENTITY = /&(?:(amp|lt|gt|quot|apos|nbsp)|#(\d{1,7})|#x([0-9a-f]{1,6}));/gi;

/** A text that grows at its end: blocks that cannot change any more stay as they are, however long it is. */
export class Growing {
  constructor(node) {
    this.node = node;
    this.settled = 0; // characters whose elements stay
    this.open = []; // the elements of the others
    this.shown = "";
  }

  show(text) {
    if (text === this.shown) return;
    this.shown = text;
    const blocks = tokens(text.slice(this.settled));
    const made = blocks.map(block);
    this.open.forEach((node) => node.remove());
    this.node.append(...made);
    // A line that has just begun may still change what stands before it, and nothing before that.
    const last = blocks.map(({ type }) => type !== "space").lastIndexOf(true);
    const stay = blocks.slice(0, last).map(({ type }) => type !== "space").lastIndexOf(true);
    for (const { raw } of blocks.slice(0, Math.max(stay, 0))) this.settled += raw.length;
    this.open = made.slice(Math.max(stay, 0));
  }
}

function tokens(text) {
  try {
    return new Lexer({ gfm: true }).lex(text);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // nested deeper than the stack
    return [{ type: "plain", raw: text }];
  }
}

const BLOCKS = {
  space: () => document.createTextNode(""),
  hr: () => element("hr"),
  heading: ({ depth, tokens }) => element(`h${Math.min(depth + 2, 6)}`, {}, ...inlines(tokens)), // below the page's own
  paragraph: ({ tokens }) => element("p", {}, ...inlines(tokens)),
  blockquote: ({ tokens }) => element("blockquote", {}, ...tokens.map(block)),
  code: ({ text, lang }) => code(text, lang?.split(/\s/, 1)[0]),
  list: ({ ordered, start, items }) =>
    element(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : null }, ...items.map(item)),
  table: ({ header, rows }) =>
    element(
      "div",
      { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
      element(
        "table",
        {},
        element("thead", {}, row("th", header)),
        element("tbody", {}, ...rows.map((cells) => row("td", cells))),
      ),
    ),
  def: () => document.createTextNode(""),
  html: ({ raw }) => element("p", { class: "raw" }, raw.trimEnd()),
  text: ({ tokens, text }) => fragment(tokens ? inlines(tokens) : [plain(text)]),
  checkbox,
};

const INLINES = {
  strong: ({ tokens }) => element("strong", {}, ...inlines(tokens)),
  em: ({ tokens }) => element("em", {}, ...inlines(tokens)),
  del: ({ tokens }) => element("del", {}, ...inlines(tokens)),
  codespan: ({ text }) => element("code", {}, text),
  br: () => element("br"),
  escape: ({ text }) => text,
  link: ({ href, tokens }) => link(href, inlines(tokens)),
  image: ({ href, text }) => link(href, [text || href]),
  text: ({ tokens, text }) => (tokens ? fragment(inlines(tokens)) : plain(text)),
  checkbox,
};

const block = (token) => (BLOCKS[token.type] ?? ((other) => element("p", { class: "raw" }, other.raw)))(token);
const inlines = (tokens) => tokens.map((token) => (INLINES[token.type] ?? (({ raw }) => raw))(token));
const row = (kind, cells) =>
  element("tr", {}, ...cells.map(({ tokens, align }) => element(kind, { class: align }, ...inlines(tokens))));

function item({ tokens, task }) {
  return element("li", { class: task ? "task" : null }, ...tokens.map(block));
}

function checkbox({ checked }) {
  return element("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "to do" });
}

function link(href, children) {
  if (!SAFE.test(href)) return fragment(children);
  return element("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

function code(text, language) {
  const shown = element("code", {}, text);
  const copied = button("Copy", null, () => copy(text, copied, shown), { class: "quiet copy" });
  return element(
    "figure",
    { class: "code" },
    element("figcaption", {}, element("span", {}, language || "text"), copied),
    element("pre", { tabindex: "0", "aria-label": `Code, ${language || "text"}` }, shown),
  );
}

/** Copy a text, and say so on the button. Where a page may not (it came over plain HTTP from another machine),
 * `shown` is selected for the visitor to copy. */
export async function copy(text, told, shown) {
  const before = [...told.childNodes];
  try {
    await navigator.clipboard.writeText(text);
    told.replaceChildren("Copied");
  } catch {
    getSelection().selectAllChildren(shown);
    told.replaceChildren("Press Ctrl+C");
  }
  setTimeout(() => told.replaceChildren(...before), 1500);
}

function fragment(children) {
  const made = element("span");
  made.append(...children);
  return made;
}

/** A text token keeps its entities. */
function plain(text) {
  return text.replace(ENTITY, (whole, name, decimal, hexadecimal) => {
    if (name) return ENTITIES[name.toLowerCase()];
    const point = parseInt(decimal ?? hexadecimal, decimal ? 10 : 16);
    return point <= 0x10ffff ? String.fromCodePoint(point) : whole;
  });
}
