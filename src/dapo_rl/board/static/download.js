// Downloads: links to the server's files, and files made of what is on the page.
import { h } from "./dom.js";

/** The address of a route with its parameters; missing ones are left out. */
export function address(path, parameters) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters))
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== undefined && one !== null && one !== "") query.append(key, one);
  return `/api/${path}?${query}`;
}

export function save(name, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name.replace(/[^\w.-]+/g, "-") });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// A text that begins like this may be evaluated by a spreadsheet.
const FORMULA = /^\s*[=+\-@\t\r\n]/;

function cell(value) {
  if (typeof value !== "string") return String(value ?? "");
  const safe = FORMULA.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

const line = (row) => `${row.map(cell).join(",")}\r\n`;
export const csv = (rows) => new Blob(rows.map(line), { type: "text/csv" });

/** A menu of downloads: [[label, action or address], …]. */
export function saveMenu(label, entries) {
  const run = (action) => {
    menu.open = false;
    action();
  };
  const menu = h(
    "details",
    { class: "save", onfocusout: (event) => menu.contains(event.relatedTarget) || (menu.open = false) },
    h("summary", { "aria-label": label, title: label }, "⤓"),
    h(
      "div",
      { class: "card" },
      entries.map(([name, action]) =>
        typeof action === "string"
          ? h("a", { href: action, download: "" }, name)
          : h("button", { type: "button", onclick: () => run(action) }, name),
      ),
    ),
  );
  return menu;
}
