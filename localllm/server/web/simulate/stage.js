// Draws a moment of a run: lanes of requests, the chart, blocks, and numbers. Changes nothing of the run.

import { byId, element } from "../dom.js";

const LANES = 30; // that are drawn
const CELLS = { rows: 8, size: 11, gap: 2 }; // of the cache
export const MEASURES = ["queue", "ttft", "tpot", "e2e"];
const HEADROOM = 1.08; // of the chart

export function prepare() {
  for (const name of MEASURES) {
    const cells = [50, 95, 99].map((p) =>
      element("td", {}, element("span", { id: `${name}-p${p}` }, "–"), element("span", { class: "before", id: `before-${name}-p${p}` })));
    byId(`row-${name}`).append(...cells);
  }
}

/** Show a moment of a run; before: the numbers of the run before, or null. */
export function show(run, moment, before) {
  const frame = run.frameAt(moment);
  if (!frame) return;
  const isEnd = moment >= run.end;
  for (const name of ["waiting", "prefill", "decode", "done"]) byId(`n-${name}`).textContent = count(frame[name]);
  drawLanes(run, moment);
  drawNow(run, moment);
  drawBlocks(run, frame);
  const numbers = isEnd && run.report ? lastNumbers(run) : numbersOf(frame);
  for (const [id, text] of Object.entries(numbers)) {
    byId(id).textContent = text;
    const old = byId(`before-${id}`);
    if (old) old.textContent = before && before[id] !== "–" ? `was ${before[id]}` : "";
  }
  byId("time").textContent = `${seconds(moment)} of ${seconds(run.end)}`;
}

function numbersOf(frame) {
  const numbers = {
    "requests-per-s": digits(frame.requests_per_s),
    "tokens-per-s": digits(frame.output_tokens_per_s),
    goodput: digits(frame.goodput),
    preemptions: count(frame.preemptions),
  };
  for (const name of MEASURES) [50, 95, 99].forEach((p, i) => (numbers[`${name}-p${p}`] = frame[name][i]));
  return numbers;
}

/** The numbers of the report, which the command prints too. */
export function lastNumbers({ report, frames }) {
  return {
    ...numbersOf(frames.at(-1)),
    "requests-per-s": digits(report.requests_per_s),
    "tokens-per-s": digits(report.output_tokens_per_s),
    goodput: digits(report.goodput_requests_per_s),
  };
}

function drawLanes(run, moment) {
  const svg = byId("lanes");
  const { clientWidth: width, clientHeight: height } = svg;
  const span = Math.max(run.end / 8, 1e-6);
  const from = moment - span;
  const x = (t) => Math.max(0, ((t - from) / span) * width);
  const seen = run.between(from, moment);
  const step = height / LANES;
  const paths = { waiting: "", prefill: "", decode: "" };
  const bar = (stage, lane, begin, end) => {
    if (begin === null || begin > moment) return;
    const left = x(begin);
    const right = Math.max(x(Math.min(end ?? moment, moment)), left + 1);
    paths[stage] += `M${left.toFixed(1)} ${(lane * step + 1).toFixed(1)}H${right.toFixed(1)}v${(step - 2).toFixed(1)}H${left.toFixed(1)}z`;
  };
  let hidden = 0;
  for (const { lane, arrival, scheduled, first, end } of seen) {
    if (lane >= LANES) {
      hidden += end === null || end > moment;
      continue;
    }
    bar("waiting", lane, arrival, scheduled);
    bar("prefill", lane, scheduled, first);
    bar("decode", lane, first, end);
  }
  for (const [stage, d] of Object.entries(paths)) svg.querySelector(`.${stage}`).setAttribute("d", d);
  svg.setAttribute("aria-label", `Requests in the last ${seconds(span)}, one in each lane: ${seen.length}`);
  const more = hidden ? `; ${count(hidden)} more requests have no lane here` : "";
  byId("lanes-note").textContent = `The last ${seconds(span)}, now at the right${more}.`;
}

/** The whole run so far: the lines of the chart. */
export function drawChart(run) {
  const svg = byId("chart");
  const { clientWidth: width, clientHeight: height } = svg;
  const end = run.end || 1;
  const most = HEADROOM * Math.max(1, ...run.frames.map((f) => Math.max(f.waiting, f.prefill + f.decode)));
  const blocks = run.facts?.blocks || 1;
  const at = (frame) => ((frame.t / end) * width).toFixed(1);
  const line = (value) => run.frames.map((f, i) => `${i ? "L" : "M"}${at(f)} ${((1 - value(f)) * height).toFixed(1)}`).join("");
  svg.querySelector(".running").setAttribute("d", line((f) => (f.prefill + f.decode) / most));
  svg.querySelector(".queued").setAttribute("d", line((f) => f.waiting / most));
  const cache = line((f) => f.used_blocks / blocks);
  svg.querySelector(".cache").setAttribute("d", cache && `${cache}V${height}H0z`);
  const queued = Math.max(0, ...run.frames.map((f) => f.waiting));
  svg.setAttribute("aria-label", `Requests and cache over ${seconds(end)}; at most ${count(queued)} in the queue`);
}

function drawNow(run, moment) {
  const { clientWidth: width, clientHeight: height } = byId("chart");
  const left = ((moment / (run.end || 1)) * width).toFixed(1);
  byId("chart").querySelector(".now").setAttribute("d", `M${left} 0V${height}`);
}

function drawBlocks(run, { used_blocks: used, cached_blocks: cached }) {
  const svg = byId("blocks");
  const { blocks, block_size: size } = run.facts;
  const pitch = CELLS.size + CELLS.gap;
  const rows = Math.max(1, Math.floor(svg.clientHeight / pitch));
  const columns = Math.max(1, Math.floor(svg.clientWidth / pitch));
  const cells = rows * columns;
  const filled = used ? Math.max(1, Math.round((used / blocks) * cells)) : 0;
  const kept = Math.min(cells - filled, Math.round((cached / blocks) * cells));
  const paths = { used: "", cached: "", free: "" };
  for (let i = 0; i < cells; i++) {
    const kind = i < filled ? "used" : i < filled + kept ? "cached" : "free";
    const left = Math.floor(i / rows) * pitch + 0.5;
    const top = (i % rows) * pitch + 0.5;
    paths[kind] += `M${left} ${top}h${CELLS.size}v${CELLS.size}h-${CELLS.size}z`;
  }
  for (const [kind, d] of Object.entries(paths)) svg.querySelector(`.${kind}`).setAttribute("d", d);
  const share = Math.round((used / blocks) * 100);
  byId("blocks-told").textContent = `${count(used)} of ${count(blocks)} blocks (${used && !share ? "<1" : share}%)`;
  svg.setAttribute("aria-label", `${count(used)} of ${count(blocks)} blocks of ${size} tokens in use, ${count(cached)} kept`);
}

const count = (value) => value.toLocaleString("en");
const digits = (value) => (value === null || value === undefined ? "–" : format(value));

/** Three digits, as the command prints them. */
function format(value) {
  const decimals = value ? Math.min(2, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))))) : 0;
  return value.toFixed(decimals);
}

export const seconds = (value) => (value >= 600 ? `${(value / 60).toFixed(1)} min` : value >= 1 ? `${value.toFixed(1)} s` : `${(value * 1000).toFixed(0)} ms`);
