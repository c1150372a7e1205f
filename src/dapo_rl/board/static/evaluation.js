// An evaluation: the metrics of each model with intervals, the paired tests, and its picture.
import { count, fill, fixed, foreign, h, isNumber, percent, signed, throttle } from "./dom.js";
import { long } from "./names.js";
import { back, picture, refused } from "./report.js";
import { get, onChange, tint } from "./store.js";

const LABELS = { response_length: "tokens", truncated: "cut off" };
const isShare = (metric) => metric !== "response_length";
const value = (number, metric) => (isShare(metric) ? percent(number) : fixed(number, 1));
const change = (number, metric) =>
  isNumber(number) ? (isShare(metric) ? `${signed(100 * number, 1)} %` : signed(number, 1)) : "–";
const shownP = (p) => (isNumber(p) ? (p < 0.001 ? "< 0.001" : fixed(p, 3)) : "–");

export function evaluation(parameters, onClose) {
  const name = parameters.get("name") ?? "";
  const holder = h("div", { class: "page", data: { evaluation: name } });
  let turn = 0,
    drawing = null;

  async function load() {
    const mine = ++turn;
    const page = await get("report", { name }).catch((error) => error);
    if (mine !== turn) return;
    if (page instanceof Error) {
      fill(holder, refused(page));
      return;
    }
    fill(
      holder,
      heading(page),
      h("div", { class: "pair" }, figures(page), page.comparisons.length ? differences(page) : null),
      (drawing = picture(name, "evaluation", page.picture, drawing)),
      settings(page),
    );
  }

  const live = throttle(load, 2000);
  onClose(onChange((changed) => changed.has(`evaluation ${name}`) && live()));
  onClose(() => turn++);
  queueMicrotask(load);
  return holder;
}

function heading(page) {
  const [first] = page.models;
  return [
    h(
      "div",
      { class: "bar" },
      back(),
      h("h2", {}, long(page.name)),
      h("span", { class: `state ${page.state}` }, page.state),
    ),
    h(
      "p",
      { class: "hint about" },
      foreign(page.data),
      ` · ${first.problems ?? "?"} problems, ${page.k} ${page.k === 1 ? "sample" : "samples"} each`,
    ),
  ];
}

/** A row for each metric and a column for each model: it fits a phone. */
function figures(page) {
  const metrics = [...new Set(page.models.flatMap((model) => Object.keys(model.metrics)))];
  const errors = page.models.filter((model) => model.verifier_errors);
  return h(
    "section",
    { class: "card scroll results" },
    h(
      "table",
      { class: "figures" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", {}),
          page.models.map((model, index) =>
            h("th", { class: "number" }, h("span", { class: "key", vars: { "--c": tint(index) } }, long(model.model))),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        metrics.map((metric) =>
          h(
            "tr",
            { data: { metric } },
            h("th", { scope: "row" }, foreign(LABELS[metric] ?? metric)),
            page.models.map((model) => {
              const found = model.metrics[metric] ?? {};
              return h(
                "td",
                { class: "number" },
                h("b", {}, value(found.value, metric)),
                h("small", {}, ` (${value(found.low, metric)} to ${value(found.high, metric)})`),
              );
            }),
          ),
        ),
        h(
          "tr",
          {},
          h("th", { scope: "row" }, "generated"),
          page.models.map((model) => h("td", { class: "number" }, `${count(model.tokens)} tokens`)),
        ),
      ),
    ),
    h("p", { class: "hint" }, "intervals: 95 %, bootstrap over problems"),
    errors.map((model) =>
      h(
        "p",
        { class: "trouble" },
        long(model.model),
        `: the verifier failed on ${model.verifier_errors} samples, left out`,
      ),
    ),
  );
}

function differences(page) {
  let before = null;
  return h(
    "section",
    { class: "card scroll results" },
    h("h3", {}, "Compared with ", long(page.models[0].model)),
    h(
      "table",
      { class: "differences" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["metric", "difference", "interval", "p"].map((head, i) => h("th", { class: i ? "number" : "" }, head)),
        ),
      ),
      h(
        "tbody",
        {},
        page.comparisons.flatMap((row) => {
          const line = h(
            "tr",
            { data: { metric: row.metric } },
            h("th", { scope: "row" }, foreign(LABELS[row.metric] ?? row.metric)),
            h("td", { class: "number" }, h("b", {}, change(row.value, row.metric))),
            h("td", { class: "number" }, `${change(row.low, row.metric)} to ${change(row.high, row.metric)}`),
            h("td", { class: `number ${isNumber(row.p) && row.p < 0.05 ? "clear" : ""}` }, shownP(row.p)),
          );
          if (row.model === before) return [line];
          before = row.model;
          const index = page.models.findIndex((model) => model.model === row.model);
          return [
            h(
              "tr",
              { class: "of-model" },
              h(
                "th",
                { colSpan: 4 },
                h("span", { class: "key", vars: { "--c": tint(Math.max(0, index)) } }, long(row.model)),
              ),
            ),
            line,
          ];
        }),
      ),
    ),
    h("p", { class: "hint" }, "p: paired permutation test over problems; bold below 0.05"),
  );
}

function settings(page) {
  return h(
    "details",
    { class: "card results" },
    h("summary", {}, "settings"),
    h(
      "table",
      { class: "settings" },
      h(
        "tbody",
        {},
        Object.entries(page.settings).map(([key, text]) =>
          h("tr", {}, h("th", { scope: "row" }, foreign(key)), h("td", {}, foreign(text))),
        ),
      ),
    ),
  );
}
