// Curves of several runs in one chart: the smoothed line, with the raw one behind it.
import { exact, h, isNumber, short } from "./dom.js";
import { address, csv, save, saveMenu } from "./download.js";
import { png, svg } from "./picture.js";
import { colour } from "./store.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const faint = (hex, alpha) =>
  hex +
  Math.round(255 * alpha)
    .toString(16)
    .padStart(2, "0");

function axes() {
  const look = { stroke: css("--muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  const grid = { stroke: css("--line"), width: 1 };
  return [
    {
      ...look,
      grid: { show: false },
      size: 26,
      gap: 4,
      values: (_, ticks) => ticks.map((t) => (Number.isInteger(t) ? exact(t) : "")),
    },
    { ...look, grid, size: 46, gap: 4, values: (_, ticks) => ticks.map(exact) },
  ];
}

export const BASE = () => ({
  axes: axes(),
  legend: { show: false },
  scales: { x: { time: false } },
  padding: [8, 20, 0, 0],
});

/** The menu of a chart's downloads; `picture()` is what it shows. */
const downloads = (title, saveRows, picture) =>
  saveMenu(`Download ${title}`, [
    ["CSV", saveRows],
    ["SVG", () => save(`${title}.svg`, svg(picture()))],
    ["PNG", async () => save(`${title}.png`, await png(picture()))],
  ]);

/** A card with a chart that fits its width. A subclass sets `this.plot`, and has `saveRows()` and `picture()`. */
export class ChartCard {
  constructor(title, hint, height) {
    Object.assign(this, { title, hint, height });
    this.box = h("div", { class: "plot" });
    this.reading = h("div", { class: "reading" });
    this.element = h(
      "figure",
      { class: "card chart", data: { metric: title } },
      h(
        "figcaption",
        {},
        h("b", {}, title),
        h("span", { class: "hint" }, hint),
        downloads(
          title,
          () => this.saveRows(),
          () => this.picture(),
        ),
      ),
      this.box,
      this.reading,
    );
    this.observer = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.observer.observe(this.box);
  }

  size() {
    return { width: Math.max(200, this.box.clientWidth), height: this.height };
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}

const PRETRAINING = ["value", "pre-training"];
const SHADE = "#888888";

/**
 * Curves of runs. `onZoom(first, last)` loads more points of an interval. `source()` gives the parameters under which
 * the server has every point; without it, CSV has the points on the page. An `optional` chart is hidden without data.
 */
export class Chart extends ChartCard {
  constructor(title, { onZoom, source, hint = "", height = 170, optional = false } = {}) {
    super(title, hint, height);
    Object.assign(this, { onZoom, source, names: [], pretraining: [] });
    if (optional) this.element.classList.add("optional", "none");
  }

  /**
   * `lines`: {name: {raw: [steps, values], smooth: [steps, values]}}; `range`: the steps to show, all by default;
   * `pretraining`: {name: the last step of its value pre-training}.
   */
  draw(lines, [first, last] = [null, null], pretraining = {}) {
    const names = Object.keys(lines).filter((name) => lines[name]?.raw[0].length);
    this.names = names;
    this.pretraining = [...new Set(names.map((name) => pretraining[name]).filter((step) => step > 0))];
    this.lines = lines;
    this.element.classList.toggle("none", names.length === 0);
    const tables = names.flatMap((name) => [lines[name].raw, lines[name].smooth]);
    const data = tables.length ? window.uPlot.join(tables) : [[]];
    const key = names.map((name) => name + colour(name) + (lines[name].raw[0].length < 16)).join("\n");
    if (this.plot && this.key === key) {
      this.plot.setData(data);
    } else {
      this.plot?.destroy();
      this.key = key;
      this.plot = new window.uPlot(this.options(lines, names), data, this.box);
    }
    if (first !== null) this.plot.setScale("x", { min: first, max: last });
    this.read(null);
  }

  options(lines, names) {
    const series = [{}];
    for (const name of names) {
      const few = lines[name].raw[0].length < 16;
      const line = colour(name);
      series.push({
        stroke: faint(line, lines[name].raw[0].length > 300 ? 0.18 : 0.35),
        width: 1,
        points: { show: few, size: 6, fill: faint(line, 0.7), stroke: "transparent" },
      });
      series.push({ stroke: line, width: 2, points: { show: false } });
    }
    return {
      ...BASE(),
      ...this.size(),
      series,
      cursor: { sync: { key: "steps", setSeries: false }, points: { size: 6 }, drag: { x: true, y: false } },
      hooks: {
        drawClear: [(u) => this.shade(u)],
        draw: [(u) => this.label(u)],
        setCursor: [(u) => this.read(u.cursor.idx)],
        setSelect: [
          (u) => {
            if (u.select.width >= 4)
              this.onZoom?.(
                Math.floor(u.posToVal(u.select.left, "x")),
                Math.ceil(u.posToVal(u.select.left + u.select.width, "x")),
              );
          },
        ],
        ready: [(u) => u.over.addEventListener("dblclick", () => this.onZoom?.(null, null))],
      },
    };
  }

  /** Shades the steps of value pre-training; those of several runs lie over each other. */
  shade(u) {
    u.ctx.save();
    u.ctx.fillStyle = faint(SHADE, 0.16);
    for (const step of this.pretraining)
      u.ctx.fillRect(u.bbox.left, u.bbox.top, shadedWidth(u, step), u.bbox.height);
    u.ctx.restore();
  }

  /** Says what is shaded if there is room, away from the lines. */
  label(u) {
    if (!this.pretraining.length) return;
    const step = Math.max(...this.pretraining);
    const scale = u.bbox.width / u.over.clientWidth; // pixels of the canvas
    u.ctx.save();
    Object.assign(u.ctx, { fillStyle: css("--muted"), font: `${10 * scale}px system-ui, sans-serif` });
    Object.assign(u.ctx, { textAlign: "left", textBaseline: "top" });
    if (u.ctx.measureText(PRETRAINING[1]).width + 8 * scale < shadedWidth(u, step)) {
      const heights = u.data.slice(1).flatMap((row) => row.filter((v, i) => isNumber(v) && u.data[0][i] <= step));
      const middle = heights.reduce((sum, v) => sum + u.valToPos(v, "y", true), 0) / (heights.length || 1);
      const low = heights.length && middle < u.bbox.top + u.bbox.height / 2;
      const top = low ? u.bbox.top + u.bbox.height - 27 * scale : u.bbox.top + 3 * scale;
      PRETRAINING.forEach((word, i) => u.ctx.fillText(word, u.bbox.left + 4 * scale, top + 12 * i * scale));
    }
    u.ctx.restore();
  }

  /** The values at the pointer, or the last ones. */
  read(index) {
    if (!this.plot) return;
    const data = this.plot.data;
    const at = index ?? data[0].length - 1;
    const parts = this.names.map((name, i) => {
      const value = nearest(data[2 + 2 * i], at);
      return h("span", { class: "value", vars: { "--c": colour(name) } }, isNumber(value) ? short(value) : "–");
    });
    this.reading.replaceChildren(
      h("span", { class: "at" }, index === null ? "last" : `step ${data[0][at] ?? ""}`),
      ...parts,
    );
  }

  saveRows() {
    const wanted = this.source?.();
    if (wanted) h("a", { href: address("curves.csv", wanted), download: "" }).click();
    else save(`${this.title}.csv`, csv([["run", "metric", "step", "value", "smoothed"], ...this.rows()]));
  }

  rows() {
    return this.names.flatMap((name) => {
      const { raw, smooth } = this.lines[name];
      const smoothed = new Map(smooth[0].map((step, i) => [step, smooth[1][i]]));
      return raw[0].map((step, i) => [name, this.title, step, raw[1][i], smoothed.get(step)]);
    });
  }

  picture() {
    const lines = this.names.flatMap((name) => {
      const [raw, smooth] = [this.lines[name].raw, this.lines[name].smooth].map(([x, y]) => x.map((v, i) => [v, y[i]]));
      const stroke = colour(name, false);
      return [
        { points: raw, stroke, width: 1, alpha: 0.35, dots: raw.length < 16 },
        { points: smooth, stroke, width: 2 },
      ];
    });
    const range = ({ min, max }) => (isNumber(min) && isNumber(max) ? [min, max] : [0, 1]);
    const [x, y] = [range(this.plot?.scales.x ?? {}), range(this.plot?.scales.y ?? {})];
    const shaded = this.pretraining.filter((step) => step >= x[0]);
    return {
      title: this.title,
      hint: this.hint,
      x,
      y,
      bands: shaded.map((step) => ({ points: [x[0], step + 0.5].map((at) => [at, ...y]), fill: SHADE })),
      lines,
      legend: [
        ...this.names.map((name) => [name, colour(name, false)]),
        ...(shaded.length ? [[PRETRAINING.join(" "), "#dddddd"]] : []),
      ],
    };
  }
}

/** How far the shade of value pre-training reaches, in pixels of the canvas. */
function shadedWidth(u, step) {
  const reach = u.valToPos(step + 0.5, "x", true) - u.bbox.left;
  return Math.max(0, Math.min(reach, u.bbox.width));
}

function nearest(values, at) {
  for (let i = at; i >= 0; i--) if (isNumber(values?.[i])) return values[i];
  return null;
}

/** Stacked bars: `bars` [{step, tokens: {outcome: n}}], `parts` [[outcome, colour]…] from bottom to top. */
export class Bars {
  constructor(title, height = 260) {
    this.title = title;
    this.height = height;
    this.shown = { bars: [], parts: [], label: String };
    this.menu = downloads(
      title,
      () => this.saveRows(),
      () => this.picture(),
    );
    this.element = h("div", { class: "plot" });
    this.reading = h("div", { class: "reading" });
    this.observer = new ResizeObserver(() => this.plot?.setSize({ width: this.element.clientWidth, height }));
    this.observer.observe(this.element);
  }

  draw(bars, parts, label) {
    this.plot?.destroy();
    this.shown = { bars, parts, label };
    const sums = bars.map(() => 0);
    // Each part includes the height of those below it; the highest is drawn first.
    const stacked = parts.map(([outcome]) => bars.map((bar, i) => (sums[i] += bar.tokens[outcome] ?? 0)));
    const paths = window.uPlot.paths.bars({ size: [0.86, 60], align: 0 });
    const series = [
      {},
      ...parts.map(([, fill]) => ({ fill, stroke: fill, width: 0, paths, points: { show: false } })).reverse(),
    ];
    const steps = bars.map((bar) => bar.step);
    const width = steps.length > 1 ? (steps[steps.length - 1] - steps[0]) / (steps.length - 1) : 1;
    const base = BASE();
    this.plot = new window.uPlot(
      {
        ...base,
        width: Math.max(200, this.element.clientWidth),
        height: this.height,
        series,
        scales: {
          x: { time: false, range: (_, low, high) => [low - 0.7 * width, high + 0.7 * width] },
          y: { range: (_, _low, high) => [0, high * 1.05 || 1] },
        },
        cursor: { points: { show: false }, drag: { x: false, y: false } },
        hooks: { setCursor: [(u) => this.read(bars[u.cursor.idx ?? bars.length - 1], parts, label)] },
      },
      [steps, ...stacked.reverse()],
      this.element,
    );
    this.read(bars[bars.length - 1], parts, label);
  }

  saveRows() {
    const { bars, parts, label } = this.shown;
    const rows = bars.map((bar) => [bar.step, ...parts.map(([outcome]) => bar.tokens[outcome] ?? 0)]);
    save(`${this.title}.csv`, csv([["step", ...parts.map(([outcome]) => label(outcome))], ...rows]));
  }

  picture() {
    const { bars, parts, label } = this.shown;
    const { x, y } = this.plot.scales;
    const gaps = bars.slice(1).map((bar, i) => bar.step - bars[i].step);
    const width = 0.86 * Math.min(...gaps, x.max - x.min);
    const stacked = bars.flatMap((bar) => {
      let from = 0;
      return parts.map(([outcome, fill]) => {
        const to = from + (bar.tokens[outcome] ?? 0);
        const shape = { x: bar.step, width, from, to, fill };
        from = to;
        return shape;
      });
    });
    const legend = parts.map(([outcome, fill]) => [label(outcome), fill]);
    return { title: this.title, hint: "tokens", x: [x.min, x.max], y: [y.min, y.max], bars: stacked, legend };
  }

  read(bar, parts, label) {
    if (!bar) return;
    this.reading.replaceChildren(
      h("span", { class: "at" }, `step ${bar.step}`),
      ...parts
        .filter(([outcome]) => bar.tokens[outcome])
        .map(([outcome, fill]) =>
          h("span", { class: "value", vars: { "--c": fill } }, `${label(outcome)} ${short(bar.tokens[outcome])}`),
        ),
    );
  }

  close() {
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }
}
