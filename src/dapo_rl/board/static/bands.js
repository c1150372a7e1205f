// Curves of an ablation's arms in one chart: the mean over seeds, with a band for the range.
import { BASE, ChartCard } from "./charts.js";
import { h, isNumber, short } from "./dom.js";
import { csv, save } from "./download.js";
import { tint } from "./store.js";

const DASHES = [[], [6, 4], [2, 3]]; // beyond the colours that there are

export class BandChart extends ChartCard {
  constructor(title, hint, { height = 200 } = {}) {
    super(title, hint, height);
    this.arms = [];
  }

  /** `arms`: [{label, index, band: {steps, mean, low, high}}]; the index gives the colour. */
  draw(arms) {
    this.arms = arms.filter((arm) => arm.band?.steps.length);
    this.element.classList.toggle("none", this.arms.length === 0);
    this.plot?.destroy();
    const tables = this.arms.map(({ band }) => [band.steps, band.mean, band.low, band.high]);
    const data = tables.length ? window.uPlot.join(tables) : [[]];
    const series = [{}];
    const bands = [];
    for (const { index, band } of this.arms) {
      const line = tint(index);
      const edge = () => ({ stroke: "transparent", width: 0, points: { show: false } });
      const few = band.steps.length < 16;
      series.push({
        stroke: line,
        width: 2,
        dash: DASHES[Math.floor(index / 8) % DASHES.length],
        points: { show: few, size: 5, fill: line, stroke: line },
      });
      series.push(edge(), edge());
      bands.push({ series: [series.length - 1, series.length - 2], fill: `${line}26` });
    }
    this.plot = new window.uPlot(
      {
        ...BASE(),
        ...this.size(),
        series,
        bands,
        cursor: { sync: { key: "arms", setSeries: false }, points: { show: false }, drag: { x: false, y: false } },
        hooks: { setCursor: [(u) => this.read(u.cursor.idx)] },
      },
      data,
      this.box,
    );
    this.read(null);
  }

  /** The means and ranges at the pointer, or the last ones. */
  read(index) {
    const data = this.plot?.data;
    if (!data) return;
    const at = index ?? data[0].length - 1;
    this.reading.replaceChildren(
      h("span", { class: "at" }, isNumber(data[0][at]) ? `step ${data[0][at]}` : ""),
      ...this.arms.map(({ label, index: number }, i) => {
        const [mean, low, high] = [1, 2, 3].map((part) => data[3 * i + part]?.[at]);
        const range = isNumber(low) && low !== high ? ` (${short(low)} to ${short(high)})` : "";
        return h(
          "span",
          { class: "value", title: label, vars: { "--c": tint(number) } },
          `${isNumber(mean) ? short(mean) : "–"}${range}`,
        );
      }),
    );
  }

  saveRows() {
    const rows = this.arms.flatMap(({ label, band }) =>
      band.steps.map((step, i) => [label, this.title, step, band.mean[i], band.low[i], band.high[i]]),
    );
    save(`${this.title}.csv`, csv([["arm", "metric", "step", "mean", "low", "high"], ...rows]));
  }

  picture() {
    const range = ({ min, max }) => (isNumber(min) && isNumber(max) ? [min, max] : [0, 1]);
    return {
      title: this.title,
      hint: this.hint,
      x: range(this.plot?.scales.x ?? {}),
      y: range(this.plot?.scales.y ?? {}),
      bands: this.arms.map(({ index, band }) => ({
        points: band.steps.map((step, i) => [step, band.low[i], band.high[i]]),
        fill: tint(index, false),
      })),
      lines: this.arms.map(({ index, band }) => ({
        points: band.steps.map((step, i) => [step, band.mean[i]]),
        stroke: tint(index, false),
        width: 2,
        dash: DASHES[Math.floor(index / 8) % DASHES.length],
        dots: band.steps.length < 16,
      })),
      legend: this.arms.map(({ label, index }) => [label, tint(index, false)]),
    };
  }
}
