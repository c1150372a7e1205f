// Builds elements. Text is always inserted as text, and invisible characters are made visible.

// Control characters, characters that change the text direction, and zero-width characters.
const INVISIBLE =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff]|[\u{e0000}-\u{e0fff}]|[\ud800-\udfff]/gu;

function standIn(character) {
  const code = character.codePointAt(0);
  return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
}

export const visible = (text) => String(text).replace(INVISIBLE, standIn);

/** An element: h("p", {class: "x", onclick: f}, "text", otherElement, …). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "vars") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, name === "value" ? value : visible(value === true ? "" : value));
  }
  fill(element, children);
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren(
    ...children
      .flat(Infinity)
      .filter((c) => c !== null && c !== undefined && c !== false)
      .map((c) => (c instanceof Node ? c : document.createTextNode(visible(c)))),
  );
  return element;
}

/** Reorders children, without touching those that are already in place. */
export function arrange(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  let place = parent.firstElementChild;
  for (const child of children) {
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
}

/** Text from a model or a data file, isolated in its own element and text direction. */
export const foreign = (text, tag = "span", cls = "") => h(tag, { class: `foreign ${cls}`, dir: "auto" }, text ?? "");

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const fixed = (value, digits = 2) => (isNumber(value) ? value.toFixed(digits).replace("-", "−") : "–");
export const signed = (value, digits = 2) => (isNumber(value) ? (value < 0 ? "" : "+") + fixed(value, digits) : "–");
export const percent = (value, digits = 1) => (isNumber(value) ? `${(100 * value).toFixed(digits)} %` : "–");

/** "1 token", "2 tokens". */
export const counted = (number, name) => `${(number ?? 0).toLocaleString("en")} ${name}${number === 1 ? "" : "s"}`;

export function count(value) {
  if (!isNumber(value)) return "–";
  for (const unit of ["", " k", " M", " G"]) {
    if (Math.abs(value) < 999.5) return (unit && Math.abs(value) < 99.95 ? value.toFixed(1) : value.toFixed(0)) + unit;
    value /= 1000;
  }
  return `${value.toFixed(1)} T`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} m ${String(s % 60).padStart(2, "0")} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} m`;
  return `${Math.floor(s / 86400)} d ${String(Math.floor((s % 86400) / 3600)).padStart(2, "0")} h`;
}

/** Formats a number of any size for an axis or a legend. */
export function short(value) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  const text =
    size === 0
      ? "0"
      : size >= 1e4
        ? count(value)
        : size < 1e-3
          ? value.toExponential(1)
          : String(Number(value.toPrecision(3)));
  return text.replace(/^-/, "−");
}

/** Formats a tick of an axis, with all its digits: rounded, neighbours would read the same. */
export function exact(value) {
  const size = Math.abs(value);
  const power = size < 1e4 ? 0 : Math.min(4, Math.floor(Math.log10(size) / 3));
  const number = Number((value / 1000 ** power).toPrecision(12));
  const text = size > 0 && size < 1e-3 ? number.toExponential() : String(number);
  return (text + ["", " k", " M", " G", " T"][power]).replace(/^-/, "−");
}

/** Calls at most once per interval in milliseconds, and once more at the end. */
export function throttle(call, wait) {
  let last = 0,
    timer = null;
  return () => {
    if (timer !== null) return;
    timer = setTimeout(
      () => {
        timer = null;
        last = Date.now();
        call();
      },
      Math.max(0, last + wait - Date.now()),
    );
  };
}
