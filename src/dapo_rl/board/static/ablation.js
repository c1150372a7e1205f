// An ablation: the curves of its arms, its table, its picture, and its runs.
import { BandChart } from "./bands.js";
import { fill, foreign, h, throttle } from "./dom.js";
import { long } from "./names.js";
import { back, picture, refused } from "./report.js";
import { get, onChange, tint } from "./store.js";

const TITLES = {
  ladder: "Techniques added one by one",
  "leave-one-out": "Each technique left out",
  vary: "Arms",
};
const CHARTS = [
  ["eval/accuracy", "held-out accuracy"],
  ["acc/mean", "share of correct samples"],
  ["actor/entropy", "of the policy, in nats"],
  ["response_length/mean", "tokens"],
  ["response_length/clip_ratio", "share truncated at the limit"],
  ["reward/mean", "including the length penalty"],
];

export function ablation(parameters, onClose) {
  const name = parameters.get("name") ?? "";
  const holder = h("div", { class: "page", data: { ablation: name } });
  const top = h("div"),
    parts = h("div"),
    below = h("div");
  let drawn = null,
    drawing = null,
    charts = [],
    turn = 0;

  async function load() {
    const mine = ++turn;
    let page, curves;
    try {
      [page, curves] = await Promise.all([get("report", { name }), get("arms", { name })]);
    } catch (error) {
      if (mine === turn) fill(holder, refused(error));
      return;
    }
    if (mine !== turn || !holder.isConnected) return;
    if (!holder.contains(top)) fill(holder, top, parts, below);
    fill(top, heading(page));
    layout(page);
    const labels = Object.fromEntries(page.arms.map((arm) => [arm.name, arm.label]));
    for (const { part, metric, chart } of charts)
      chart.draw(
        part.arms.map((arm, index) => ({ label: labels[arm], index, band: curves[arm]?.[metric] })),
      );
    fill(below, table(page), (drawing = picture(name, "ablation", page.picture, drawing)), runs(page));
  }

  /** Charts are kept while the arms stay the same. */
  function layout(page) {
    const key = JSON.stringify([page.parts, page.arms]);
    if (drawn === key) return;
    drawn = key;
    charts.forEach(({ chart }) => chart.close());
    charts = [];
    const labels = Object.fromEntries(page.arms.map((arm) => [arm.name, arm]));
    fill(
      parts,
      page.parts.map((part) => {
        const grid = h("div", { class: "grid" });
        for (const [metric, hint] of CHARTS) {
          const chart = new BandChart(metric, hint);
          charts.push({ part, metric, chart });
          grid.append(chart.element);
        }
        return h(
          "section",
          { class: "part" },
          h("h3", {}, TITLES[part.part] ?? part.part),
          h(
            "div",
            { class: "legend" },
            part.arms.map((arm, index) =>
              h(
                "span",
                { class: "key", vars: { "--c": tint(index) }, title: labels[arm]?.changes },
                long(labels[arm]?.label ?? arm),
              ),
            ),
            h(
              "span",
              { class: "hint" },
              page.seeds.length > 1 ? "mean over seeds; bands: range over seeds" : "one seed",
            ),
          ),
          grid,
        );
      }),
    );
  }

  const live = throttle(load, 2000);
  onClose(
    onChange((changed) => {
      if ([...changed].some((other) => other === `ablation ${name}` || other.startsWith(`${name}/`))) live();
    }),
  );
  onClose(() => {
    turn++;
    charts.forEach(({ chart }) => chart.close());
  });
  queueMicrotask(load);
  return holder;
}

function heading(page) {
  return [
    h(
      "div",
      { class: "bar" },
      back(),
      h("h2", {}, long(page.name)),
      h("span", { class: `state ${page.state}` }, page.state),
      h("small", {}, `${page.done} of ${page.total} runs`),
    ),
    h(
      "p",
      { class: "hint about" },
      foreign(page.recipe),
      page.overrides.length ? [" with ", foreign(page.overrides.join(" "))] : null,
      page.steps ? ` · ${page.steps} steps` : "",
      ` · ${page.arms.length} arms · seeds ${page.seeds.join(", ")}`,
    ),
    page.problem ? h("p", { class: "trouble foreign" }, page.problem) : null,
  ];
}

function table(page) {
  if (!page.table)
    return h("p", { class: "empty card" }, "The table and the picture are written when a run has finished.");
  const [first, ...others] = page.table.heads;
  return h(
    "section",
    { class: "card scroll results" },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, h("th", {}, first), others.map((head) => h("th", { class: "number" }, head)))),
      h(
        "tbody",
        {},
        page.table.rows.map(([arm, ...cells]) =>
          h(
            "tr",
            {},
            h("th", { scope: "row", title: arm.title }, long(arm.text)),
            cells.map((cell) => h("td", { class: "number", title: cell.title || null }, foreign(cell.text))),
          ),
        ),
      ),
    ),
    h(
      "p",
      { class: "hint" },
      `accuracy: held out, mean of the last quarter of the steps; ±: ${page.interval}; `,
      "difference: in points, paired by seed",
    ),
  );
}

function runs(page) {
  const heads = ["state", "before %", ...(page.table?.heads ?? []).filter((head) => !SKIPPED.has(head))];
  return h(
    "section",
    { class: "card scroll results" },
    h("h3", {}, "Every run"),
    h(
      "table",
      { class: "of-runs" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", {}, "arm"),
          h("th", { class: "number" }, "seed"),
          heads.map((head, i) => h("th", { class: i ? "number" : "" }, head)),
        ),
      ),
      h(
        "tbody",
        {},
        page.runs.map((run) =>
          h(
            "tr",
            { data: { run: run.run ?? "" } },
            h("th", { scope: "row" }, run.run ? h("a", { href: runAddress(run.run) }, long(run.arm)) : long(run.arm)),
            h("td", { class: "number" }, run.seed),
            h(
              "td",
              {},
              h("span", { class: `state ${run.state}` }, run.state),
              run.message ? h("small", { class: "foreign trouble", title: run.message }, run.message) : null,
            ),
            run.cells.slice(0, heads.length - 1).map((cell) => h("td", { class: "number" }, cell)),
          ),
        ),
      ),
    ),
  );
}

const SKIPPED = new Set(["arm", "paper", "difference", "seeds"]);
const runAddress = (run) => `#/runs?${new URLSearchParams({ run })}`;
