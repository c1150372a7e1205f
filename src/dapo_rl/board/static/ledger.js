// Ledger: where the generated tokens went, in total and per step.
import { Bars } from "./charts.js";
import { count, fill, foreign, h, percent, throttle } from "./dom.js";
import { offerRuns } from "./names.js";
import { byOutcome, outcomeName, outcomeTint } from "./outcomes.js";
import { get, onChange, remember, store } from "./store.js";

const inOrder = (outcomes) => [...outcomes].sort(byOutcome);
const memory = { run: null };

export function ledger(parameters, onClose) {
  const sorted = () => [...store.runs.values()].sort((a, b) => (b.started ?? 0) - (a.started ?? 0));
  const rows = sorted();
  if (!rows.length) return h("p", { class: "empty" }, "No runs yet.");
  memory.run =
    parameters.get("run") ?? (store.runs.has(memory.run) ? memory.run : (store.picked.at(-1) ?? rows[0].name));
  const total = h("section", { class: "card totals" });
  const chart = new Bars("tokens per step");
  const hint = h("span", { class: "hint" });
  const figure = h(
    "figure",
    { class: "card chart" },
    h("figcaption", {}, h("b", {}, chart.title), hint, chart.menu),
    chart.element,
    chart.reading,
  );
  const compare = h("section", { class: "card scroll" });
  const select = h("select", {
    "aria-label": "Run",
    onchange: () => {
      memory.run = select.value;
      load();
    },
  });
  offerRuns(select, rows, memory.run);

  let turn = 0;
  async function load() {
    if (!total.isConnected) return; // another view is shown by now
    const mine = ++turn;
    remember("ledger", { run: memory.run });
    const names = [...new Set([memory.run, ...store.picked])];
    const answers = await Promise.all(names.map((name) => get("ledger", { run: name }))).catch((error) => error);
    if (mine !== turn || !total.isConnected) return;
    if (answers instanceof Error) {
      figure.hidden = compare.hidden = true;
      fill(total, h("p", { class: "empty" }, answers.message));
      return;
    }
    const [answer] = answers;
    fill(total, totals(answer));
    const outcomes = inOrder(new Set(answer.bars.flatMap((bar) => Object.keys(bar.tokens))));
    figure.hidden = !answer.bars.length;
    if (answer.bars.length)
      chart.draw(
        answer.bars,
        outcomes.map((outcome) => [outcome, outcomeTint(outcome)]),
        outcomeName,
      );
    fill(hint, whichSteps(answer));
    fill(compare, names.length > 1 ? beside(names, answers) : null);
    compare.hidden = names.length < 2;
  }

  const live = throttle(load, 2500);
  onClose(
    onChange((changed) => {
      offerRuns(select, sorted(), memory.run);
      if (changed.has(memory.run)) live();
    }),
  );
  onClose(() => {
    turn++;
    chart.close();
  });
  queueMicrotask(load);
  return [h("div", { class: "bar" }, select), total, figure, compare];
}

function whichSteps({ bars, steps, last_step }) {
  if (bars.length < steps) return `${bars.length} of ${steps.toLocaleString()} steps, evenly spread`;
  if (steps < last_step) return `${steps} of ${last_step.toLocaleString()} steps: the others have no rollout file`;
  return "every step; a group counts where it was trained on or dropped";
}

const parts = (answer) =>
  inOrder(Object.keys(answer.totals).filter((outcome) => outcome !== "total" && answer.totals[outcome] > 0));
const whole = (answer) =>
  Math.max(
    answer.totals.total ?? 0,
    parts(answer).reduce((sum, outcome) => sum + answer.totals[outcome], 0),
  );

const strip = (answer) =>
  h(
    "div",
    { class: "strip" },
    parts(answer).map((outcome) =>
      h("i", {
        style: { width: `${(100 * answer.totals[outcome]) / (whole(answer) || 1)}%`, background: outcomeTint(outcome) },
        title: `${outcomeName(outcome)}: ${answer.totals[outcome].toLocaleString()}`,
      }),
    ),
  );

function totals(answer) {
  return [
    h(
      "div",
      { class: "line" },
      h("h3", {}, `${count(answer.totals.total)} ${answer.totals.total === 1 ? "token" : "tokens"} generated`),
      h(
        "span",
        { class: "hint" },
        answer.final
          ? "recorded by the run: every token counted once"
          : "so far, from the run log; exact reasons are available when the run ends",
      ),
    ),
    strip(answer),
    h(
      "div",
      { class: "shares" },
      parts(answer).map((outcome) =>
        h(
          "span",
          { class: "share", vars: { "--c": outcomeTint(outcome) } },
          h("b", {}, percent(answer.totals[outcome] / (whole(answer) || 1))),
          h("span", {}, outcomeName(outcome)),
          h("small", {}, answer.totals[outcome].toLocaleString()),
        ),
      ),
    ),
  ];
}

const beside = (names, answers) =>
  h(
    "table",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", {}, "run"),
        h("th", { class: "number" }, "tokens"),
        h("th", { class: "number" }, "trained on"),
        h("th", {}, "where they went"),
      ),
    ),
    h(
      "tbody",
      {},
      names.map((name, i) =>
        h(
          "tr",
          {},
          h("td", {}, foreign(name)),
          h("td", { class: "number" }, count(answers[i].totals.total)),
          h("td", { class: "number" }, percent((answers[i].totals.trained ?? 0) / (whole(answers[i]) || 1))),
          h("td", { class: "stretch" }, strip(answers[i])),
        ),
      ),
    ),
  );
