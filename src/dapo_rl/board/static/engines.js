// The engines and ranks of the selected runs, as they were in the last step.
import { count, fill, fixed, h, percent, short, throttle } from "./dom.js";
import { colour, get, store } from "./store.js";
import { long } from "./names.js";

const share = (value) => percent(value, 0);
const TABLES = {
  engines: [
    ["number", "engine", String],
    ["tokens_per_s", "tokens/s", count, "tokens of finished samples in the last step"],
    ["busy", "busy", share, "share of the last step in which it generated"],
    ["queue", "queue", count, "samples that it has not finished"],
    ["version", "version", (value) => fixed(value, 0), "version of its weights"],
    ["lost", "lost", short, "how often it was lost, and started again"],
  ],
  ranks: [
    ["number", "rank", String],
    ["tokens", "tokens", count, "tokens that it trained on in the last step"],
    ["busy", "busy", share, "share of the last step that it spent on scores and updates"],
    ["memory_gib", "GiB", (value) => fixed(value, 1), "its peak memory: of its GPU, or of its process"],
  ],
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

const card = (name, found) =>
  h(
    "div",
    { class: "card scroll" },
    h("h3", { class: "key", vars: { "--c": colour(name) } }, long(name)),
    Object.keys(TABLES).some((kind) => found[kind].length)
      ? Object.entries(TABLES).map(([kind, columns]) => (found[kind].length ? table(columns, found[kind]) : null))
      : h("p", { class: "empty" }, "One process samples and trains."),
  );

const table = (columns, rows) =>
  h(
    "table",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        columns.map(([, label, , why]) => h("th", { class: "number", title: why }, label)),
      ),
    ),
    h(
      "tbody",
      {},
      rows.map((row) =>
        h(
          "tr",
          {},
          columns.map(([key, , text]) => h("td", { class: "number" }, text(row[key]))),
        ),
      ),
    ),
  );
