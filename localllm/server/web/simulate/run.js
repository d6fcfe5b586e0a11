// A run as the server streams it: frames, and what is known of each request. Knows nothing of elements.

import { ask, Refusal, refused } from "../server.js";

/** A simulation that goes on or has ended. */
export class Run {
  constructor() {
    this.facts = null;
    this.clear();
    this.report = null;
    this.text = "";
    this.answer = ""; // the highest load within the objectives
  }

  clear() {
    this.frames = [];
    this.requests = [];
    this.lanes = []; // number of the last request in each
  }

  /** Take a line of the answer. Throws Refusal for an error. */
  take(line) {
    if (line.error) throw refused(line.error, 500, null);
    if (line.restart) this.clear();
    else if (line.command) this.facts = line;
    else if (line.report) Object.assign(this, line);
    else if (line.t !== undefined) this.add(line);
  }

  add(frame) {
    this.frames.push(frame);
    for (const [number, arrival, scheduled, first, end, prompt, cached, output] of frame.requests) {
      const known = this.requests[number];
      this.requests[number] = { number, arrival, scheduled, first, end, prompt, cached, output, lane: known?.lane ?? -1 };
    }
  }

  get end() {
    return this.frames.at(-1)?.t ?? 0;
  }

  /** The last frame up to a moment. */
  frameAt(moment) {
    let low = 0;
    let high = this.frames.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.frames[middle].t <= moment) low = middle;
      else high = middle - 1;
    }
    return this.frames[low];
  }

  /** Requests that are in the engine or its queue between two moments, each with a lane of its own. */
  between(from, to) {
    const seen = this.requests.filter((r) => r.arrival <= to && (r.end === null || r.end >= from));
    for (const request of seen) if (request.lane < 0) this.choose(request);
    return seen;
  }

  /** Give a request the lowest lane that is free when it arrives. Lanes are chosen in the order of arrival. */
  choose(request) {
    for (const other of this.requests) {
      if (!other || other.number > request.number) continue;
      if (other.lane >= 0) continue;
      let lane = this.lanes.findIndex((number) => {
        const { end } = this.requests[number];
        return end !== null && end <= other.arrival;
      });
      if (lane < 0) lane = this.lanes.length;
      this.lanes[lane] = other.number;
      other.lane = lane;
    }
  }
}

/** Options, presets and names of models. */
export async function describe() {
  return (await ask("/simulate/options")).json();
}

/** Lines of a simulation, as they come. Throws Refusal; an AbortError where `signal` stops it. */
export async function* simulate(body, signal) {
  const response = await ask("/simulate/run", { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let ended = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      text += value;
      const lines = text.split("\n");
      text = lines.pop();
      for (const line of lines) {
        const parsed = JSON.parse(line);
        ended ||= Boolean(parsed.report || parsed.error);
        yield parsed;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new Refusal("The simulation broke off. Is the server still running?");
    throw error;
  } finally {
    reader.cancel().catch(() => {}); // it may have ended already
  }
  if (!ended) throw new Refusal("The simulation broke off.");
}
