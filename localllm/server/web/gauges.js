// How busy the server is, from its `/metrics`: every few seconds while the page is seen. Knows nothing of chats.

import { byId } from "./dom.js";
import { metrics } from "./server.js";

const EVERY = 2000; // milliseconds
const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)/;

/** Show what the server tells, and call `reached` with true or false each time it was asked. */
export function watch(reached) {
  let tells = true;
  async function look() {
    if (document.visibilityState === "visible" && tells) {
      try {
        const text = await metrics();
        tells = text !== null;
        if (tells) show(sums(text));
        reached(true);
      } catch (refusal) {
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
  const { localllm_requests_running: running, localllm_requests_waiting: waiting } = found;
  const { localllm_kv_blocks_used: used, localllm_kv_blocks: blocks } = found;
  byId("gauges").hidden = running === undefined && blocks === undefined;
  byId("running").textContent = running ?? "–";
  byId("waiting").textContent = waiting ?? "–";
  byId("blocks").max = blocks || 1;
  byId("blocks").value = used ?? 0;
  const percent = blocks ? Math.round((used / blocks) * 100) : 0;
  byId("blocks").title = `${(used ?? 0).toLocaleString("en")} of ${(blocks ?? 0).toLocaleString("en")} blocks`;
  byId("blocks-told").textContent = `${percent}%`;
}
