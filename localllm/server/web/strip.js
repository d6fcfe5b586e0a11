// The strip below a conversation: a tick a token, as high as the gap before it, and the numbers of the answer as this
// page measured them; below them, once it has ended, the server's own.

import { byId } from "./dom.js";

const STEP = 3; // pixels from tick to tick
const HIGH = 32; // of the strip
const LOW = { token: 2, guessed: 8 }; // of a token that came together with another
const REFRESH = 250; // milliseconds between numbers, which have to be sorted

export class Strip {
  constructor() {
    this.svg = byId("ticks");
    this.watch = null;
    this.numbered = 0;
    this.left = 0; // the place of the leftmost tick
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.svg.addEventListener("pointermove", (event) => this.tell(event));
    this.svg.addEventListener("pointerleave", () => (byId("tick-told").textContent = ""));
  }

  /** A stopwatch that runs, or null; what was shown before is gone. */
  follow(watch) {
    this.watch = watch;
    this.ended({});
    this.number();
    this.draw();
  }

  /** Show what has come, at most once a frame; numbers a few times a second. */
  update(now = performance.now()) {
    this.draw();
    if (now - this.numbered > REFRESH) this.number(now);
  }

  /** Show the last numbers, and those of a turn that the server told. */
  ended({ told = {}, usage }, context = 0) {
    this.number();
    byId("server-ttft").textContent = told.ttft_ms ? `server ${milliseconds(told.ttft_ms)}` : "";
    byId("server-tps").textContent = told.predicted_per_second ? `server ${rate(told.predicted_per_second)}` : "";
    byId("server-p50").textContent = told.itl_p50_ms ? `server ${milliseconds(told.itl_p50_ms)}` : "";
    byId("server-p99").textContent = told.itl_p99_ms ? `server ${milliseconds(told.itl_p99_ms)}` : "";
    const cached = told.cache_n ? `, ${count(told.cache_n)} cached` : "";
    byId("prompt-tokens").textContent = usage ? `after ${count(usage.prompt_tokens)}${cached}` : "";
    byId("context").textContent = usage && context ? `${count(usage.total_tokens)} / ${count(context)}` : "–";
    byId("filled").max = context || 1;
    byId("filled").value = usage?.total_tokens ?? 0;
    const tokens = this.watch?.ticks.length ?? 0;
    this.svg.setAttribute("aria-label", tokens ? `A tick for each of ${tokens} tokens` : "No token yet");
  }

  number(now = performance.now()) {
    this.numbered = now;
    const watch = this.watch;
    byId("ttft").textContent = milliseconds(watch?.ttft);
    byId("tps").textContent = rate(watch?.rate);
    byId("p50").textContent = milliseconds(watch?.gap(50));
    byId("p99").textContent = milliseconds(watch?.gap(99));
    byId("tokens").textContent = watch ? count(watch.ticks.length) : "–";
  }

  draw() {
    const ticks = this.watch?.ticks ?? [];
    this.left = Math.max(0, ticks.length - Math.floor(this.svg.clientWidth / STEP));
    const seen = ticks.slice(this.left);
    const lines = { first: "", token: "", guessed: "" };
    const most = scale(this.left ? seen : seen.slice(1));
    seen.forEach(({ gap, guessed }, place) => {
      const kind = this.left + place === 0 ? "first" : guessed ? "guessed" : "token";
      const height = kind === "first" ? HIGH : Math.max(LOW[kind], Math.min(1, gap / most) * HIGH);
      lines[kind] += `M${place * STEP + 1} ${HIGH}v${-height.toFixed(1)}`;
    });
    for (const [kind, line] of Object.entries(lines)) this.svg.querySelector(`.${kind}`).setAttribute("d", line);
    this.svg.dataset.tokens = ticks.length;
  }

  /** The gap of the tick under the pointer, in words. */
  tell({ offsetX }) {
    const place = this.left + Math.floor(offsetX / STEP);
    const tick = this.watch?.ticks[place];
    const how = tick?.guessed ? ", a draft that was right" : "";
    const what = place === 0 ? "after sending" : "after the one before";
    byId("tick-told").textContent = tick ? `token ${place + 1}: ${milliseconds(tick.gap)} ${what}${how}` : "";
  }
}

export const milliseconds = (value) =>
  Number.isFinite(value) ? (value < 1000 ? `${value.toPrecision(3)} ms` : `${(value / 1000).toFixed(2)} s`) : "–";
export const rate = (value) => (Number.isFinite(value) ? `${value.toPrecision(3)} /s` : "–");
export const count = (value) => value.toLocaleString("en");

/** The gap that is drawn full: the longest, but one outlier does not flatten all others. */
function scale(ticks) {
  const gaps = ticks.map(({ gap }) => gap).filter((gap) => gap > 0).sort((one, other) => one - other);
  return gaps.length ? Math.min(gaps.at(-1), 4 * gaps[gaps.length >> 1]) : 1;
}
