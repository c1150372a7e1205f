// One group: its prompt, and its samples with their rewards, advantages and tokens.
import { conversation, episodeFacts, mentions } from "./conversation.js";
import { creditChart } from "./credit.js";
import { counted, fill, fixed, foreign, h, isNumber, percent, signed, visible } from "./dom.js";
import { outcomeClass, outcomeName, outcomeWhy } from "./outcomes.js";
import { occurs } from "./search.js";

// Where a token was clipped, as the rollouts number it: at no bound, and at each of the three.
const CLIPPED = [
  null,
  ["warm", "clipped high (clip_high)"],
  ["violet", "clipped low (clip_low)"],
  ["bad", "dual clip (clip_ratio_c)"],
];
const COLOURINGS = {
  none: ["no colour", () => null],
  advantage: [
    "advantage",
    (s) => s.advantages?.map((v) => tint(v, s.mostOfToken)) ?? s.pieces.map(() => tint(s.advantage, s.most)),
  ],
  value: ["value (critic)", (s) => s.value?.map((v) => tint(v, s.mostValue))],
  logp: ["surprise (−log p)", (s) => s.logp?.map((v) => (isNumber(v) ? ["warm", Math.min(1, -v / 3)] : null))],
  ratio: ["ratio", (s) => s.ratio?.map((v) => (isNumber(v) ? tint(Math.log(v), 0.25) : null))],
  clipped: ["clipped: no gradient", (s) => s.clipped?.map((v) => (CLIPPED[v] ? [CLIPPED[v][0], 1] : null))],
  entropy: ["entropy", (s) => s.entropy?.map((v) => (isNumber(v) ? ["violet", Math.min(1, v / 2)] : null))],
};
const LEGENDS = {
  none: [],
  advantage: [
    ["bad", "below the group's mean"],
    ["good", "above it"],
  ],
  credit: [
    ["bad", "worse than the critic expected"],
    ["good", "better"],
  ],
  value: [
    ["bad", "the critic expects a negative reward"],
    ["good", "a positive one"],
  ],
  logp: [["warm", "stronger: less likely"]],
  ratio: [
    ["bad", "less likely than when sampled"],
    ["good", "more likely"],
  ],
  clipped: CLIPPED.filter((bound) => bound),
  entropy: [["violet", "stronger: higher entropy"]],
};
const MOST_PIECES = 1500;
// Limits that end a sample.
const ENDED = { length: "cut off", turns: "out of turns" };
const memory = { colouring: "logp" };

const tint = (value, most) =>
  isNumber(value) && value !== 0 ? [value > 0 ? "good" : "bad", Math.min(1, Math.abs(value) / (most || 1))] : null;

export const mark = (sample) =>
  sample.correct
    ? "right"
    : [null, "not judged", "timeout", "error"].includes(sample.status)
      ? "failed"
      : sample.status === "unparseable"
        ? "unparsed"
        : "wrong";

/** The texts of samples with coloured tokens, the choice of colour and its legend. `after` runs when they are drawn. */
export class Painting {
  constructor(samples, colours, { different = () => null, words = () => "", after = () => {} } = {}) {
    Object.assign(this, { samples, different, words, after });
    this.possible = ["none", ...(samples.some((s) => s.most > 0) ? ["advantage"] : []), ...colours];
    if (!this.possible.includes(memory.colouring))
      memory.colouring = this.possible.includes("logp") ? "logp" : "none";
    this.texts = samples.map(({ turns }) =>
      h("div", { class: "text", tabindex: "0", data: turns ? {} : { find: "response" } }),
    );
    this.key = h("span", { class: "key-line" });
    // A run without a critic has no values that it could have recorded.
    const offered = Object.entries(COLOURINGS).filter(([name]) => name !== "value" || this.possible.includes(name));
    const chooser = h(
      "select",
      {
        "aria-label": "Colour tokens by",
        onchange: () => {
          memory.colouring = chooser.value;
          this.paint();
        },
      },
      offered.map(([name, [label]]) =>
        h(
          "option",
          { value: name, selected: name === memory.colouring, disabled: !this.possible.includes(name) },
          label + (this.possible.includes(name) ? "" : " (not recorded)"),
        ),
      ),
    );
    this.chooser = h("label", {}, "colour tokens by ", chooser);
    this.paint();
  }

  paint() {
    this.samples.forEach((sample, i) => {
      const different = this.different(sample);
      const plain = memory.colouring === "none" && !different;
      // A match beyond the tokens that are drawn at first would not be seen.
      const wanted = occurs(sample.response, this.words()) || mentions(sample, this.words());
      const most = wanted || different ? Infinity : MOST_PIECES;
      const { colouring } = memory;
      const tokens = (part) => tokenText(sample, part.grey ? "none" : colouring, { most, different, ...part });
      if (sample.turns) fill(this.texts[i], conversation(sample, plain, most, tokens));
      else fill(this.texts[i], plain ? plainText(sample) : tokens({}));
    });
    fill(
      this.key,
      LEGENDS[this.legend()].map(([cls, label]) =>
        h("span", { class: "swatch" }, h("i", { class: `tok ${cls}`, vars: { "--a": "0.8" } }), label),
      ),
    );
    this.after();
  }

  legend() {
    const byToken = this.samples.some((sample) => sample.advantages);
    return memory.colouring === "advantage" && byToken ? "credit" : memory.colouring;
  }
}

/** Gives each sample the largest advantages and the largest value of its group, by which its own are scaled. */
export function scaled(group) {
  const largest = (numbers) => numbers.reduce((most, v) => Math.max(most, Math.abs(v ?? 0)), 0);
  const most = largest(group.samples.map((s) => s.advantage));
  const mostOfToken = largest(group.samples.flatMap((s) => s.advantages ?? []));
  const mostValue = largest(group.samples.flatMap((s) => s.value ?? []));
  for (const sample of group.samples) Object.assign(sample, { most, mostOfToken, mostValue });
  return group;
}

/** A group; `close` goes back, `actions(sample)` adds buttons to a sample, the rest are options of Painting. */
export function groupView(group, { close, back, actions, ...painting }) {
  const drawn = new Painting(scaled(group).samples, group.colours, painting);
  const element = [
    h("button", { type: "button", class: "quiet back", onclick: close }, back),
    promptView(group),
    h(
      "div",
      { class: "bar" },
      drawn.chooser,
      drawn.key,
      group.decoded
        ? null
        : h("span", { class: "hint" }, "no tokenizer in this run directory yet: tokens are shown by id"),
    ),
    h(
      "div",
      { class: "samples" },
      group.samples.map((sample, i) => sampleView(sample, drawn.texts[i], actions(sample))),
    ),
  ];
  return { element, painting: drawn };
}

export function promptView(group, title = "Prompt") {
  const right = group.samples.filter((s) => s.correct).length;
  return h(
    "div",
    { class: "card question" },
    h(
      "div",
      { class: "line" },
      h("h3", {}, title),
      h("small", {}, `draw ${group.draw} · ${visible(group.prompt_id ?? "")}`),
      h("span", { class: "grow" }),
      h("span", { class: `chip ${outcomeClass(group.fate)}` }, outcomeName(group.fate)),
    ),
    found(foreign(group.prompt, "pre"), "prompt"),
    h(
      "p",
      {},
      "truth ",
      found(foreign(group.truth ?? "–", "b"), "truth"),
      ` · ${right} of ${group.samples.length} right · `,
      h("span", { class: "hint" }, whyOf(group)),
    ),
  );
}

/** With a critic, the rewards of a group that was trained on need not differ. */
function whyOf(group) {
  const byToken = group.fate === "kept" && group.samples.some((s) => s.advantages);
  return byToken ? "The critic gave each token an advantage: it was trained on." : outcomeWhy(group.fate);
}

/** Lets the search look into an element. */
function found(element, name) {
  element.dataset.find = name;
  return element;
}

export function sampleView(sample, text, actions = null, title = `sample ${sample.sample}`) {
  return h(
    "article",
    { class: `card sample ${mark(sample)}${sample.turns ? " episode" : ""}`, data: { sample: String(sample.sample) }, "aria-label": title },
    h(
      "div",
      { class: "line" },
      h("b", { class: "verdict" }, sample.status === "correct" ? "right" : (sample.status ?? "not judged")),
      h("small", {}, `${title} · ${counted(sample.ids.length, "token")}`),
      ENDED[sample.finish_reason] ? h("span", { class: "chip dropped" }, ENDED[sample.finish_reason]) : null,
      h("span", { class: "grow" }),
      answerOf(sample),
    ),
    sample.turns ? episodeFacts(sample) : null,
    text,
    creditChart(sample, text),
    sums(sample),
    extras(sample.extra ?? {}),
    actions,
  );
}

// Nothing for a reward that extracts no answer.
function answerOf(sample) {
  if (sample.answer === null && sample.status !== "unparseable") return null;
  const none = () => h("i", { class: "hint" }, "none found");
  const answer = sample.answer === null ? none() : found(foreign(sample.answer, "b"), "answer");
  return h("span", { class: "answer" }, "answer ", answer);
}

function sums(sample) {
  if (!isNumber(sample.score))
    return h("div", { class: "line sums" }, h("small", {}, "not judged: the run failed first"));
  if (!isNumber(sample.reward))
    return h(
      "div",
      { class: "line sums" },
      h("small", {}, `score ${signed(sample.score)}; not trained on, so it has no length penalty and no advantage`),
    );
  const share = sample.most ? Math.abs(sample.advantage ?? 0) / sample.most : 0;
  const length = sample.length_penalty ? fixed(sample.length_penalty) : "0";
  return h(
    "div",
    { class: "line sums" },
    h(
      "span",
      {},
      "reward ",
      h("b", {}, signed(sample.reward)),
      h("small", {}, ` = ${signed(sample.score)} answer, ${length} length`),
    ),
    h(
      "span",
      { class: "advantage" },
      sample.advantages ? "mean advantage " : "advantage ",
      h("b", {}, signed(sample.advantage)),
      h("i", {
        class: `meter ${(sample.advantage ?? 0) >= 0 ? "good" : "bad"}`,
        vars: { "--share": `${50 * share}%` },
      }),
    ),
  );
}

/** Other columns of the rollouts, such as the parts of a reward: name and value. */
function extras(values) {
  const entries = Object.entries(values);
  const text = (value) => (isNumber(value) ? String(Number(value.toPrecision(6))).replace("-", "−") : String(value));
  if (!entries.length) return null;
  return h(
    "dl",
    { class: "extra" },
    entries.map(([name, value]) => h("div", {}, foreign(name, "dt"), foreign(text(value), "dd"))),
  );
}

const plainText = (sample) => foreign(sample.response ?? "");

/** The pieces from `first` to before `last`, at most so many; grey ones are an environment's, which have no numbers. */
function tokenText(sample, colouring, options) {
  const { first = 0, last = sample.pieces.length, most = MOST_PIECES, different = null, grey = false } = options;
  const tints = COLOURINGS[colouring][1](sample) ?? [];
  const box = foreign("", "span");
  box.dataset.first = String(first);
  const parts = sample.pieces.slice(first, Math.min(last, first + most)).map(([text], place) => {
    const i = first + place;
    const [cls, strength] = tints[i] ?? ["", 0];
    return h(
      "span",
      {
        class: `tok ${cls}${different?.has(i) ? " different" : ""}`,
        vars: cls ? { "--a": strength.toFixed(3) } : {},
        title: [counting(sample, i), ...(grey ? [] : facts(sample, i))].join(" · "),
      },
      text,
    );
  });
  const rest = last - first - parts.length;
  return [
    fill(box, parts),
    rest > 0
      ? h(
          "button",
          {
            type: "button",
            class: "quiet",
            onclick: (event) =>
              event.target.parentElement &&
              fill(event.target.parentElement, tokenText(sample, colouring, { ...options, most: Infinity })),
          },
          `show ${counted(rest, "more token")}`,
        )
      : null,
  ];
}

const counting = (sample, i) =>
  sample.pieces[i][1] > 1 ? counted(sample.pieces[i][1], "token") : `token ${sample.ids[i] ?? ""}`;

/** The numbers of a piece. */
function facts(sample, i) {
  const found = [];
  if (isNumber(sample.logp?.[i]))
    found.push(`p ${percent(Math.exp(sample.logp[i]))}, log p ${fixed(sample.logp[i], 3)}`);
  if (isNumber(sample.ratio?.[i])) found.push(`ratio ${fixed(sample.ratio[i], 3)}`);
  if (isNumber(sample.entropy?.[i])) found.push(`entropy ${fixed(sample.entropy[i], 3)}`);
  if (isNumber(sample.value?.[i])) found.push(`value ${signed(sample.value[i], 3)}`);
  if (isNumber(sample.advantages?.[i])) found.push(`advantage ${signed(sample.advantages[i], 3)}`);
  if (CLIPPED[sample.clipped?.[i]]) found.push(CLIPPED[sample.clipped[i]][1]);
  return found;
}
