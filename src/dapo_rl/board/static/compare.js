// Two samples side by side, of one group or of different groups and steps of a run.
import { fill, h } from "./dom.js";
import { Painting, promptView, sampleView, scaled } from "./samples.js";
import { get } from "./store.js";

const MOST_EDITS = 600;
const memory = { differences: true };

const same = (a, b) => a.step === b.step && a.draw === b.draw && a.sample === b.sample;
const named = (pick) => `step ${pick.step} · draw ${pick.draw} · sample ${pick.sample}`;
export const toText = (pick) => `${pick.step}.${pick.draw}.${pick.sample}`;
export function fromText(text) {
  const match = /^(\d{1,12})\.(-?\d{1,15})\.(\d{1,9})$/.exec(text ?? "");
  return match ? { step: Number(match[1]), draw: Number(match[2]), sample: Number(match[3]) } : null;
}

/** Which items of two lists are in only one of them: [set of places in a, set of places in b]. */
export function differences(a, b) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let tail = 0;
  const rest = Math.min(a.length, b.length) - start;
  while (tail < rest && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const kept = shared(a.slice(start, a.length - tail), b.slice(start, b.length - tail));
  const others = (length, places) => {
    const common = new Set(places);
    return new Set([...Array(length).keys()].filter((i) => !common.has(i)).map((i) => start + i));
  };
  return [
    others(
      a.length - start - tail,
      kept.map(([i]) => i),
    ),
    others(
      b.length - start - tail,
      kept.map(([, j]) => j),
    ),
  ];
}

/** The pairs of places of a longest common subsequence (Myers); none if the lists are too different. */
function shared(a, b) {
  const trace = [];
  const reach = new Map([[1, 0]]);
  for (let edits = 0; edits <= Math.min(a.length + b.length, MOST_EDITS); edits++) {
    trace.push(new Map(reach));
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1));
      let i = down ? reach.get(k + 1) : reach.get(k - 1) + 1;
      while (i < a.length && i - k < b.length && a[i] === b[i - k]) i++;
      reach.set(k, i);
      if (i >= a.length && i - k >= b.length) return pairs(trace, a.length, b.length);
    }
  }
  return [];
}

function pairs(trace, i, j) {
  const result = [];
  for (let edits = trace.length - 1; edits >= 0; edits--) {
    const reach = trace[edits];
    const k = i - j;
    const down = k === -edits || (k !== edits && (reach.get(k - 1) ?? -1) < (reach.get(k + 1) ?? -1));
    const before = down ? k + 1 : k - 1;
    const at = reach.get(before);
    while (i > at && j > at - before) result.push([--i, --j]);
    i = at;
    j = at - before;
  }
  return result.reverse();
}

/** Loads both and shows them; `close` goes back, `painted` runs whenever the texts are drawn. */
async function compareView(run, picks, { close, words, painted }) {
  const groups = await Promise.all(picks.map(({ step, draw }) => get("group", { run, step, draw })));
  const samples = groups.map((group, i) => {
    const found = scaled(group).samples.find((sample) => sample.sample === picks[i].sample);
    if (!found) throw new Error(`there is no such sample: ${named(picks[i])}`);
    return found;
  });
  const [first, second] = samples;
  const sets = differences(
    first.pieces.map(([text]) => text),
    second.pieces.map(([text]) => text),
  );
  const samePrompt = groups[0].prompt === groups[1].prompt;
  const sameGroup = picks[0].step === picks[1].step && picks[0].draw === picks[1].draw;
  const colours = groups[0].colours.filter((name) => groups[1].colours.includes(name));
  const box = h("input", {
    type: "checkbox",
    checked: memory.differences,
    onchange: () => {
      memory.differences = box.checked;
      painting.paint();
    },
  });
  const different = (sample) => (memory.differences ? sets[samples.indexOf(sample)] : null);
  const painting = new Painting(samples, colours, { different, words, after: painted });
  const tokens = (i, places) => [...places].reduce((sum, place) => sum + samples[i].pieces[place][1], 0);
  const [only, other] = sets.map((places, i) => tokens(i, places));
  const parting = Math.min(...sets[0], ...sets[1]);
  const apart = Number.isFinite(parting) ? tokens(sets[0].has(parting) ? 0 : 1, Array(parting).keys()) : null;
  const start = apart === 1 ? "the first token agrees; " : apart ? `the first ${apart} tokens agree; ` : "";
  const agree = apart === null ? "the responses are the same" : `${start}${only} and ${other} tokens differ`;
  const cards = samples.map((sample, i) => sampleView(sample, painting.texts[i], null, named(picks[i])));
  const element = h(
    "section",
    { class: "compare", "aria-label": "Two samples side by side" },
    h(
      "div",
      { class: "bar" },
      h("button", { type: "button", class: "quiet", onclick: close }, "‹ back"),
      painting.chooser,
      painting.key,
      h("label", {}, box, " mark differences"),
      h("span", { class: "hint" }, `${samePrompt ? "the same prompt" : "different prompts"}; ${agree}`),
    ),
    sameGroup ? promptView(groups[0]) : null,
    h(
      "div",
      { class: "two" },
      cards.map((card, i) => h("div", {}, sameGroup ? null : promptView(groups[i]), card)),
    ),
  );
  return { element, painting };
}

/** The samples that are picked in `memory`, and two of them side by side. */
export class Comparison {
  constructor(memory, { painted, changed }) {
    Object.assign(this, { memory, painted, changed });
    this.turn = 0;
    this.painting = null;
    this.tray = h("div", { class: "picks" });
    this.element = h("div");
    this.draw();
  }

  has(pick) {
    return this.memory.picks.some((other) => same(other, pick));
  }

  toggle(pick) {
    const others = this.memory.picks.filter((other) => !same(other, pick));
    this.memory.picks = this.has(pick) ? others : [...others, pick].slice(-2);
    this.draw();
  }

  clear() {
    this.memory.picks = [];
    this.close();
    this.draw();
  }

  /** The button of a sample. */
  button(pick) {
    return h(
      "button",
      {
        type: "button",
        class: "quiet pick",
        "aria-pressed": String(this.has(pick)),
        "aria-label": `Compare ${named(pick)}`,
        data: { pick: toText(pick) },
        onclick: () => this.toggle(pick),
      },
      "compare",
    );
  }

  draw() {
    const { picks, comparing } = this.memory;
    fill(this.tray, comparing || !picks.length ? null : this.trayView(picks));
    for (const button of document.querySelectorAll("[data-pick]"))
      button.setAttribute("aria-pressed", String(picks.some((pick) => toText(pick) === button.dataset.pick)));
  }

  trayView(picks) {
    const drop = (pick) =>
      h("button", { type: "button", "aria-label": `Drop ${named(pick)}`, onclick: () => this.toggle(pick) }, "×");
    return h(
      "div",
      { class: "card tray", role: "status" },
      h("span", {}, picks.length < 2 ? "Pick another sample to compare with" : "Compare"),
      picks.map((pick) => h("span", { class: "chip" }, named(pick), drop(pick))),
      picks.length < 2
        ? null
        : h("button", { type: "button", class: "main", onclick: () => this.open() }, "side by side"),
    );
  }

  async open() {
    const mine = ++this.turn;
    const close = () => this.close();
    this.memory.comparing = true;
    this.draw();
    const options = { close, words: () => this.memory.words, painted: this.painted };
    const view = await compareView(this.memory.run, this.memory.picks, options).catch((error) => ({
      element: h(
        "p",
        { class: "empty" },
        `${error.message} `,
        h("button", { type: "button", class: "quiet", onclick: close }, "‹ back"),
      ),
    }));
    if (mine !== this.turn) return;
    this.painting = view.painting;
    fill(this.element, view.element);
    this.changed();
    window.scrollTo(0, 0);
  }

  close() {
    if (!this.memory.comparing) return;
    this.turn++;
    this.memory.comparing = false;
    this.painting = null;
    fill(this.element);
    this.draw();
    this.changed();
  }

  paint() {
    this.painting?.paint();
  }
}
