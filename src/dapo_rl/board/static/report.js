// What the pages of ablations and evaluations share.
import { h } from "./dom.js";

export const back = () =>
  h("a", { href: "#/runs", class: "quiet up-link", "aria-label": "Back to the list" }, "← list");

/** The picture that the command wrote; the version asks for it again when there is a new one. */
export function picture(name, kind, version) {
  const query = new URLSearchParams({ name, version });
  const source = `/api/picture?${query}`;
  return h(
    "figure",
    { class: "card picture" },
    h(
      "a",
      { href: source, target: "_blank", rel: "noopener" },
      h("img", { src: source, alt: `the picture of the ${kind}`, loading: "lazy" }),
    ),
    h("figcaption", { class: "hint" }, `${kind}.png`),
  );
}

export const refused = (error) => [h("div", { class: "bar" }, back()), h("p", { class: "empty card" }, error.message)];
