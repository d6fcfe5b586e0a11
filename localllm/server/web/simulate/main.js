// The page of simulations: experiments, options, and a run that is played back while and after it is streamed.

import { byId, element } from "../dom.js";
import { keepKey, preferTheme } from "../kept.js";
import { Refusal, wantsKey } from "../server.js";
import { Controls } from "./controls.js";
import { Run, describe, simulate } from "./run.js";
import * as stage from "./stage.js";

const PLAYED_S = 24; // that a run takes to be played
const SETTLED = 350; // milliseconds after the last change
const AGAIN = 1500; // milliseconds until a busy server is asked again
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const DARK = matchMedia("(prefers-color-scheme: dark)");

let controls;
let presets = [];
let run = new Run();
let before = null; // numbers of the last whole run that differs
let moment = 0;
let playing = false;
let toEnd = false; // the visitor wants to see the end, which is still computed
let played = 0; // when the last frame was drawn
let stopping = new AbortController();
let waiting;
let charted = ""; // what the chart shows

function change() {
  press(-1);
  byId("see").textContent = "";
  start(SETTLED);
}

/** Run what the form says, after some milliseconds without another change. */
function start(after = 0) {
  clearTimeout(waiting);
  waiting = setTimeout(() => void simulateNow(), after);
}

async function simulateNow() {
  if (!controls.valid()) return;
  stopping.abort();
  const mine = (stopping = new AbortController());
  const body = { model: controls.model(), options: controls.options() };
  keepInAddress(body);
  if (run.report) before = stage.lastNumbers(run);
  const next = new Run();
  byId("results").setAttribute("aria-busy", "true");
  tell("Simulating.");
  try {
    for await (const line of simulate(body, mine.signal)) {
      next.take(line);
      if (next.facts && run !== next) begin(next);
      if (line.report) end();
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    if (!(error instanceof Refusal)) throw error;
    if (error.after) waiting = setTimeout(() => void simulateNow(), AGAIN);
    else fail(error);
  } finally {
    if (mine === stopping) byId("results").removeAttribute("aria-busy");
  }
}

function begin(next) {
  run = next;
  moment = 0;
  toEnd = false;
  setPlaying(!STILL.matches);
  const { facts } = run;
  byId("trouble").hidden = true;
  byId("facts").textContent = `${facts.model} in ${facts.quant}, keys and values in ${facts.kv_dtype}, on ${facts.device}. ${sentence(facts.engine)}. Step times: ${facts.step_times}.`;
  byId("command").textContent = facts.command;
  byId("text").textContent = "";
  byId("answer").textContent = "";
  byId("as-command").hidden = false;
}

function end() {
  byId("text").textContent = run.text;
  byId("answer").textContent = run.answer;
  if (STILL.matches || toEnd) moment = run.end;
  draw();
  tell(`Simulated ${run.report.requests} requests in ${stage.seconds(run.report.duration_s)}. TTFT p50 ${stage.lastNumbers(run)["ttft-p50"]}.`);
}

function fail(error) {
  setPlaying(false);
  byId("trouble").textContent = error.message;
  byId("trouble").hidden = false;
  if (error.status === 401) askKey();
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1);
const tell = (text) => (byId("status").textContent = text);

/** Let time pass on the page, and draw. */
function tick(now) {
  if (playing && run.frames.length) {
    moment = Math.min(run.end, moment + ((now - played) / 1000) * (run.end / PLAYED_S));
    if (moment >= run.end && run.report) setPlaying(false);
    draw();
  }
  played = now;
  requestAnimationFrame(tick);
}

function draw() {
  if (!run.frames.length) return;
  const drawn = `${run.frames.length} ${byId("chart").clientWidth} ${run.facts.command}`;
  if (drawn !== charted) stage.drawChart(run);
  charted = drawn;
  stage.show(run, moment, before);
  byId("scrub").value = run.end ? (moment / run.end) * 1000 : 0;
  byId("scrub").setAttribute("aria-valuetext", stage.seconds(moment));
}

function setPlaying(on) {
  playing = on;
  if (on) toEnd = false;
  byId("play").textContent = on ? "Pause" : moment >= run.end ? "Play again" : "Play";
}

function toggle() {
  if (!playing && moment >= run.end) moment = 0;
  setPlaying(!playing);
}

function jump(to) {
  moment = to;
  toEnd = to >= run.end;
  setPlaying(false);
  draw();
}

function choose(number) {
  const preset = presets[number];
  if (!preset) return;
  press(number);
  controls.show(preset.model, preset.options);
  byId("see").textContent = preset.see;
  start();
}

function press(number) {
  [...byId("presets").querySelectorAll("button")].forEach((one, i) => one.setAttribute("aria-pressed", i === number));
}

/** The options are in the address, so that it can be kept and sent. */
function keepInAddress({ model, options }) {
  history.replaceState(null, "", `#${new URLSearchParams({ model, ...options })}`);
}

/** What an address asks for; null if it says nothing. */
function fromAddress() {
  const { model = "demo", ...texts } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (location.hash.length < 2) return null;
  const value = (text) => (text === "True" || text === "true" ? true : text !== "" && !Number.isNaN(Number(text)) ? Number(text) : text);
  return { model, options: Object.fromEntries(Object.entries(texts).map(([flag, text]) => [flag, value(text)])) };
}

function toggleTheme() {
  const { theme } = document.documentElement.dataset;
  const dark = theme === "system" ? DARK.matches : theme === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  preferTheme(dark ? "light" : "dark");
}

function askKey() {
  byId("key-title").textContent = wantsKey();
  byId("key").showModal();
}

const KEYS = {
  " ": toggle,
  End: () => jump(run.end),
  Home: () => jump(0),
  r: () => start(),
  d: toggleTheme,
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input:not([type=checkbox]), select, textarea")) return;
  if (event.key === " " && event.target.closest("button, summary, input")) return;
  const act = /^[1-9]$/.test(event.key) ? () => choose(Number(event.key) - 1) : KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
byId("play").addEventListener("click", toggle);
byId("scrub").addEventListener("input", ({ target }) => jump((target.value / 1000) * run.end));
byId("toggle-theme").addEventListener("click", toggleTheme);
byId("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(byId("command").textContent);
  byId("copy").textContent = "Copied";
  setTimeout(() => (byId("copy").textContent = "Copy"), 2000);
});
byId("key").addEventListener("close", () => {
  if (byId("key").returnValue === "keep") keepKey(byId("key-text").value);
  byId("key-text").value = "";
  void open();
});
new ResizeObserver(draw).observe(byId("lanes"));

async function open() {
  if (controls) return start();
  let description;
  try {
    description = await describe();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    return fail(error);
  }
  byId("trouble").hidden = true;
  controls = new Controls(description, change);
  presets = description.presets;
  byId("to-chat").hidden = !description.has_chat;
  byId("presets").append(...presets.map(({ title }, i) =>
    element("button", { type: "button", "aria-pressed": false, on: { click: () => choose(i) } }, element("kbd", { "aria-hidden": "true" }, String(i + 1)), title)));
  const asked = fromAddress();
  if (!asked) return choose(0);
  controls.show(asked.model, asked.options);
  start();
}

if (matchMedia("(max-width: 60rem)").matches) byId("all-options").open = false;
stage.prepare();
requestAnimationFrame(tick);
void open();
