// The steps that have groups, as ranges of consecutive ones, and their places on a slider.

export class Steps {
  ranges = [];

  get size() {
    return this.ranges.reduce((sum, [a, b]) => sum + b - a + 1, 0);
  }

  get last() {
    return this.ranges.at(-1)?.[1];
  }

  at(index) {
    for (const [a, b] of this.ranges) {
      if (index <= b - a) return a + index;
      index -= b - a + 1;
    }
    return this.last ?? 0;
  }

  indexOf(step) {
    let i = 0;
    for (const [a, b] of this.ranges) {
      if (step <= b) return i + Math.max(0, step - a);
      i += b - a + 1;
    }
    return i - 1;
  }

  /** A step before the first that is left is shown as it is: the server says why it has no groups. */
  nearest(step) {
    return step >= 1 && step < (this.ranges[0]?.[0] ?? 0) ? step : this.at(this.indexOf(step));
  }

  /** The step that is `by` places further. */
  beside(step, by) {
    const here = this.indexOf(step);
    const there = this.at(here) === step ? here + by : here;
    return this.at(Math.max(0, Math.min(this.size - 1, there)));
  }
}
