// How busy the server is, from its `/metrics`: every few seconds while the page is seen. Knows nothing of chats.

import { byId } from "./dom.js";
import { key } from "./kept.js";
import { metrics } from "./server.js";

const EVERY = 2000; // milliseconds
const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)/;

/** Show what the server tells, and call `reached` with true or false each time it was asked. */
export function watch(reached) {
  let wrong = null; // a key, or none, that the server does not take: it is not asked again with it
  async function look() {
    if (document.visibilityState === "visible" && key() !== wrong) {
      try {
        show(sums(await metrics()));
        reached(true);
      } catch (refusal) {
        if (refusal.status === 401) wrong = key();
        reached(refusal.status !== 0);
      }
    }
    setTimeout(look, EVERY);
  }
  look();
}

/** Prometheus' text format: the sum of each metric over its labels, as of several models. */
export function sums(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const sample = SAMPLE.exec(line);
    if (sample) found[sample[1]] = (found[sample[1]] ?? 0) + Number(sample[2]);
  }
  return found;
}

function show(found) {
  const { localllm_running: running, localllm_waiting: waiting } = found;
  const { localllm_kv_blocks: blocks, localllm_kv_blocks_used: used, localllm_kv_blocks_cached: cached } = found;
  byId("gauges").hidden = running === undefined && blocks === undefined;
  byId("running").textContent = running ?? "–";
  byId("waiting").textContent = waiting ?? "–";
  byId("blocks").max = blocks || 1;
  byId("blocks").value = used ?? 0;
  const percent = blocks ? (used / blocks) * 100 : 0;
  byId("blocks").title = `${count(used)} of ${count(blocks)} blocks in use, ${count(cached)} kept for later turns`;
  byId("blocks-told").textContent = percent > 0 && percent < 1 ? "<1%" : `${Math.round(percent)}%`;
}

const count = (value = 0) => value.toLocaleString("en");
