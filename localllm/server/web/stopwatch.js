// Times of one answer as they reach this page: from sending until each token is here. Milliseconds.

export class Stopwatch {
  constructor() {
    this.restart();
  }

  /** It is sent now. */
  restart(now = performance.now()) {
    this.latest = now;
    this.first = undefined;
    this.ticks = []; // a token each: {gap, guessed}; the first one's gap is since sending
  }

  /** So many tokens came together, the last of them `guessed` by a draft: no time lies between them. */
  arrive(tokens, guessed, now = performance.now()) {
    for (let place = 0; place < tokens; place++) {
      this.ticks.push({ gap: now - this.latest, guessed: place >= tokens - guessed });
      this.latest = now;
    }
    if (tokens) this.first ??= now;
  }

  get ttft() {
    return this.ticks.length ? this.ticks[0].gap : NaN;
  }

  /** Tokens a second once the first is here. */
  get rate() {
    return this.ticks.length > 1 ? ((this.ticks.length - 1) / (this.latest - this.first)) * 1e3 : NaN;
  }

  /** A percentile of the gaps between tokens, by linear interpolation between closest ranks. */
  gap(percent) {
    const gaps = this.ticks.slice(1).map(({ gap }) => gap).sort((one, other) => one - other);
    if (!gaps.length) return NaN;
    const rank = ((gaps.length - 1) * percent) / 100;
    const low = Math.floor(rank);
    return gaps[low] + (gaps[Math.min(low + 1, gaps.length - 1)] - gaps[low]) * (rank - low);
  }
}
