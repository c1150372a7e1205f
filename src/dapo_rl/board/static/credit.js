// A critic over the tokens of a sample: the value before each token as a line, its advantage as a bar.
import { counted, fill, h, isNumber, signed } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 100;
const MOST_BARS = 1000;

/** The chart of a sample whose tokens have values, otherwise null. `text` is the element with its tokens. */
export function creditChart(sample, text) {
  const shown = [...(sample.value ?? []), ...(sample.advantages ?? [])].filter(isNumber);
  if (!shown.length) return null;
  const high = shown.reduce((a, b) => Math.max(a, b), 0);
  const low = shown.reduce((a, b) => Math.min(a, b), 0);
  const toY = (v) => HEIGHT * (high > low ? (high - v) / (high - low) : 0.5);
  const starts = [0];
  for (const [, count] of sample.pieces) starts.push(starts.at(-1) + count);
  const tokens = starts.at(-1);
  const reading = h("span", { class: "reading" });
  const cursor = h("i", { class: "cursor", hidden: true });
  const area = h("div", { class: "area" }, drawing(sample, starts, toY), cursor);
  const labels = [high, 0, low].filter((v, i) => i !== 1 || (toY(0) > 18 && toY(0) < HEIGHT - 18));

  function point(i) {
    text.querySelector(".tok.pointed")?.classList.remove("pointed");
    cursor.hidden = i === null;
    fill(reading, i === null ? overview(sample) : ofToken(sample, starts, i));
    if (i === null) return;
    cursor.style.left = `${(100 * starts[i]) / tokens}%`;
    cursor.style.width = `${(100 * (starts[i + 1] - starts[i])) / tokens}%`;
    pieceAt(text, i)?.classList.add("pointed");
  }

  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const at = (tokens * (event.clientX - box.left)) / box.width;
    const next = starts.findIndex((start) => start > at);
    point(Math.max(0, (next < 0 ? starts.length - 1 : next) - 1));
    reveal(text, text.querySelector(".tok.pointed"));
  });
  text.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".tok");
    point(token ? placeOf(token) : null);
  });
  for (const element of [area, text]) element.addEventListener("pointerleave", () => point(null));
  point(null);
  return h(
    "figure",
    { class: "credit" },
    h(
      "figcaption",
      {},
      h(
        "span",
        { class: "swatch", title: "the reward that the critic expects before each token" },
        h("i", { class: "line-key" }),
        "value",
      ),
      h("span", { class: "swatch", title: "of each token" }, h("i", { class: "bar-key" }), "advantage"),
      reading,
    ),
    h(
      "div",
      { class: "axes" },
      labels.map((v) => h("small", { vars: { "--y": `${toY(v)}%` } }, v ? signed(v) : "0")),
      area,
    ),
  );
}

/** The place of a piece in the sample; those of a turn are in an element that says where it begins. */
const placeOf = (token) => Number(token.parentElement.dataset.first) + [...token.parentElement.children].indexOf(token);

function pieceAt(text, i) {
  const box = [...text.querySelectorAll("[data-first]")].findLast((each) => Number(each.dataset.first) <= i);
  return box?.children[i - Number(box.dataset.first)];
}

/** Scrolls the text, not the page, to a token. */
function reveal(text, token) {
  if (!token) return;
  const [outer, inner] = [text.getBoundingClientRect(), token.getBoundingClientRect()];
  if (inner.top < outer.top || inner.bottom > outer.bottom) text.scrollTop += inner.top - outer.top - outer.height / 2;
}

function overview(sample) {
  const values = (sample.value ?? []).filter(isNumber);
  return values.length ? `value ${signed(values[0])} at the first token, ${signed(values.at(-1))} at the last` : "";
}

function ofToken(sample, starts, i) {
  const [piece, count] = sample.pieces[i];
  return [
    `${count > 1 ? counted(count, "token") : `token ${starts[i] + 1}`} `,
    h("bdi", { class: "piece" }, piece),
    ` value ${signed(sample.value?.[i])} · advantage ${signed(sample.advantages?.[i])}`,
  ];
}

function drawing(sample, starts, toY) {
  const tokens = starts.at(-1);
  const svg = element("svg", { viewBox: `0 0 ${tokens} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  svg.setAttribute("aria-label", `Value and advantage over ${counted(tokens, "token")}: ${overview(sample)}`);
  const stretches = thinned(sample, starts);
  const bars = (cls, has) =>
    element("path", {
      class: cls,
      d: stretches
        .filter(({ advantage }) => isNumber(advantage) && has(advantage))
        .map(({ from, to, advantage }) => `M${from} ${toY(0)}V${toY(advantage)}H${to}V${toY(0)}Z`)
        .join(""),
    });
  let open = false; // a gap in the values is a gap in the line
  const steps = stretches.map(({ from, to, value }) => {
    const part = isNumber(value) ? `${open ? "L" : "M"}${from} ${toY(value)}H${to}` : "";
    open = part !== "";
    return part;
  });
  svg.append(
    bars("good", (v) => v > 0),
    bars("bad", (v) => v < 0),
    element("path", { class: "zero", d: `M0 ${toY(0)}H${tokens}` }),
    element("path", { class: "value", d: steps.join("") }),
  );
  return svg;
}

/** What is drawn of a long sample: of some tokens in a row, the first value and the largest advantage. */
function thinned(sample, starts) {
  const size = Math.ceil(sample.pieces.length / MOST_BARS);
  const larger = (a, b) => (isNumber(b) && Math.abs(b) > Math.abs(a ?? 0) ? b : a);
  const result = [];
  for (let i = 0; i < sample.pieces.length; i += size) {
    const end = Math.min(i + size, sample.pieces.length);
    const advantage = (sample.advantages ?? []).slice(i, end).reduce(larger, null);
    const value = sample.value?.slice(i, end).find(isNumber);
    result.push({ from: starts[i], to: starts[end], value, advantage });
  }
  return result;
}

function element(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
