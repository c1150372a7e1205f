// Long names: the middle is cut, since names of one family differ at the end; the tooltip has the whole.
import { fill, h } from "./dom.js";

const narrow = matchMedia("(max-width: 800px)");

/** A name that shrinks to the width that there is. Its text is the whole name. */
export function long(name, cls = "") {
  const characters = [...String(name)];
  const end = narrow.matches ? 12 : 18;
  const cut = characters.length > 2 * end ? characters.length - end : characters.length;
  return h(
    "span",
    { class: `foreign long ${cls}`, dir: "auto", title: name },
    h("span", { class: "head" }, characters.slice(0, cut).join("")),
    cut < characters.length ? h("span", { class: "tail" }, characters.slice(cut).join("")) : null,
  );
}

/** The runs to choose from, and the chosen one, which an address may name without its being among them. */
export function offerRuns(select, rows, chosen) {
  const names = [...new Set([...rows.map((row) => row.name), chosen])];
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  fill(
    select,
    names.map((name) => h("option", { value: name, selected: name === chosen }, name)),
  );
}
