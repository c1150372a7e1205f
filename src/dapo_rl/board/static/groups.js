// Groups: the steps of a run, the groups or samples of a step, full-text search, and two samples side by side.
import { Comparison, fromText, toText } from "./compare.js";
import { fill, h, throttle } from "./dom.js";
import { bind, showKeys } from "./keys.js";
import { outcomeChips, groupLine, SampleList } from "./lists.js";
import { offerRuns } from "./names.js";
import { groupView } from "./samples.js";
import { Hits, Occurrences } from "./search.js";
import { Steps } from "./steps.js";
import { get, onChange, remember, store } from "./store.js";

const memory = {
  run: null,
  step: null,
  follow: true, // the newest step, until another is chosen
  draw: null,
  sample: null,
  list: "groups",
  outcomes: new Set(),
  words: "",
  everywhere: false,
  picks: [],
  comparing: false,
  filter: {
    sort: "draw",
    down: false,
    verdicts: new Set(),
    min_reward: "",
    max_reward: "",
    min_length: "",
    max_length: "",
    min_turns: "",
    max_turns: "",
    tools: new Set(),
    errors: new Set(),
  },
};
const isPhone = () => matchMedia("(max-width: 800px)").matches;

const able = () =>
  [...store.runs.values()].filter((row) => row.rollouts).sort((a, b) => (b.started ?? 0) - (a.started ?? 0));

function arrive(parameters) {
  const { run: before, step } = memory;
  memory.run = parameters.get("run") ?? (store.runs.get(memory.run)?.rollouts ? memory.run : able()[0]?.name);
  if (memory.run !== before) memory.picks = [];
  for (const key of ["step", "draw", "sample"])
    if (parameters.has(key)) memory[key] = Number(parameters.get(key));
  if (memory.step !== step) memory.follow = false;
  if (["groups", "samples"].includes(parameters.get("list"))) memory.list = parameters.get("list");
  const pair = [fromText(parameters.get("a")), fromText(parameters.get("b"))];
  memory.comparing = pair.every(Boolean);
  if (memory.comparing) memory.picks = pair;
}

export function groups(parameters, onClose) {
  arrive(parameters);
  if (!memory.run) {
    onClose(onChange(() => able().length && window.dispatchEvent(new Event("hashchange")))); // shows this view again
    return h("p", { class: "empty" }, "No run has recorded its groups yet (", h("code", {}, "log.rollouts"), ").");
  }

  const steps = new Steps();
  let listed = [];
  let shownGroup = null; // the group in the detail: {step, draw, group}
  let written; // of the list: another text when a resumed run has written its step again
  const list = h("div", { class: "list", role: "list" });
  const detail = h("div", { class: "detail" });
  const chips = h("div", { class: "chips" });
  const panes = h("div", { class: "panes" }, list, detail);
  const markAll = () => occurrences.mark(memory.words);
  const comparison = new Comparison(memory, {
    painted: () => queueMicrotask(markAll),
    changed: () => {
      for (const element of [panes, hits.element, lists]) element.hidden = memory.comparing;
      samples.controls.hidden = memory.comparing || !isSamples();
      markAll();
      note();
    },
  });
  const occurrences = new Occurrences(h("div", {}, panes, comparison.element));
  const hits = new Hits({
    // The list of samples shows those of this step.
    where: () => ({
      run: memory.run,
      q: isSamples() && !memory.everywhere ? "" : memory.words,
      step: memory.everywhere ? null : memory.step,
    }),
    open: openHit,
  });
  const samples = new SampleList(memory.filter, {
    where: () => ({ run: memory.run, step: memory.step, words: memory.words, outcomes: memory.outcomes }),
    open: (row) => {
      memory.follow = false;
      openGroup(row.draw, row.sample);
    },
    drawn: (answer) => {
      ({ written } = answer);
      drawChips(answer.outcomes ?? {});
      const [first] = samples.rows;
      if (memory.draw === null && !isPhone() && first) openGroup(first.draw, first.sample);
    },
  });
  const isSamples = () => memory.list === "samples";

  const select = h("select", {
    "aria-label": "Run",
    onchange: () => {
      memory.run = select.value;
      memory.step = memory.draw = memory.sample = null;
      memory.follow = true;
      comparison.clear();
      open();
    },
  });
  offerRuns(select, able(), memory.run);
  const slider = h("input", {
    type: "range",
    min: "0",
    step: "1",
    "aria-label": "Step",
    oninput: () => {
      memory.follow = false;
      jump(steps.at(Number(slider.value)));
    },
  });
  const number = h("input", {
    type: "number",
    class: "step",
    "aria-label": "Step number",
    onchange: () => {
      memory.follow = false;
      jump(steps.nearest(Number(number.value)));
    },
  });
  const words = h("input", {
    type: "search",
    placeholder: "search prompts, responses, answers…",
    "aria-label": "Search",
    value: memory.words,
    oninput: () => {
      memory.words = words.value;
      searching();
    },
    onkeydown: (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      if (occurrences.found.length) occurrences.go(event.shiftKey ? -1 : 1);
      else if (isSamples()) samples.go(1);
      else if (hits.found.length) openHit(hits.found[0]);
    },
  });
  const wide = h("input", {
    type: "checkbox",
    checked: memory.everywhere,
    onchange: () => {
      memory.everywhere = wide.checked;
      hits.look();
    },
  });
  const modes = h("div", { class: "modes", role: "group", "aria-label": "List" });
  const lists = h("div", { class: "bar lists" }, modes, chips);

  async function readSteps() {
    const { run, step } = memory;
    const found = await get("steps", { run, step }).catch(() => ({ ranges: [], written: null }));
    steps.ranges = found.ranges;
    slider.max = String(Math.max(0, steps.size - 1));
    return found.written;
  }

  async function open() {
    await readSteps();
    const step = memory.step === null || memory.follow ? (steps.last ?? 0) : steps.nearest(memory.step);
    if (memory.step !== null && step !== memory.step) jump(step); // the next one has come since
    else jump(step, memory.draw, memory.sample);
  }

  let turn = 0;
  async function jump(step, draw = null, sample = null) {
    if (!panes.isConnected) return; // another view is shown by now
    const mine = ++turn;
    Object.assign(memory, { step, draw, sample });
    shownGroup = null;
    slider.value = String(steps.indexOf(step));
    number.value = String(step);
    listed = [];
    if (isSamples()) {
      drawList();
      draw === null ? closeGroup() : openGroup(draw, sample);
      samples.load();
      return;
    }
    const answer = await get("groups", { run: memory.run, step }).catch((error) => ({ groups: [], error }));
    if (mine !== turn) return;
    ({ groups: listed, written } = answer);
    if (!listed.some((group) => group.draw === memory.draw)) memory.draw = memory.sample = null;
    drawChips(groupCounts());
    drawList();
    const why = answer.error?.message ?? answer.why;
    if (why) fill(list, h("p", { class: "empty" }, why));
    if (memory.draw !== null) openGroup(memory.draw, memory.sample);
    else if (!isPhone() && listed.length) openGroup(shown()[0]?.draw ?? listed[0].draw);
    else closeGroup();
    note();
  }

  function note() {
    const { run, step, draw, sample, picks } = memory;
    const [a, b] = memory.comparing ? picks.map(toText) : [null, null];
    remember("groups", { run, step, draw, sample, list: isSamples() ? "samples" : null, a, b });
  }
  const shown = () => listed.filter((group) => !memory.outcomes.size || memory.outcomes.has(group.fate));
  function groupCounts() {
    const counts = {};
    for (const group of listed) counts[group.fate] = (counts[group.fate] ?? 0) + 1;
    return counts;
  }

  function drawChips(counts) {
    fill(
      chips,
      outcomeChips(counts, memory.outcomes, () => {
        drawChips(counts);
        isSamples() ? samples.load() : drawList();
      }),
    );
  }

  function drawList() {
    fill(
      modes,
      ["groups", "samples"].map((mode) =>
        h(
          "button",
          { type: "button", "aria-pressed": String(memory.list === mode), onclick: () => switchTo(mode) },
          mode,
        ),
      ),
    );
    samples.controls.hidden = memory.comparing || !isSamples();
    panes.firstElementChild.replaceWith(isSamples() ? samples.list : list);
    if (isSamples()) return;
    const { step } = memory;
    fill(
      list,
      // While the groups of another step are on their way, those of this one are still there to be chosen.
      shown().map((group) =>
        groupLine(group, group.draw === memory.draw, () => openHit({ step, draw: group.draw, sample: null })),
      ),
    );
    if (!shown().length) fill(list, h("p", { class: "empty" }, "No groups at this step."));
  }

  function switchTo(mode) {
    memory.list = mode;
    jump(memory.step, memory.draw, memory.sample);
    hits.look();
  }

  /** Opens a group that somebody chose: a run that goes on does not take it away. */
  function choose(draw, sample = null) {
    memory.follow = false;
    return openGroup(draw, sample);
  }

  let wanted = 0;
  async function openGroup(draw, sample = null, { scroll = true } = {}) {
    if (!panes.isConnected) return;
    const mine = ++wanted;
    Object.assign(memory, { draw, sample });
    note();
    for (const element of list.querySelectorAll(".group"))
      element.setAttribute("aria-current", String(element.dataset.draw === String(draw)));
    samples.point(sample === null ? null : { draw, sample });
    if (shownGroup?.draw !== draw || shownGroup.step !== memory.step || shownGroup.run !== memory.run) {
      const { run, step } = memory;
      const group = await get("group", { run, step, draw }).catch((error) => ({ error }));
      if (mine !== wanted) return;
      if (group.error) fill(detail, h("p", { class: "empty" }, group.error.message));
      else showGroup(group);
      shownGroup = group.error ? null : { run, step, draw, group };
    }
    detail.classList.add("open");
    if (isPhone() && sample === null) detail.scrollIntoView({ block: "start" });
    pointAt(sample, scroll);
  }

  function showGroup(group) {
    const view = groupView(group, {
      close: closeGroup,
      back: isSamples() ? "‹ all samples" : "‹ all groups",
      words: () => memory.words,
      actions: (sample) => comparison.button({ step: memory.step, draw: group.draw, sample: sample.sample }),
      after: () => queueMicrotask(markAll),
    });
    fill(detail, view.element);
    repaint = () => view.painting.paint();
  }
  let repaint = markAll; // draws the open texts again, with their marks

  /** Outlines the current sample. */
  function pointAt(sample, scroll) {
    for (const element of detail.querySelectorAll("[data-sample]")) {
      const here = sample !== null && element.dataset.sample === String(sample);
      element.toggleAttribute("aria-current", here);
      if (here && scroll) element.scrollIntoView({ block: "nearest" });
    }
  }

  function closeGroup() {
    memory.draw = memory.sample = null;
    wanted++;
    shownGroup = null;
    detail.classList.remove("open");
    fill(detail, h("p", { class: "empty" }, "Choose a group."));
    repaint = markAll;
    markAll();
    samples.point(null);
    note();
  }

  function openHit({ step, draw, sample }) {
    memory.follow = false;
    return step === memory.step ? openGroup(draw, sample) : jump(step, draw, sample);
  }

  const searching = throttle(() => {
    repaint();
    comparison.paint();
    if (isSamples()) samples.load();
    hits.look();
  }, 300);

  const moved = throttle(async () => {
    const { run, step } = memory;
    const now = await readSteps();
    if (memory.run !== run || memory.step !== step) return; // another step was chosen since
    if (memory.follow && (steps.last ?? 0) !== step) jump(steps.last ?? 0);
    // Between a step that is removed and the same one written again, the old one stays on the page.
    else if (now && [written, shownGroup?.group.written ?? now].some((known) => known !== now))
      jump(step, memory.draw, memory.sample);
    else slider.value = String(steps.indexOf(step));
  }, 1500);

  const go = (by) => {
    memory.follow = false;
    comparison.close();
    jump(steps.beside(memory.step, by));
  };

  /** The next or previous sample: of the list of samples, or of the group and then of the next group. */
  function move(by) {
    if (memory.comparing) return;
    if (isSamples()) {
      samples.go(by);
      return;
    }
    const numbers = shownGroup?.group?.samples.map((sample) => sample.sample) ?? [];
    const here = numbers.indexOf(memory.sample);
    const there = here < 0 ? (by > 0 ? 0 : -1) : here + by;
    if (numbers[there] !== undefined) {
      choose(memory.draw, numbers[there]);
      return;
    }
    const draws = shown().map((group) => group.draw);
    const next = shown()[draws.indexOf(memory.draw) + by];
    if (next) choose(next.draw, by > 0 ? 0 : next.samples.length - 1);
  }

  function compareKey() {
    if (memory.comparing) return;
    if (memory.sample === null) move(1);
    else comparison.toggle({ step: memory.step, draw: memory.draw, sample: memory.sample });
    if (memory.picks.length === 2) comparison.open();
  }

  onClose(
    bind([
      [["j", "ArrowRight"], "next sample", () => move(1)],
      [["k", "ArrowLeft"], "previous sample", () => move(-1)],
      [["]"], "next step", () => go(1)],
      [["["], "previous step", () => go(-1)],
      [["n"], "next match of the search", () => occurrences.go(1)],
      [["N"], "previous match", () => occurrences.go(-1)],
      [["l"], "list groups or samples", () => switchTo(isSamples() ? "groups" : "samples")],
      [["s"], "sort samples by the next column", () => (isSamples() ? samples.nextSort() : switchTo("samples"))],
      [["S"], "reverse the order", () => isSamples() && samples.reverse()],
      [["c"], "pick the sample; the second opens both side by side", compareKey],
      [["Escape"], "close", () => (memory.comparing ? comparison.close() : closeGroup())],
    ]),
  );
  onClose(
    onChange((changed) => {
      offerRuns(select, able(), memory.run);
      if (changed.has(memory.run)) moved();
    }),
  );
  onClose(() => {
    turn++;
    wanted++;
    for (const part of [comparison, hits, samples]) part.turn++;
  });
  open().then(() => hits.look());
  if (memory.comparing) comparison.open();

  return [
    h(
      "div",
      { class: "bar" },
      select,
      h(
        "span",
        { class: "stepper" },
        h("button", { type: "button", class: "quiet", "aria-label": "Previous step", onclick: () => go(-1) }, "‹"),
        slider,
        h("button", { type: "button", class: "quiet", "aria-label": "Next step", onclick: () => go(1) }, "›"),
        h("label", {}, "step ", number),
      ),
      h("span", { class: "grow" }),
      words,
      occurrences.element,
      h("label", {}, wide, " all steps"),
      h("button", { type: "button", class: "quiet", "aria-label": "Show the keys", onclick: showKeys }, "?"),
    ),
    lists,
    samples.controls,
    hits.element,
    occurrences.root,
    comparison.tray,
  ];
}
