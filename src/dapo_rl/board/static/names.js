// Long names: the middle is cut, since names of one family differ at the end; the tooltip has the whole.
import { h } from "./dom.js";

const END = 12;

/** A name that shrinks to the width that there is. Its text is the whole name. */
export function long(name, cls = "") {
  const characters = [...String(name)];
  const cut = characters.length > 2 * END ? characters.length - END : characters.length;
  return h(
    "span",
    { class: `foreign long ${cls}`, dir: "auto", title: name },
    h("span", { class: "head" }, characters.slice(0, cut).join("")),
    cut < characters.length ? h("span", { class: "tail" }, characters.slice(cut).join("")) : null,
  );
}
