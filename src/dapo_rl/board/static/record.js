// What the selected runs wrote about themselves: why one failed, and notes.
import { fill, foreign, h, isNumber, throttle } from "./dom.js";
import { long } from "./names.js";
import { colour, get, store } from "./store.js";

const open = new Set(); // what the reader has unfolded, across redraws

function folded(key, summary, ...content) {
  return h(
    "details",
    {
      open: open.has(key),
      ontoggle: (event) => (event.target.open ? open.add(key) : open.delete(key)),
    },
    h("summary", {}, summary),
    ...content,
  );
}

function failure(name, error) {
  const where = isNumber(error.step) ? `failed at step ${error.step}` : "failed";
  return h(
    "article",
    { class: "card failure", role: "alert", data: { failure: name } },
    h("div", { class: "line" }, h("b", {}, long(name)), h("span", { class: "state failed" }, where), when(error.time)),
    h("p", {}, error.kind ? h("code", {}, error.kind) : null, " ", foreign(error.message ?? "no message")),
    error.traceback ? folded(`trace ${name}`, "traceback", foreign(error.traceback, "pre")) : null,
  );
}

function notes(name, lines) {
  return h(
    "article",
    { class: "card notes", data: { notes: name } },
    folded(
      `notes ${name}`,
      [
        h("span", { class: "key", vars: { "--c": colour(name) } }, long(name)),
        h("small", {}, `${lines.length} ${lines.length === 1 ? "note" : "notes"}`),
      ],
      h(
        "ol",
        {},
        lines.map((note) =>
          h("li", {}, h("small", {}, isNumber(note.step) ? `step ${note.step}` : "–"), foreign(note.text)),
        ),
      ),
    ),
  );
}

const when = (time) => {
  const date = new Date(isNumber(time) ? 1000 * time : (time ?? NaN));
  return Number.isNaN(date.getTime()) ? null : h("small", {}, date.toLocaleString());
};

export function record() {
  const element = h("section", { class: "record" });
  let turn = 0;
  async function show() {
    const mine = ++turn,
      names = store.picked;
    const answer = names.length ? await get("record", { run: names }).catch(() => ({})) : {};
    if (mine !== turn) return;
    const known = names.filter((name) => answer[name]);
    fill(
      element,
      known.filter((name) => answer[name].error).map((name) => failure(name, answer[name].error)),
      known.filter((name) => answer[name].notes.length).map((name) => notes(name, answer[name].notes)),
    );
  }
  const live = throttle(show, 2000);
  return {
    element,
    show,
    changed: (names) => {
      if (store.picked.some((name) => names.has(name))) live();
    },
  };
}
