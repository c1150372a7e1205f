// Search: marks every occurrence in the open samples, steps through them, and lists the samples that have any.
import { counted, fill, foreign, h, visible } from "./dom.js";
import { outcomeName } from "./outcomes.js";
import { get } from "./store.js";

const MOST_MARKS = 3000;

/** Matches the words as plain text in upper or lower case; null if there are none. */
export const pattern = (words) =>
  words.trim() ? new RegExp(visible(words).replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&"), "giu") : null;

export const occurs = (text, words) => pattern(words)?.test(visible(text ?? "")) ?? false;

/** The text with its occurrences marked. */
export function marked(text, words, tag = "span", cls = "") {
  const box = foreign(text, tag, cls);
  markIn(box, pattern(words), Infinity);
  return box;
}

/** Marks the occurrences in an element, also across those inside it; returns a list of marks for each. */
function markIn(element, wanted, most) {
  if (!wanted) return [];
  const nodes = [];
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  let text = "";
  while (walker.nextNode()) {
    nodes.push([walker.currentNode, text.length]);
    text += walker.currentNode.data;
  }
  const found = [];
  for (const match of text.matchAll(wanted)) {
    if (found.length >= most) break;
    found.push([match.index, match.index + match[0].length, []]);
  }
  let last = found.length - 1;
  // From the end, so that the offsets before stay right.
  for (const [node, start] of nodes.reverse()) {
    const end = start + node.data.length;
    while (last >= 0 && found[last][0] >= end) last--;
    for (let i = last; i >= 0 && found[i][1] > start; i--) {
      const [from, to, marks] = found[i];
      if (start === end) break;
      const part = node.splitText(Math.max(0, from - start));
      part.splitText(Math.min(end, to) - Math.max(start, from));
      const mark = h("mark");
      part.replaceWith(mark);
      mark.append(part);
      marks.unshift(mark);
    }
  }
  return found.map(([, , marks]) => marks);
}

function unmark(element) {
  for (const mark of element.querySelectorAll("mark")) {
    const parent = mark.parentNode;
    mark.replaceWith(...mark.childNodes);
    parent.normalize();
  }
}

/** The occurrences in `root`, in the elements with `data-find`: how many, which is current, next and previous. */
export class Occurrences {
  constructor(root) {
    this.root = root;
    this.found = [];
    this.at = -1;
    const turn = (by, label, sign) =>
      h("button", { type: "button", class: "quiet", "aria-label": label, onclick: () => this.go(by) }, sign);
    this.shown = h("span", { class: "hint", role: "status" });
    this.element = h(
      "span",
      { class: "occurrences", hidden: true },
      turn(-1, "Previous occurrence", "‹"),
      this.shown,
      turn(1, "Next occurrence", "›"),
    );
  }

  mark(words) {
    const places = [...this.root.querySelectorAll("[data-find]")];
    places.forEach(unmark);
    const wanted = pattern(words);
    this.found = [];
    for (const element of places.filter((place) => place.offsetParent))
      this.found.push(...markIn(element, wanted, MOST_MARKS - this.found.length));
    this.at = -1;
    this.element.hidden = !wanted;
    this.say();
  }

  go(by) {
    if (!this.found.length) return;
    this.found[this.at]?.forEach((mark) => mark.classList.remove("current"));
    const start = this.at < 0 && by < 0 ? 0 : this.at;
    this.at = (start + by + this.found.length) % this.found.length;
    this.found[this.at].forEach((mark) => mark.classList.add("current"));
    this.found[this.at][0].scrollIntoView({ block: "center" });
    this.say();
  }

  say() {
    const most = this.found.length >= MOST_MARKS ? "the first " : "";
    const total = this.found.length;
    const all = `${most}${total} ${total === 1 ? "match" : "matches"}`;
    fill(this.shown, this.at < 0 ? all : `${this.at + 1} of ${most}${total}`);
  }
}

/** The samples with an occurrence, from the server. `where()` gives {run, q, step}: all steps without a step. */
export class Hits {
  constructor({ where, open }) {
    Object.assign(this, { where, open });
    this.turn = 0;
    this.found = [];
    this.element = h("div", { class: "found" });
  }

  /** Searches from step `until` on, where the last search stopped. */
  async look(until = null) {
    const mine = ++this.turn;
    const wanted = this.where();
    this.found = [];
    if (!wanted.q.trim()) {
      fill(this.element);
      return;
    }
    const answer = await get("search", { ...wanted, until }).catch((error) => ({ error }));
    if (mine !== this.turn) return;
    this.found = answer.hits ?? [];
    fill(this.element, answer.error ? h("p", { class: "empty" }, answer.error.message) : this.view(answer, wanted));
  }

  view(answer, { q, step }) {
    const first = answer.cut ? "the first " : "";
    return h(
      "div",
      { class: "card hits" },
      h(
        "p",
        { class: "hint" },
        `${first}${counted(answer.hits.length, "hit")}${step === null ? "" : ` at step ${step}`}`,
        answer.left
          ? [
              `; ${counted(answer.left, "earlier step")} not searched yet `,
              h("button", { type: "button", class: "quiet", onclick: () => this.look(answer.next) }, "search on"),
            ]
          : "",
      ),
      answer.hits.map((hit) => this.line(hit, q)),
    );
  }

  line(hit, words) {
    const facts = [
      `step ${hit.step}`,
      `sample ${hit.sample}`,
      hit.correct ? "right" : "not right",
      outcomeName(hit.fate),
      `${hit.count}× in the ${hit.where}`,
    ];
    return h(
      "button",
      { type: "button", class: "hit", onclick: () => this.open(hit) },
      h("small", {}, facts.join(" · ")),
      marked(hit.text, words, "span", "excerpt"),
    );
  }
}
