// One group: its prompt, and its samples with their rewards, advantages and tokens.
import { fill, fixed, foreign, h, isNumber, percent, signed, visible } from "./dom.js";
import { fateClass, fateName, fateWhy } from "./fates.js";

// Where a token was clipped, as the rollouts number it: at no bound, and at each of the three.
const CLIPPED = [
  null,
  ["warm", "clipped high (clip_high)"],
  ["violet", "clipped low (clip_low)"],
  ["bad", "dual clip (clip_ratio_c)"],
];
const COLOURINGS = {
  none: ["no colour", () => null],
  advantage: ["advantage", (s) => s.pieces.map(() => tint(s.advantage, s.most))],
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
  logp: [["warm", "stronger: less likely"]],
  ratio: [
    ["bad", "less likely than when sampled"],
    ["good", "more likely"],
  ],
  clipped: CLIPPED.filter((bound) => bound),
  entropy: [["violet", "stronger: higher entropy"]],
};
const MOST_PIECES = 1500;
const memory = { colouring: "logp" };

const tint = (value, most) =>
  isNumber(value) && value !== 0 ? [value > 0 ? "good" : "bad", Math.min(1, Math.abs(value) / (most || 1))] : null;

export const mark = (sample) =>
  sample.correct
    ? "right"
    : ["timeout", "error"].includes(sample.status)
      ? "failed"
      : sample.status === "unparseable"
        ? "unparsed"
        : "wrong";

export function groupView(group, close) {
  const most = Math.max(...group.samples.map((s) => Math.abs(s.advantage ?? 0)), 0);
  group.samples.forEach((sample) => {
    sample.most = most;
  });
  const possible = ["none", ...(most > 0 ? ["advantage"] : []), ...group.colours];
  if (!possible.includes(memory.colouring)) memory.colouring = possible.includes("logp") ? "logp" : "none";
  const texts = group.samples.map(() => h("div", { class: "text" }));
  const key = h("span", { class: "key-line" });
  const paint = () => {
    group.samples.forEach((sample, i) =>
      fill(texts[i], memory.colouring === "none" ? plainText(sample) : tokenText(sample, memory.colouring)),
    );
    fill(
      key,
      LEGENDS[memory.colouring].map(([cls, label]) =>
        h("span", { class: "swatch" }, h("i", { class: `tok ${cls}`, vars: { "--a": "0.8" } }), label),
      ),
    );
  };
  const chooser = h(
    "select",
    {
      "aria-label": "Colour tokens by",
      onchange: () => {
        memory.colouring = chooser.value;
        paint();
      },
    },
    Object.entries(COLOURINGS).map(([name, [label]]) =>
      h(
        "option",
        { value: name, selected: name === memory.colouring, disabled: !possible.includes(name) },
        label + (possible.includes(name) ? "" : " (not recorded)"),
      ),
    ),
  );
  paint();
  const right = group.samples.filter((s) => s.correct).length;
  return [
    h("button", { type: "button", class: "quiet back", onclick: close }, "‹ all groups"),
    h(
      "div",
      { class: "card question" },
      h(
        "div",
        { class: "line" },
        h("h3", {}, "Prompt"),
        h("small", {}, `draw ${group.draw} · ${visible(group.prompt_id ?? "")}`),
        h("span", { class: "grow" }),
        h("span", { class: `chip ${fateClass(group.fate)}` }, fateName(group.fate)),
      ),
      foreign(group.prompt, "pre"),
      h(
        "p",
        {},
        "truth ",
        foreign(group.truth ?? "–", "b"),
        ` · ${right} of ${group.samples.length} right · `,
        h("span", { class: "hint" }, fateWhy(group.fate)),
      ),
    ),
    h(
      "div",
      { class: "bar" },
      h("label", {}, "colour tokens by ", chooser),
      key,
      group.decoded
        ? null
        : h("span", { class: "hint" }, "no tokenizer in this run directory yet: tokens are shown by id"),
    ),
    h(
      "div",
      { class: "samples" },
      group.samples.map((sample, i) => sampleView(sample, texts[i])),
    ),
  ];
}

function sampleView(sample, text) {
  const share = sample.most ? Math.abs(sample.advantage ?? 0) / sample.most : 0;
  return h(
    "article",
    { class: `card sample ${mark(sample)}`, data: { sample: String(sample.sample) } },
    h(
      "div",
      { class: "line" },
      h("b", { class: "verdict" }, sample.status === "correct" ? "right" : sample.status),
      h("small", {}, `sample ${sample.sample} · ${sample.ids.length} tokens`),
      sample.finish_reason === "length" ? h("span", { class: "chip dropped" }, "cut off") : null,
      h("span", { class: "grow" }),
      h(
        "span",
        {},
        "answer ",
        sample.answer === null ? h("i", { class: "hint" }, "none found") : foreign(sample.answer, "b"),
      ),
    ),
    text,
    h(
      "div",
      { class: "line sums" },
      isNumber(sample.reward)
        ? [
            h(
              "span",
              {},
              "reward ",
              h("b", {}, signed(sample.reward)),
              h(
                "small",
                {},
                ` = ${signed(sample.score)} answer, ${sample.length_penalty ? fixed(sample.length_penalty) : "0"} length`,
              ),
            ),
            h(
              "span",
              { class: "advantage" },
              "advantage ",
              h("b", {}, signed(sample.advantage)),
              h("i", {
                class: `meter ${(sample.advantage ?? 0) >= 0 ? "good" : "bad"}`,
                vars: { "--share": `${50 * share}%` },
              }),
            ),
          ]
        : h(
            "small",
            {},
            `score ${signed(sample.score)}; not trained on, so it has no length penalty and no advantage`,
          ),
    ),
  );
}

const plainText = (sample) => foreign(sample.response ?? "");

function tokenText(sample, colouring, most = MOST_PIECES) {
  const tints = COLOURINGS[colouring][1](sample) ?? [];
  const box = foreign("", "span");
  const parts = sample.pieces.slice(0, most).map(([text, count], i) => {
    const [cls, strength] = tints[i] ?? ["", 0];
    const facts = [count > 1 ? `${count} tokens` : `token ${sample.ids[i] ?? ""}`];
    if (isNumber(sample.logp?.[i]))
      facts.push(`p ${percent(Math.exp(sample.logp[i]))}, log p ${fixed(sample.logp[i], 3)}`);
    if (isNumber(sample.ratio?.[i])) facts.push(`ratio ${fixed(sample.ratio[i], 3)}`);
    if (isNumber(sample.entropy?.[i])) facts.push(`entropy ${fixed(sample.entropy[i], 3)}`);
    if (CLIPPED[sample.clipped?.[i]]) facts.push(CLIPPED[sample.clipped[i]][1]);
    return h(
      "span",
      { class: `tok ${cls}`, vars: cls ? { "--a": strength.toFixed(3) } : {}, title: facts.join(" · ") },
      text,
    );
  });
  const rest = sample.pieces.length - parts.length;
  return [
    fill(box, parts),
    rest > 0
      ? h(
          "button",
          {
            type: "button",
            class: "quiet",
            onclick: (event) =>
              event.target.parentElement && fill(event.target.parentElement, tokenText(sample, colouring, Infinity)),
          },
          `show ${rest} more tokens`,
        )
      : null,
  ];
}
