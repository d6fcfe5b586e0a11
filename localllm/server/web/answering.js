// One answer, from its request to its end, into a turn of a conversation: stopped when the visitor wants, asked for
// again where the server is busy. Knows nothing of elements.

import { take } from "./answer.js";
import { chat, Refusal } from "./server.js";
import { Stopwatch } from "./stopwatch.js";

const TRIES = 5; // of a busy server

export class Answering {
  /** grown: called whenever the turn has changed. */
  constructor(conversation, place, body, grown) {
    this.conversation = conversation;
    this.place = place;
    this.turn = conversation.turns[place];
    this.body = body;
    this.grown = grown;
    this.stopping = new AbortController();
    this.watch = new Stopwatch();
  }

  stop() {
    this.stopping.abort();
  }

  /** Comes back when the answer has ended in whichever way; the turn tells it. Gives the Refusal, if there was one. */
  async run() {
    try {
      await this.ask(TRIES);
    } catch (error) {
      if (error.name === "AbortError") {
        this.turn.ended = "stopped";
      } else {
        this.turn.ended = "failed";
        this.turn.failed = error.message;
        if (!(error instanceof Refusal)) throw error;
        return error;
      }
    } finally {
      delete this.turn.waiting;
    }
    return null;
  }

  async ask(tries) {
    try {
      for await (const chunk of chat(this.body, this.stopping.signal)) {
        const { tokens, guessed } = take(this.turn, chunk);
        this.watch.arrive(tokens, guessed);
        this.grown();
      }
    } catch (error) {
      if (!error.after || tries <= 1) throw error;
      await this.wait(error);
      this.watch.restart();
      await this.ask(tries - 1);
    }
  }

  async wait({ message, after }) {
    for (let left = Math.ceil(after); left > 0; left--) {
      this.turn.waiting = `${message} Asking again in ${left} s.`;
      this.grown();
      await pause(1000, this.stopping.signal);
    }
    delete this.turn.waiting;
  }
}

/** Throws AbortError when `signal` says so. */
function pause(time, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, time);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
