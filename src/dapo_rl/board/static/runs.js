// Runs: a table to select from; below it the curves, settings and evaluations of the selected runs. Ablations and
// evaluations stand in the same table and have pages of their own.
import { arrange, count, duration, fill, fixed, foreign, h, isNumber } from "./dom.js";
import { percent, short, signed, throttle } from "./dom.js";
import { long } from "./names.js";
import { PANELS } from "./panels.js";
import { record } from "./record.js";
import { colour, onChange, pick, remember, store } from "./store.js";

const DOTS = ["Overlong Filtering", "Clip-Higher", "Soft Overlong Punishment", "Token-level Loss", "Dynamic Sampling"];

const COLUMNS = [
  { key: "name", label: "run", cell: named },
  { key: "state", label: "state", cell: (r) => h("span", { class: `state ${r.state}` }, r.state) },
  { key: "step", label: "step", number: true, cell: progress },
  { key: "accuracy", label: "held-out", number: true, cell: accuracy },
  { key: "correct", label: "right", number: true, wide: true, cell: (r) => percent(r.correct, 0) },
  { key: "reward", label: "reward", number: true, cell: (r) => signed(r.reward) },
  {
    key: "length",
    label: "length",
    number: true,
    wide: true,
    cell: (r) => (isNumber(r.length) ? short(r.length) : "–"),
  },
  { key: "entropy", label: "entropy", number: true, wide: true, cell: (r) => fixed(r.entropy, 3) },
  { key: "tokens", label: "tokens", number: true, wide: true, cell: (r) => count(r.tokens) },
  { key: "seconds", label: "time", number: true, wide: true, cell: (r) => duration(r.seconds) },
  { key: "techniques", label: "techniques", wide: true, cell: techniques, sort: (r) => r.techniques?.length ?? -1 },
  { key: "model", label: "model", wide: true, cell: (r) => long(r.model ?? "–", "model") },
  { key: "seed", label: "seed", number: true, wide: true, cell: (r) => String(r.seed ?? "–") },
  { key: "started", label: "started", number: true, wide: true, cell: (r) => started(r.started) },
];

function named(row) {
  const why = [row.error, row.problem].filter(Boolean).join(" · ");
  const name = row.kind
    ? [
        h("a", { href: address(row), class: "report" }, long(row.name)),
        h(
          "small",
          { class: "what", title: row.what },
          h("span", { class: "chip" }, row.kind),
          foreign(` ${row.what ?? ""}`),
        ),
      ]
    : long(row.name);
  return [name, why ? h("small", { class: "foreign trouble", dir: "auto", title: why }, why) : null];
}

const address = (row) => `#/${row.kind}?${new URLSearchParams({ name: row.name })}`;

function progress(row) {
  if (row.state === "reading" || !isNumber(row.step)) return "–";
  const share = row.steps ? Math.min(1, row.step / row.steps) : 0;
  return h(
    "span",
    { class: "progress", vars: { "--share": `${100 * share}%` } },
    h("span", {}, `${row.step}`, h("small", {}, row.steps ? ` / ${row.steps}` : "")),
  );
}

function accuracy(row) {
  if (!isNumber(row.accuracy)) return "–";
  if (row.kind) return h("span", { title: `best: ${row.best}` }, percent(row.accuracy));
  const gain = isNumber(row.before) ? row.accuracy - row.before : null;
  return h(
    "span",
    {},
    percent(row.accuracy),
    gain === null
      ? null
      : h(
          "small",
          { class: gain >= 0 ? "up" : "down", title: `before: ${percent(row.before)}` },
          ` ${signed(100 * gain, 1)}`,
        ),
  );
}

function techniques(row) {
  if (!row.techniques) return "–";
  return h(
    "span",
    { class: "dots", title: row.techniques.join(", ") || "none of the five" },
    DOTS.map((name) => h("i", { class: row.techniques.includes(name) ? "on" : "" })),
  );
}

const started = (seconds) =>
  isNumber(seconds)
    ? new Date(1000 * seconds).toLocaleString(undefined, {
        month: "short",
        day: "numeric",
        hour: "2-digit",
        minute: "2-digit",
      })
    : "–";

const memory = { sort: "started", down: true, words: "", tab: "curves" };
const AT_ONCE = 80; // rows; more are added while the table is scrolled

export function runs(parameters, onClose) {
  if (parameters.get("tab")) memory.tab = parameters.get("tab");
  if (parameters.getAll("run").length) pick(parameters.getAll("run"));
  const body = h("tbody"),
    head = h("tr"),
    note = h("span", { class: "hint" });
  const words = h("input", {
    type: "search",
    placeholder: "filter by name, model, state…",
    "aria-label": "Filter runs",
    value: memory.words,
    oninput: () => {
      memory.words = words.value;
      first();
    },
  });
  const tabs = h("div", { class: "tabs", role: "tablist" });
  const below = h("section");
  const said = record();
  let panel = null;
  let shown = ""; // the runs in the panel
  const picks = () => store.picked.join("\n");

  let limit = AT_ONCE;
  const scroller = h(
    "div",
    {
      class: "card scroll table",
      onscroll: () => {
        if (scroller.scrollTop + 2 * scroller.clientHeight > scroller.scrollHeight && limit < matching().length) {
          limit += AT_ONCE;
          table();
        }
      },
    },
    h("table", { class: "runs" }, h("thead", {}, head), body),
  );

  function heading() {
    fill(
      head,
      h("th", { class: "tick" }),
      COLUMNS.map((column) =>
        h(
          "th",
          {
            class: `${column.number ? "number" : ""} ${column.wide ? "wide" : ""}`,
            "aria-sort": memory.sort === column.key ? (memory.down ? "descending" : "ascending") : null,
          },
          h(
            "button",
            { type: "button", onclick: () => sortBy(column.key) },
            column.label,
            memory.sort === column.key ? (memory.down ? " ↓" : " ↑") : "",
          ),
        ),
      ),
    );
  }

  function matching() {
    const wanted = memory.words.toLowerCase().split(/\s+/).filter(Boolean);
    const all = [...store.reports, ...store.runs.values()];
    if (!wanted.length) return all;
    return all.filter((row) => {
      const about = [row.name, row.model, row.state, row.preset, row.error, row.problem, row.kind, row.what];
      const text = [...about, `seed=${row.seed}`].join(" ").toLowerCase();
      return wanted.every((word) => text.includes(word));
    });
  }

  function table() {
    const rows = matching();
    const column = COLUMNS.find((c) => c.key === memory.sort);
    const key = column.sort ?? ((row) => row[column.key]);
    rows.sort((a, b) => (memory.down ? -1 : 1) * compare(key(a), key(b)));
    arrange(body, rows.slice(0, limit).map(line));
    const shown = rows.filter((row) => !row.kind).length;
    const others = ["ablation", "evaluation"]
      .map((kind) => [kind, rows.filter((row) => row.kind === kind).length])
      .filter(([, number]) => number)
      .map(([kind, number]) => ` · ${number} ${kind}${number === 1 ? "" : "s"}`);
    fill(note, `${shown} of ${store.runs.size} runs${others.join("")} · ${store.picked.length} picked`);
  }

  // A row is rebuilt only when its run changes: with many runs, most stay the same.
  const built = new Map();
  function line(row) {
    const on = !row.kind && store.picked.includes(row.name);
    const tint = on ? colour(row.name) : null;
    const key = `${row.kind ?? "run"} ${row.name}`;
    const known = built.get(key);
    if (known?.row === row && known.tint === tint) return known.element;
    if (known?.tint === tint) {
      // Of a run that goes on, what has not changed stays, so that its focus or a click on it is not lost.
      cells(row).forEach((cell, i) => {
        const old = known.element.children[i + 1];
        if (!old.isEqualNode(cell)) old.replaceChildren(...cell.childNodes);
      });
      known.row = row;
      return known.element;
    }
    const element = row.kind ? buildReport(row) : build(row, on, tint);
    built.set(key, { row, tint, element });
    return element;
  }

  function buildReport(row) {
    return h(
      "tr",
      {
        class: "report",
        data: { report: row.name },
        onclick: () => {
          location.hash = address(row);
        },
      },
      h("td", { class: "tick" }),
      cells(row),
    );
  }

  const cells = (row) =>
    COLUMNS.map((column) =>
      h(
        "td",
        { class: `${column.number ? "number" : ""} ${column.wide ? "wide" : ""}` },
        row.kind && (row[column.key] ?? null) === null ? null : column.cell(row),
      ),
    );

  function build(row, on, tint) {
    const box = h("input", {
      type: "checkbox",
      checked: on,
      "aria-label": `Show ${row.name}`,
      onchange: () => toggle(row.name, box.checked),
    });
    return h(
      "tr",
      {
        class: on ? "picked" : "",
        data: { run: row.name },
        vars: on ? { "--c": tint } : {},
        onclick: (event) => {
          if (event.target !== box) {
            box.checked = !box.checked;
            toggle(row.name, box.checked);
          }
        },
      },
      h("td", { class: "tick" }, box),
      cells(row),
    );
  }

  function toggle(name, on) {
    pick(on ? [...store.picked, name] : store.picked.filter((other) => other !== name));
    table();
    showPanel();
  }

  function sortBy(key) {
    memory.down = memory.sort === key ? !memory.down : key !== "name";
    memory.sort = key;
    heading();
    first();
  }

  /** Redraws the table from the top, after a change of order or filter. */
  function first() {
    limit = AT_ONCE;
    scroller.scrollTop = 0;
    table();
  }

  function showPanel() {
    panel?.close();
    shown = picks();
    fill(
      tabs,
      [
        ["curves", "Curves"],
        ["settings", "Settings"],
        ["evaluations", "Evaluation"],
        ...(store.picked.some((name) => store.runs.get(name)?.engines) ? [["engines", "Cluster"]] : []),
      ].map(([key, label]) =>
        h(
          "button",
          {
            type: "button",
            role: "tab",
            "aria-selected": String(memory.tab === key),
            onclick: () => {
              memory.tab = key;
              showPanel();
            },
          },
          label,
        ),
      ),
    );
    said.show();
    panel = PANELS[memory.tab]?.() ?? PANELS.curves();
    fill(below, store.picked.length ? panel.element : h("p", { class: "empty" }, "Pick a run in the table."));
    remember("runs", { tab: memory.tab === "curves" ? null : memory.tab });
  }

  heading();
  table();
  showPanel();
  const redraw = throttle(table, 500);
  onClose(
    onChange((changed) => {
      redraw();
      if (picks() !== shown) return showPanel(); // one was deleted
      said.changed(changed);
      panel?.changed(changed);
    }),
  );
  onClose(() => panel?.close());
  if (!store.runs.size && !store.reports.length)
    return h(
      "p",
      { class: "empty" },
      "No runs yet. Start one ",
      store.hasLab ? ["in the ", h("a", { href: "#/lab" }, "Lab"), ", or "] : null,
      "with ",
      h("code", {}, "dapo train"),
      ".",
    );
  return [
    h(
      "div",
      { class: "bar" },
      words,
      note,
      h("span", { class: "grow" }),
      h(
        "button",
        {
          type: "button",
          class: "quiet",
          onclick: () => {
            pick([]);
            table();
            showPanel();
          },
        },
        "pick none",
      ),
    ),
    scroller,
    said.element,
    tabs,
    below,
  ];
}

const collator = new Intl.Collator(undefined, { numeric: true });
function compare(a, b) {
  const missing = (v) => v === null || v === undefined;
  if (missing(a) || missing(b)) return Number(missing(b)) - Number(missing(a));
  return typeof a === "number" && typeof b === "number"
    ? a - b
    : collator.compare(String(a), String(b));
}
