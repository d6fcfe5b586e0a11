// The page: the conversation that is shown, the answer that is under way, and what a visitor can do with them.

import { unanswered } from "./answer.js";
import { Answering } from "./answering.js";
import { list } from "./chats.js";
import { Composer } from "./composer.js";
import { add, begun, beside, choose, last, messages, titled } from "./conversation.js";
import { byId } from "./dom.js";
import * as exported from "./export.js";
import { watch } from "./gauges.js";
import { conversations, forget, keep, keepKey, NotKept, prefer, preference } from "./kept.js";
import { help, listen } from "./keys.js";
import { Palette } from "./palette.js";
import { bodyOf, Senseless, SETTINGS } from "./request.js";
import { models, wantsKey } from "./server.js";
import { Settings } from "./settings.js";
import * as sides from "./sides.js";
import { Strip } from "./strip.js";
import { Thread } from "./thread.js";
import { say } from "./toast.js";

const KEEP_EVERY = 1000; // milliseconds, while an answer grows

let chats = conversations();
let shown = chats.find(({ id }) => id === preference("shown", null)) ?? fresh();
const watches = new WeakMap(); // the Stopwatch of each turn that was answered since the page was loaded
let answering = null; // the Answering under way: one at a time
let offered = []; // the models of the server

const strip = new Strip();
const settings = new Settings(() => {
  prefer("settings", shown.settings);
  if (shown.turns.length) kept(shown);
});
const thread = new Thread({ choose: chooseBranch, edit, again, results });
const composer = new Composer({ send, stop, editLast: () => edit(last(shown, "user")) });
const palette = new Palette(() => [
  ...commands,
  ...chats.map((chat) => ({ name: `Chat: ${titled(chat)}`, run: () => open(chat) })),
  ...offered.map(({ id }) => ({ name: `Model: ${id}`, run: () => (settings.choose(id), settings.read()) })),
]);
const commands = [
  { name: "Write a message", key: "/", run: () => composer.focus() },
  { name: "New chat", key: "n", run: () => open(fresh()) },
  { name: "Answer again", key: "r", run: () => again(last(shown, "assistant")) },
  { name: "Edit the last message", key: "e", run: () => edit(last(shown, "user")) },
  { name: "Branch before", key: "[", run: () => step(-1) },
  { name: "Next branch", key: "]", run: () => step(1) },
  { name: "Settings", key: "s", run: () => sides.toggle("settings") },
  { name: "Chats", key: "c", run: () => sides.toggle("chats") },
  { name: "Light or dark", key: "d", run: sides.toggleTheme },
  { name: "Keys", key: "?", run: () => help(commands) },
  { name: "Simulate a load", run: () => location.assign("/simulate") },
  { name: "Save Markdown", run: () => exportAs("md") },
  { name: "Save JSON", run: () => exportAs("json") },
  { name: "Delete this chat", run: () => remove(shown) },
  { name: "Key of the server", run: () => askKey() },
];

function fresh() {
  return begun({ ...SETTINGS, ...preference("settings", {}), seed: "" });
}

/** Show a conversation. */
function open(chat) {
  shown = chat;
  shown.settings = { ...SETTINGS, ...chat.settings };
  prefer("shown", chat.id);
  settings.show(chat.settings);
  sides.closeDrawers();
  composer.focus();
  refresh();
}

/** Show all of it anew: another path, another name, another list. */
function refresh() {
  const running = answering?.conversation === shown ? answering : null;
  byId("title").value = shown.turns.length ? titled(shown) : "";
  document.title = shown.turns.length ? `${titled(shown)} – localllm` : "localllm";
  thread.show(shown, running ? running.place : -1);
  list(chats, shown, { open, remove });
  byId("strip").hidden = !shown.turns.length;
  composer.show(answering !== null);
  const answer = shown.turns[last(shown, "assistant")];
  strip.follow(watches.get(answer) ?? null);
  if (answer && !running) strip.ended(answer, contextOf(answer.model));
}

/** Keep it, and say so where that cannot be. */
function kept(chat) {
  if (!chats.includes(chat)) chats.push(chat);
  chats.sort((one, other) => other.changed - one.changed);
  try {
    keep(chat);
  } catch (error) {
    if (!(error instanceof NotKept)) throw error;
    say(error.message);
  }
}

function send(text) {
  if (begin(shown.leaf, [{ role: "user", content: text }])) composer.clear();
}

/** Add turns below `parent`, and an answer to them. Gives whether it was begun. */
function begin(parent, turns) {
  if (answering) say("An answer is under way: stop it first.");
  if (answering || !settings.valid()) return false;
  let body;
  try {
    body = bodyOf(shown.settings, []);
  } catch (error) {
    if (!(error instanceof Senseless)) throw error;
    say(error.message);
    return false;
  }
  for (const turn of turns) parent = add(shown, parent, turn);
  body.messages = messages(shown, parent);
  const place = add(shown, parent, unanswered(body));
  kept(shown);
  void answer(shown, place, body);
  return true;
}

async function answer(chat, place, body) {
  let keptAt = performance.now();
  let framed = false;
  const draw = () => {
    framed = false;
    if (chat !== shown || answering?.place !== place) return;
    thread.grow(place);
    strip.update();
  };
  answering = new Answering(chat, place, body, () => {
    if (!framed) requestAnimationFrame(draw);
    framed = true;
    if (performance.now() - keptAt < KEEP_EVERY) return;
    keptAt = performance.now();
    keptStill(chat);
  });
  watches.set(answering.turn, answering.watch);
  refresh();
  let refusal;
  try {
    refusal = await answering.run();
  } finally {
    answering = null;
    keptStill(chat);
    refresh();
  }
  if (refusal?.status === 401) askKey(wantsKey());
}

/** As `kept`, unless it was deleted meanwhile. */
function keptStill(chat) {
  if (chats.includes(chat)) kept(chat);
}

function stop() {
  if (sides.closeDrawers()) return;
  answering?.stop();
}

function edit(place) {
  const view = thread.views.get(place);
  if (!view || answering) return;
  view.edit((text) => {
    composer.focus();
    if (text?.trim()) begin(view.turn.parent, [{ role: "user", content: text }]);
  });
}

/** Answer once more what this answer answered. */
function again(place) {
  if (place >= 0) begin(shown.turns[place].parent, []);
}

/** What called functions gave back. */
function results(given) {
  begin(shown.leaf, given.map((result) => ({ role: "tool", ...result })));
}

function chooseBranch(place) {
  if (answering?.conversation === shown) return;
  choose(shown, place);
  kept(shown);
  refresh();
}

function step(by) {
  const place = beside(shown, by);
  if (place >= 0) chooseBranch(place);
}

function remove(chat) {
  if (answering?.conversation === chat) answering.stop();
  forget(chat);
  chats = chats.filter((other) => other !== chat);
  if (chat === shown) open(fresh());
  else refresh();
  const undo = () => {
    kept(chat);
    open(chat);
  };
  if (chat.turns.length) say("The chat is deleted.", { label: "Undo", run: undo });
}

function exportAs(end) {
  const [text, kind] = end === "md" ? [exported.markdown(shown), "text/markdown"] : [exported.json(shown), "application/json"];
  exported.save(exported.fileName(shown, end), text, kind);
}

function askKey(why = "Key of the server") {
  byId("key-title").textContent = why;
  byId("key").showModal();
}

const contextOf = (model) => offered.find(({ id }) => id === model)?.context_length ?? 0;

async function offer() {
  try {
    offered = await models();
    settings.offer(offered);
  } catch (refusal) {
    if (refusal.status === 401) askKey(wantsKey());
    else if (refusal.status) say(refusal.message);
  }
}

sides.prepare();
listen(commands, { palette: () => palette.open(), stop });
byId("new").addEventListener("click", () => open(fresh()));
byId("title").addEventListener("change", ({ target }) => {
  shown.title = target.value.trim();
  if (shown.turns.length) kept(shown);
  refresh();
});
byId("export-markdown").addEventListener("click", () => exportAs("md"));
byId("export-json").addEventListener("click", () => exportAs("json"));
byId("reset").addEventListener("click", () => {
  Object.assign(shown.settings, SETTINGS, { model: shown.settings.model });
  settings.show(shown.settings);
  settings.read();
});
byId("ask-key").addEventListener("click", () => askKey());
byId("key").addEventListener("close", () => {
  if (byId("key").returnValue === "keep") keepKey(byId("key-text").value);
  byId("key-text").value = "";
  void offer();
});
addEventListener("pagehide", () => answering && keptStill(answering.conversation));
open(shown);
void offer();
let reached = true;
watch((answers) => {
  byId("gone").hidden = answers;
  if (answers && !reached) void offer();
  reached = answers;
});
