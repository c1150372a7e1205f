// What the pages of ablations and evaluations share.
import { h } from "./dom.js";

export const back = () =>
  h("a", { href: "#/runs", class: "quiet up-link", "aria-label": "Back to the list" }, "← list");

/** The picture that the command wrote. `shown` is the last one: another version is fetched, the same one is kept. */
export function picture(name, kind, version, shown) {
  if (version === null) return null;
  if (shown?.dataset.version === version) return shown;
  const query = new URLSearchParams({ name, version });
  const source = `/api/picture?${query}`;
  return h(
    "figure",
    { class: "card picture", data: { version } },
    h(
      "a",
      { href: source, target: "_blank", rel: "noopener" },
      h("img", { src: source, alt: `the picture of the ${kind}`, loading: "lazy" }),
    ),
    h("figcaption", { class: "hint" }, `${kind}.png`),
  );
}

export const refused = (error) => [h("div", { class: "bar" }, back()), h("p", { class: "empty card" }, error.message)];
