// Keys of the current view, and the overlay that lists them.
import { fill, h } from "./dom.js";

const NAMES = { ArrowRight: "→", ArrowLeft: "←", Escape: "Esc" };
const bound = new Set();
const list = h("dl");
const overlay = h(
  "dialog",
  { class: "card keys", "aria-label": "Keys" },
  h("div", { class: "line" }, h("h3", {}, "Keys"), h("span", { class: "grow" }), closeButton()),
  list,
);

function closeButton() {
  return h("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: () => overlay.close() }, "×");
}

/** Binds [[keys, what it does, action], …]; returns a function that undoes it. */
export function bind(entries) {
  entries.forEach((entry) => bound.add(entry));
  return () => entries.forEach((entry) => bound.delete(entry));
}

export function showKeys() {
  fill(
    list,
    [...bound].map(([keys, label]) => [
      h(
        "dt",
        {},
        keys.map((key) => h("kbd", {}, NAMES[key] ?? key)),
      ),
      h("dd", {}, label),
    ]),
  );
  if (!overlay.isConnected) document.body.append(overlay);
  if (!overlay.open) overlay.showModal();
}

/** Whether an element uses the keys itself. */
const isField = (element) =>
  element.isContentEditable ||
  element.matches("select, textarea, input:not([type='checkbox'], [type='radio'], [type='button'])");

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (overlay.open) {
    if (event.key === "?") overlay.close(); // Esc closes any dialog
    return;
  }
  if (event.target instanceof Element && isField(event.target)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const entry = [...bound].reverse().find(([keys]) => keys.includes(event.key));
  if (!entry) return;
  event.preventDefault();
  entry[2]();
});

bind([
  [["?"], "show these keys", showKeys],
  [
    ["/"],
    "search or filter",
    () => [...document.querySelectorAll("main input[type='search']")].find((e) => e.offsetParent)?.focus(),
  ],
]);
