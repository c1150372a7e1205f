// Panels for the selected runs: curves, settings, evaluations and engines.
import { Chart } from "./charts.js";
import { fill, foreign, h, percent, short, throttle } from "./dom.js";
import { address, saveMenu } from "./download.js";
import { engines } from "./engines.js";
import { colour, get, store } from "./store.js";
import { long } from "./names.js";

export const CURVES = [
  ["eval/accuracy", "held-out accuracy"],
  ["acc/mean", "share of correct samples"],
  ["reward/mean", "including the length penalty"],
  ["actor/entropy", "of the policy, in nats"],
  ["response_length/mean", "tokens"],
  ["response_length/clip_ratio", "share truncated at the limit"],
  ["actor/pg_clipfrac_high", "tokens clipped at the upper bound"],
  ["sampling/wasted_share", "tokens of dropped groups"],
  ["actor/grad_norm", "before clipping"],
];
const OF_CRITIC = [
  ["critic/vf_explained_var", "explained variance; 1 is perfect"],
  ["critic/vf_loss", "half the squared error of values"],
];
const OF_EPISODES = [
  ["env/turns", "turns of the policy in an episode"],
  ["env/tool_calls", "in an episode"],
  ["env/tool_errors", "malformed or failed tool calls in an episode"],
  ["env/wait_s", "seconds that an episode waits for its environment"],
  ["env/forks", "conversations that do not continue the last one"],
  ["env/failed", "share of episodes whose environment failed; env/failed_timeout and others say why"],
];
const OPTIONAL = [...OF_CRITIC, ...OF_EPISODES];

const OF_SOURCE = /^data\/.+\/accuracy$/;
const OF_FUNCTION = /^reward\/.+\/mean$/;
const hintOf = (name) =>
  OF_FUNCTION.test(name)
    ? "of one reward function, without its weight"
    : OF_SOURCE.test(name)
      ? "share of correct samples of one source"
      : "";

const AT_ONCE = 64; // metrics that the server takes in a request
const memory = { share: 0.1, extra: [], onlyDifferent: true, zoom: [null, null] };

export const legend = () =>
  h(
    "div",
    { class: "legend" },
    store.picked.map((name) => h("span", { class: "key", vars: { "--c": colour(name) } }, long(name))),
  );

const pretrainingKey = () =>
  h(
    "span",
    { class: "swatch", title: "The first steps train the critic alone (critic.pretrain_steps)." },
    h("i", { class: "shade" }),
    "value pre-training: the policy is not trained yet",
  );

export const PANELS = {
  engines,

  curves() {
    const grid = h("div", { class: "grid" });
    const charts = new Map();
    const slider = h("input", {
      type: "range",
      min: "0",
      max: "0.5",
      step: "0.01",
      value: String(memory.share),
      "aria-label": "Smoothing",
      oninput: () => {
        memory.share = Number(slider.value);
        fill(shown, percent(memory.share, 0));
        later();
      },
    });
    const shown = h("output", {}, percent(memory.share, 0));
    const more = h("select", {
      "aria-label": "Add a metric",
      onchange: () => {
        memory.extra.push(more.value);
        layout();
        load();
      },
    });
    const sample = h("span", { class: "hint" });
    const key = h("div");
    const reports = h("span");

    function layout() {
      const extra = memory.extra.map((name) => [name, hintOf(name)]);
      for (const [metric, hint] of [...CURVES, ...OPTIONAL, ...extra]) {
        if (charts.has(metric)) continue;
        const chart = new Chart(metric, {
          hint,
          optional: OPTIONAL.some(([name]) => name === metric),
          source: () => ({
            run: store.picked,
            metric,
            share: memory.share,
            first: memory.zoom[0],
            last: memory.zoom[1],
          }),
          onZoom: (first, last) => {
            memory.zoom = [first, last];
            load();
          },
        });
        charts.set(metric, chart);
        grid.append(chart.element);
      }
    }

    let turn = 0;
    async function load() {
      const mine = ++turn,
        names = store.picked;
      if (!names.length) return;
      const [first, last] = memory.zoom;
      const points = Math.round(Math.max(200, Math.min(1200, (2 * (grid.clientWidth || 800)) / 3)));
      const wanted = { run: names, points, share: memory.share, first, last };
      const metrics = [...charts.keys()];
      const parts = [];
      for (let i = 0; i < metrics.length; i += AT_ONCE)
        parts.push(get("curves", { ...wanted, metric: metrics.slice(i, i + AT_ONCE) }));
      const answers = await Promise.all(parts);
      const curves = Object.fromEntries(names.map((name) => [name, Object.assign({}, ...answers.map((a) => a[name]))]));
      if (mine !== turn || !grid.isConnected) return;
      const pretraining = Object.fromEntries(names.map((name) => [name, store.runs.get(name)?.pretrain_steps]));
      fill(key, legend(), Object.values(pretraining).some((step) => step > 0) ? pretrainingKey() : null);
      for (const [metric, chart] of charts)
        chart.draw(
          Object.fromEntries(names.map((name) => [name, curves[name][metric]])),
          memory.zoom,
          pretraining,
        );
      const steps = Math.max(0, ...names.flatMap((name) => Object.values(curves[name]).map((c) => c.steps)));
      fill(
        sample,
        first !== null
          ? "double-click shows all steps again"
          : steps > points
            ? `${steps.toLocaleString()} steps, minimum and maximum of each interval; drag to zoom`
            : "drag to zoom",
      );
    }

    let offered = null;
    let reported = "";
    async function offerReports() {
      const { runs } = await get("reports", { run: store.picked });
      if (String(runs) === reported) return; // the menu may be open
      reported = String(runs);
      const entries = runs.map((run) => [`report.png of ${run}`, address("report.png", { run })]);
      fill(reports, entries.length ? saveMenu("Download report.png", entries) : null);
    }

    async function offer() {
      const { names } = await get("metrics", { run: store.picked });
      if (String(names) === offered || !grid.isConnected) return;
      offered = String(names);
      for (const family of [OF_FUNCTION, OF_SOURCE]) {
        const members = names.filter((name) => family.test(name));
        if (members.length > 1 && members.some((name) => !charts.has(name))) {
          memory.extra.push(...members.filter((name) => !memory.extra.includes(name)));
          layout();
          load();
        }
      }
      const known = new Set([...charts.keys()]);
      fill(
        more,
        h("option", { value: "", disabled: true, selected: true }, "add a curve…"),
        names.filter((name) => !known.has(name)).map((name) => h("option", { value: name }, name)),
      );
    }

    // A run that goes on logs more metrics, and draws its report when it ends.
    const all = () => {
      if (!store.picked.length) return;
      load();
      offer();
      offerReports();
    };
    const later = throttle(load, 250),
      live = throttle(all, 1500);
    layout();
    queueMicrotask(all);
    return {
      element: h(
        "div",
        {},
        h(
          "div",
          { class: "bar" },
          key,
          h("span", { class: "grow" }),
          sample,
          more,
          h("label", {}, "smoothing ", slider, shown),
          reports,
        ),
        grid,
      ),
      changed: (names) => {
        if (store.picked.some((name) => names.has(name))) live();
      },
      close: () => {
        turn++;
        charts.forEach((chart) => chart.close());
      },
    };
  },

  settings() {
    const holder = h("div", { class: "card scroll" });
    const box = h("input", {
      type: "checkbox",
      checked: memory.onlyDifferent,
      onchange: () => {
        memory.onlyDifferent = box.checked;
        draw();
      },
    });
    let content = null;
    function draw() {
      const names = store.picked.filter((name) => content.runs[name]);
      const text = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
      const rows = content.keys
        .map((key) => ({ key, values: names.map((name) => text(content.runs[name][key])) }))
        .map((row) => ({ ...row, different: new Set(row.values).size > 1 }));
      const shown = memory.onlyDifferent && names.length > 1 ? rows.filter((row) => row.different) : rows;
      fill(
        holder,
        shown.length
          ? h(
              "table",
              { class: "settings" },
              h(
                "thead",
                {},
                h(
                  "tr",
                  {},
                  h("th", {}, "setting"),
                  names.map((name) =>
                    h("th", {}, h("span", { class: "key", vars: { "--c": colour(name) } }, long(name))),
                  ),
                ),
              ),
              h(
                "tbody",
                {},
                shown.map((row) =>
                  h(
                    "tr",
                    { class: row.different ? "different" : "" },
                    h("th", { scope: "row" }, row.key),
                    row.values.map((value) =>
                      h("td", { class: value === row.values[0] ? "" : "other" }, foreign(value)),
                    ),
                  ),
                ),
              ),
            )
          : h("p", { class: "empty" }, "These runs have the same settings."),
      );
    }
    queueMicrotask(async () => {
      if (store.picked.length) {
        content = await get("settings", { run: store.picked });
        draw();
      }
    });
    return {
      element: h(
        "div",
        {},
        h(
          "div",
          { class: "bar" },
          h("label", {}, box, " only differences"),
          h(
            "span",
            { class: "hint" },
            "resolved settings, including defaults; differences from the first run are marked",
          ),
        ),
        holder,
      ),
      changed() {},
      close() {},
    };
  },

  evaluations() {
    const holder = h("div", { class: "grid tables" });
    const chart = new Chart("eval/accuracy", {
      source: () => ({ run: store.picked, metric: "eval/accuracy", share: 0 }),
      hint: "held-out accuracy",
      height: 240,
    });
    async function load() {
      const [tables, curves] = await Promise.all([
        get("evaluations", { run: store.picked }),
        get("curves", { run: store.picked, metric: "eval/accuracy", share: 0 }),
      ]);
      if (!holder.isConnected) return; // a chart that is drawn after it was closed would stay for good
      chart.draw(
        Object.fromEntries(store.picked.map((name) => [name, curves[name]?.["eval/accuracy"]]).filter(([, c]) => c)),
      );
      fill(
        holder,
        store.picked
          .filter((name) => tables[name])
          .map((name) => {
            const rows = tables[name],
              columns = [...new Set(rows.flatMap((row) => Object.keys(row)))].filter((c) => c !== "step");
            return h(
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
                        h("th", { class: "number" }, "step"),
                        columns.map((c) => h("th", { class: "number", title: c }, c.replace("eval/", ""))),
                      ),
                    ),
                    h(
                      "tbody",
                      {},
                      rows.map((row) =>
                        h(
                          "tr",
                          {},
                          h("td", { class: "number" }, row.step),
                          columns.map((c) =>
                            h(
                              "td",
                              { class: "number" },
                              /accuracy|pass|avg|cons|truncated/.test(c) ? percent(row[c]) : short(row[c]),
                            ),
                          ),
                        ),
                      ),
                    ),
                  )
                : h("p", { class: "empty" }, "Not evaluated yet."),
            );
          }),
      );
    }
    const live = throttle(load, 2000);
    queueMicrotask(() => {
      if (store.picked.length) load();
    });
    return {
      element: h("div", {}, legend(), chart.element, holder),
      changed: (names) => {
        if (store.picked.some((name) => names.has(name))) live();
      },
      close: () => chart.close(),
    };
  },
};
