// The frame: the current view, live updates from the server, light or dark mode.
import { ablation } from "./ablation.js";
import { fill, h } from "./dom.js";
import { evaluation } from "./evaluation.js";
import { groups } from "./groups.js";
import { lab } from "./lab.js";
import { ledger } from "./ledger.js";
import { runs } from "./runs.js";
import { arrive, isDark, pick, route, store, tell } from "./store.js";

const VIEWS = { runs, groups, ledger, lab, ablation, evaluation };
const ABOVE = { ablation: "runs", evaluation: "runs" }; // pages that are reached from another view
const main = document.getElementById("view");
let close = () => {};

function show() {
  const { view, parameters } = arrive();
  close();
  const name = Object.hasOwn(VIEWS, view) && (view !== "lab" || store.hasLab) ? view : "runs";
  for (const link of document.querySelectorAll("nav a")) {
    link.toggleAttribute("aria-current", link.dataset.view === (ABOVE[name] ?? name));
    link.hidden = link.dataset.view === "lab" && !store.hasLab;
  }
  document.body.dataset.view = name;
  if (!store.loaded) return;
  const stops = [];
  close = () => stops.splice(0).forEach((stop) => stop());
  fill(
    main,
    VIEWS[name](parameters, (stop) => stops.push(stop)),
  );
  window.scrollTo(0, 0);
}

function listen() {
  const live = document.getElementById("live");
  const say = (state, text) => {
    live.dataset.state = state;
    fill(live, h("i"), h("span", {}, text));
  };
  say("waiting", "connecting");
  const source = new EventSource("/api/live");
  source.onopen = () => say("open", "live");
  source.onerror = () => say("lost", "connection lost");
  source.onmessage = (event) => {
    const message = JSON.parse(event.data);
    const isEmpty = !store.runs.size && !store.reports.length;
    const news = message.runs.length || message.reports?.length;
    const first = !store.loaded || (isEmpty && news && route().view !== "lab");
    if (message.whole) store.runs.clear();
    for (const row of message.runs) store.runs.set(row.name, row);
    for (const name of message.gone) store.runs.delete(name);
    if (message.reports) store.reports = message.reports;
    if (message.jobs) store.jobs = message.jobs;
    if (message.jobs !== undefined) store.hasLab = message.jobs !== null; // none: the board is read-only
    pick(store.picked);
    if (first) {
      store.loaded = true;
      const newest = [...store.runs.values()].sort((a, b) => (b.started ?? 0) - (a.started ?? 0));
      pick(
        newest
          .slice(0, 4)
          .map((row) => row.name)
          .reverse(),
      );
      show();
    } else {
      const reports = (message.reports ?? []).map((row) => `${row.kind} ${row.name}`);
      tell(new Set([...message.runs.map((row) => row.name), ...reports]));
    }
  };
}

function switchTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem("theme", root.dataset.theme);
    } catch {
      /* for this page only, then */
    }
    show();
  });
  dark.addEventListener("change", show);
}

window.addEventListener("hashchange", show);
switchTheme();
show();
listen();
