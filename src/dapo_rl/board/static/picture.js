// Charts as pictures for a paper: black on white with title, axes and legend, as SVG or PNG.
import { exact, visible } from "./dom.js";

const WIDTH = 720;
const HEIGHT = 420;
const FONT = "Helvetica, Arial, sans-serif";
const INK = "#222222";
const GRID = "#e0e0e0";
const PIXELS = 3; // per point: sharp in print
const LONGEST_NAME = 70;

const ruler = document.createElement("canvas").getContext("2d");
function widthOf(text, size) {
  ruler.font = `${size}px ${FONT}`;
  return ruler.measureText(text).width;
}

/** Round numbers between two bounds. */
export function ticks(low, high, wanted = 6) {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((s) => s >= rough * 0.999) ?? 10 * power;
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++)
    result.push(Number((i * step).toPrecision(12)));
  return result;
}

/**
 * The shapes of a chart: {title, hint, x: [low, high], y: [low, high],
 * lines: [{points, stroke, width, dash}], bands: [{points: [[x, low, high], …], fill}],
 * bars: [{x, width, from, to, fill}], legend: [[name, colour]]}.
 */
function shapesOf(chart) {
  const shapes = [{ kind: "rect", x: 0, y: 0, width: WIDTH, height: HEIGHT, fill: "#ffffff" }];
  const text = (x, y, words, more = {}) =>
    shapes.push({ kind: "text", x, y, text: visible(words), size: 13, anchor: "start", fill: INK, ...more });
  const line = (from, to, stroke) => shapes.push({ kind: "line", points: [from, to], stroke, width: 1 });
  text(16, 28, chart.title, { size: 17, weight: "bold" });
  let y = 48;
  let x = 16;
  for (const [name, fill] of chart.legend) {
    const whole = visible(name);
    const label = whole.length > LONGEST_NAME ? `${whole.slice(0, LONGEST_NAME - 1)}…` : whole;
    const width = 24 + widthOf(label, 13) + 18;
    if (x > 16 && x + width > WIDTH - 10) [x, y] = [16, y + 19];
    shapes.push({ kind: "rect", x, y: y - 6, width: 18, height: 4, fill });
    text(x + 24, y, label);
    x += width;
  }
  const ys = ticks(...chart.y);
  const left = 34 + Math.max(...ys.map((t) => widthOf(exact(t), 12)));
  const box = { left, right: WIDTH - 20, top: y + 16, bottom: HEIGHT - 48 };
  const place = (value, [low, high], from, to) => from + ((value - low) / (high - low || 1)) * (to - from);
  const toX = (value) => place(value, chart.x, box.left, box.right);
  const toY = (value) => place(value, chart.y, box.bottom, box.top);
  for (const tick of ys) {
    line([box.left, toY(tick)], [box.right, toY(tick)], GRID);
    text(box.left - 7, toY(tick) + 4, exact(tick), { size: 12, anchor: "end" });
  }
  for (const tick of ticks(...chart.x, 8).filter(Number.isInteger)) {
    line([toX(tick), box.bottom], [toX(tick), box.bottom + 5], INK);
    text(toX(tick), box.bottom + 19, String(tick), { size: 12, anchor: "middle" });
  }
  for (const bar of chart.bars ?? []) {
    const [a, b] = [toX(bar.x - bar.width / 2), toX(bar.x + bar.width / 2)];
    const [top, bottom] = [toY(bar.to), toY(bar.from)];
    shapes.push({ kind: "rect", x: a, y: top, width: b - a, height: bottom - top, fill: bar.fill, clip: true });
  }
  for (const { points, fill } of chart.bands ?? []) {
    const upper = points.map(([a, , high]) => [toX(a), toY(high)]);
    const lower = points.map(([a, low]) => [toX(a), toY(low)]);
    shapes.push({ kind: "area", points: [...upper, ...lower.reverse()], fill, clip: true });
  }
  for (const { points, stroke, width, alpha = 1, dash = [], dots } of chart.lines ?? []) {
    const placed = points.map(([a, b]) => [toX(a), toY(b)]);
    shapes.push({ kind: "line", points: placed, stroke, width, alpha, dash, clip: true });
    if (dots) for (const [a, b] of placed) shapes.push({ kind: "dot", x: a, y: b, fill: stroke, clip: true });
  }
  line([box.left, box.top], [box.left, box.bottom], INK);
  line([box.left, box.bottom], [box.right, box.bottom], INK);
  text((box.left + box.right) / 2, HEIGHT - 10, "step", { anchor: "middle" });
  text(16, (box.top + box.bottom) / 2, chart.hint || chart.title, { anchor: "middle", turned: true });
  return { shapes, box };
}

const escaped = (text) => text.replace(/[<>&"']/g, (c) => `&#${c.charCodeAt(0)};`);
const at = (number) => Number(number.toFixed(2));

const joined = (points) => points.map((point) => point.map(at).join(",")).join(" ");
const BAND = 0.15; // opacity

const AS_SVG = {
  area: (s) => `<polygon points="${joined(s.points)}" fill="${s.fill}" fill-opacity="${BAND}"/>`,
  rect: (s) => `<rect x="${at(s.x)}" y="${at(s.y)}" width="${at(s.width)}" height="${at(s.height)}" fill="${s.fill}"/>`,
  dot: (s) => `<circle cx="${at(s.x)}" cy="${at(s.y)}" r="3" fill="${s.fill}"/>`,
  line: (s) =>
    `<polyline points="${joined(s.points)}" fill="none" stroke="${s.stroke}" stroke-width="${s.width}" ` +
    `stroke-opacity="${s.alpha ?? 1}" stroke-dasharray="${(s.dash ?? []).join(" ")}" stroke-linejoin="round"/>`,
  text: (s) =>
    `<text x="${at(s.x)}" y="${at(s.y)}" font-size="${s.size}" font-weight="${s.weight ?? "normal"}" ` +
    `text-anchor="${s.anchor}" fill="${s.fill}"${s.turned ? ` transform="rotate(-90 ${at(s.x)} ${at(s.y)})"` : ""}>` +
    `${escaped(s.text)}</text>`,
};

export function svg(chart) {
  const { shapes, box } = shapesOf(chart);
  const [w, h] = [at(box.right - box.left + 6), at(box.bottom - box.top + 6)];
  const parts = shapes.map((s) => (s.clip ? `<g clip-path="url(#plot)">${AS_SVG[s.kind](s)}</g>` : AS_SVG[s.kind](s)));
  const text =
    `<svg xmlns="http://www.w3.org/2000/svg" width="${WIDTH}" height="${HEIGHT}" viewBox="0 0 ${WIDTH} ${HEIGHT}" ` +
    `font-family="${FONT}"><clipPath id="plot"><rect x="${at(box.left - 3)}" y="${at(box.top - 3)}" width="${w}" ` +
    `height="${h}"/></clipPath>\n${parts.join("\n")}\n</svg>\n`;
  return new Blob([text], { type: "image/svg+xml" });
}

const ON_CANVAS = {
  area(c, s) {
    Object.assign(c, { fillStyle: s.fill, globalAlpha: BAND });
    c.beginPath();
    s.points.forEach(([x, y]) => c.lineTo(x, y));
    c.fill();
  },
  rect(c, s) {
    c.fillStyle = s.fill;
    c.fillRect(s.x, s.y, s.width, s.height);
  },
  dot(c, s) {
    c.fillStyle = s.fill;
    c.beginPath();
    c.arc(s.x, s.y, 3, 0, 2 * Math.PI);
    c.fill();
  },
  line(c, s) {
    Object.assign(c, { strokeStyle: s.stroke, lineWidth: s.width, globalAlpha: s.alpha ?? 1, lineJoin: "round" });
    c.setLineDash(s.dash ?? []);
    c.beginPath();
    s.points.forEach(([x, y]) => c.lineTo(x, y));
    c.stroke();
  },
  text(c, s) {
    c.translate(s.x, s.y);
    if (s.turned) c.rotate(-Math.PI / 2);
    Object.assign(c, { fillStyle: s.fill, font: `${s.weight ?? "normal"} ${s.size}px ${FONT}` });
    c.textAlign = { start: "left", middle: "center", end: "right" }[s.anchor];
    c.fillText(s.text, 0, 0);
  },
};

export function png(chart) {
  const { shapes, box } = shapesOf(chart);
  const canvas = Object.assign(document.createElement("canvas"), { width: PIXELS * WIDTH, height: PIXELS * HEIGHT });
  const c = canvas.getContext("2d");
  c.scale(PIXELS, PIXELS);
  for (const shape of shapes) {
    c.save();
    if (shape.clip) {
      c.beginPath();
      c.rect(box.left - 3, box.top - 3, box.right - box.left + 6, box.bottom - box.top + 6);
      c.clip();
    }
    ON_CANVAS[shape.kind](c, shape);
    c.restore();
  }
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}
