// The engines of the selected runs, as they were in the last step.
import { count, fill, h, percent, short, throttle } from "./dom.js";
import { colour, get, store } from "./store.js";
import { long } from "./names.js";

const COLUMNS = [
  ["engine", "engine", String],
  ["tokens_per_s", "tokens/s", count],
  ["busy", "busy", (value) => percent(value, 0)],
  ["queue", "queue", count],
  ["version", "version", short],
  ["lost", "lost", short],
];
const WHY = {
  tokens_per_s: "tokens of finished samples in the last step",
  busy: "share of the last step in which it generated",
  queue: "samples that it has not finished",
  version: "version of its weights",
  lost: "how often it was lost, and started again",
};

export function engines() {
  const holder = h("div", { class: "grid tables" });
  async function load() {
    const found = await get("engines", { run: store.picked });
    if (!holder.isConnected) return;
    fill(
      holder,
      store.picked.filter((name) => found[name]).map((name) => card(name, found[name])),
    );
  }
  const live = throttle(load, 2000);
  queueMicrotask(() => {
    if (store.picked.length) load();
  });
  return {
    element: holder,
    changed: (names) => {
      if (store.picked.some((name) => names.has(name))) live();
    },
    close() {},
  };
}

const card = (name, rows) =>
  h(
    "div",
    { class: "card scroll" },
    h("h3", { class: "key", vars: { "--c": colour(name) } }, long(name)),
    rows.length
      ? h(
          "table",
          {},
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              COLUMNS.map(([key, label]) => h("th", { class: "number", title: WHY[key] }, label)),
            ),
          ),
          h(
            "tbody",
            {},
            rows.map((row) =>
              h(
                "tr",
                {},
                COLUMNS.map(([key, , text]) => h("td", { class: "number" }, text(row[key]))),
              ),
            ),
          ),
        )
      : h("p", { class: "empty" }, "One engine, in the process of the run."),
  );
