// Groups: the steps of a run, the groups of a step, and full-text search.
import { fill, foreign, h, throttle } from "./dom.js";
import { byFate, fateClass, fateName, fateWhy } from "./fates.js";
import { groupView, mark } from "./samples.js";
import { get, onChange, remember, store } from "./store.js";

const memory = { run: null, step: null, draw: null, fates: new Set(), words: "", everywhere: false };

export function groups(parameters, onClose) {
  const able = [...store.runs.values()]
    .filter((row) => row.rollouts)
    .sort((a, b) => (b.started ?? 0) - (a.started ?? 0));
  memory.run = parameters.get("run") ?? (store.runs.get(memory.run)?.rollouts ? memory.run : able[0]?.name);
  if (parameters.has("step")) memory.step = Number(parameters.get("step"));
  if (parameters.has("draw")) memory.draw = Number(parameters.get("draw"));
  if (!memory.run)
    return h("p", { class: "empty" }, "No run has recorded its groups yet (", h("code", {}, "log.rollouts"), ").");

  let ranges = [],
    listed = [],
    follow = memory.step === null;
  const list = h("div", { class: "list", role: "list" }),
    detail = h("div", { class: "detail" });
  const chips = h("div", { class: "chips" }),
    found = h("div", { class: "found" });
  const select = h(
    "select",
    {
      "aria-label": "Run",
      onchange: () => {
        memory.run = select.value;
        memory.step = memory.draw = null;
        follow = true;
        open();
      },
    },
    able.map((row) => h("option", { value: row.name, selected: row.name === memory.run }, row.name)),
  );
  const slider = h("input", {
    type: "range",
    min: "0",
    step: "1",
    "aria-label": "Step",
    oninput: () => {
      follow = false;
      jump(at(Number(slider.value)));
    },
  });
  const number = h("input", {
    type: "number",
    class: "step",
    "aria-label": "Step number",
    onchange: () => {
      follow = false;
      jump(wanted(Number(number.value)));
    },
  });
  const words = h("input", {
    type: "search",
    placeholder: "search prompts and responses…",
    "aria-label": "Search",
    value: memory.words,
    oninput: () => {
      memory.words = words.value;
      searching();
    },
  });
  const wide = h("input", {
    type: "checkbox",
    checked: memory.everywhere,
    onchange: () => {
      memory.everywhere = wide.checked;
      look();
    },
  });

  const size = () => ranges.reduce((sum, [a, b]) => sum + b - a + 1, 0);
  const at = (index) => {
    for (const [a, b] of ranges) {
      if (index <= b - a) return a + index;
      index -= b - a + 1;
    }
    return ranges.at(-1)?.[1] ?? 0;
  };
  const indexOf = (step) => {
    let i = 0;
    for (const [a, b] of ranges) {
      if (step <= b) return i + Math.max(0, step - a);
      i += b - a + 1;
    }
    return i - 1;
  };
  // A step before the first that is left is shown as it is: the server says why it has no groups.
  const wanted = (step) => (step >= 1 && step < (ranges[0]?.[0] ?? 0) ? step : at(indexOf(step)));

  async function open() {
    ({ ranges } = await get("steps", { run: memory.run }));
    slider.max = String(Math.max(0, size() - 1));
    await jump(memory.step === null || follow ? (ranges.at(-1)?.[1] ?? 0) : wanted(memory.step), memory.draw);
  }

  let turn = 0;
  async function jump(step, draw = null) {
    const mine = ++turn;
    memory.step = step;
    memory.draw = draw;
    slider.value = String(indexOf(step));
    number.value = String(step);
    const answer = await get("groups", { run: memory.run, step }).catch((error) => ({ groups: [], error }));
    if (mine !== turn) return;
    listed = answer.groups;
    if (!listed.some((group) => group.draw === memory.draw)) memory.draw = null;
    drawChips();
    drawList();
    const why = answer.error?.message ?? answer.why;
    if (why) fill(list, h("p", { class: "empty" }, why));
    const phone = matchMedia("(max-width: 800px)").matches;
    if (memory.draw !== null) openGroup(memory.draw);
    else if (!phone && listed.length) openGroup(shown()[0]?.draw ?? listed[0].draw);
    else closeGroup();
    note();
  }

  const note = () => remember("groups", { run: memory.run, step: memory.step, draw: memory.draw });
  const shown = () => listed.filter((group) => !memory.fates.size || memory.fates.has(group.fate));

  function drawChips() {
    const counts = new Map();
    for (const group of listed) counts.set(group.fate, (counts.get(group.fate) ?? 0) + 1);
    for (const fate of [...memory.fates]) if (!counts.has(fate)) memory.fates.delete(fate);
    fill(
      chips,
      [...counts]
        .sort(([a], [b]) => byFate(a, b))
        .map(([fate, count]) =>
          h(
            "button",
            {
              type: "button",
              class: `chip ${fateClass(fate)}`,
              "aria-pressed": String(memory.fates.has(fate)),
              title: fateWhy(fate),
              onclick: () => {
                memory.fates.has(fate) ? memory.fates.delete(fate) : memory.fates.add(fate);
                drawChips();
                drawList();
              },
            },
            `${fateName(fate)} ${count}`,
          ),
        ),
    );
  }

  function drawList() {
    fill(
      list,
      shown().map((group) =>
        h(
          "button",
          {
            type: "button",
            role: "listitem",
            class: "group",
            "aria-current": String(group.draw === memory.draw),
            data: { draw: String(group.draw) },
            onclick: () => openGroup(group.draw),
          },
          h(
            "span",
            { class: "line" },
            foreign(group.prompt.trim().slice(0, 160), "span", "prompt"),
            h("span", { class: `chip ${fateClass(group.fate)}` }, fateName(group.fate)),
          ),
          h(
            "span",
            { class: "line" },
            h(
              "span",
              { class: "marks" },
              group.samples.map((s) => h("i", { class: mark(s), title: `${s.status}` })),
            ),
            h(
              "small",
              {},
              `${group.samples.filter((s) => s.correct).length} of ${group.samples.length} right · ${group.tokens} tokens`,
            ),
          ),
        ),
      ),
    );
    if (!shown().length) fill(list, h("p", { class: "empty" }, "No groups at this step."));
  }

  async function openGroup(draw, sample = null) {
    memory.draw = draw;
    note();
    for (const element of list.querySelectorAll(".group"))
      element.setAttribute("aria-current", String(element.dataset.draw === String(draw)));
    const group = await get("group", { run: memory.run, step: memory.step, draw }).catch((error) => ({ error }));
    if (memory.draw !== draw) return;
    detail.classList.add("open");
    fill(detail, group.error ? h("p", { class: "empty" }, group.error.message) : groupView(group, closeGroup));
    if (matchMedia("(max-width: 800px)").matches) detail.scrollIntoView({ block: "start" });
    if (sample !== null) detail.querySelector(`[data-sample="${Number(sample)}"]`)?.scrollIntoView({ block: "center" });
  }

  function closeGroup() {
    memory.draw = null;
    detail.classList.remove("open");
    fill(detail, h("p", { class: "empty" }, "Choose a group."));
    note();
  }

  let asked = 0;
  async function look(until = null) {
    const mine = ++asked;
    if (!memory.words.trim()) {
      fill(found);
      return;
    }
    const answer = await get("search", {
      run: memory.run,
      q: memory.words,
      step: memory.everywhere ? null : memory.step,
      until,
    }).catch((error) => ({ error }));
    if (mine !== asked) return;
    if (answer.error) {
      fill(found, h("p", { class: "empty" }, answer.error.message));
      return;
    }
    fill(
      found,
      h(
        "div",
        { class: "card hits" },
        h(
          "p",
          { class: "hint" },
          `${answer.cut ? "the first " : ""}${answer.hits.length} hits${memory.everywhere ? "" : ` at step ${memory.step}`}`,
          answer.left
            ? [
                `; ${answer.left} earlier steps not searched yet `,
                h("button", { type: "button", class: "quiet", onclick: () => look(answer.next) }, "search them"),
              ]
            : "",
        ),
        answer.hits.map((hit) =>
          h(
            "button",
            {
              type: "button",
              class: "hit",
              onclick: async () => {
                if (hit.step !== memory.step) {
                  follow = false;
                  await jump(hit.step, hit.draw);
                }
                openGroup(hit.draw, hit.sample);
              },
            },
            h(
              "small",
              {},
              `step ${hit.step} · sample ${hit.sample} · ${hit.correct ? "right" : "not right"} · ${fateName(hit.fate)}`,
            ),
            highlighted(hit.text, memory.words),
          ),
        ),
      ),
    );
  }
  const searching = throttle(() => look(), 300);

  const moved = throttle(async () => {
    const before = memory.step;
    ({ ranges } = await get("steps", { run: memory.run }));
    slider.max = String(Math.max(0, size() - 1));
    const last = ranges.at(-1)?.[1];
    if (follow && last !== before) jump(last);
    else slider.value = String(indexOf(before));
  }, 1500);
  onClose(
    onChange((changed) => {
      if (changed.has(memory.run)) moved();
    }),
  );
  onClose(() => {
    turn++;
    asked++;
  });
  open().then(() => look());

  const go = (by) => {
    follow = false;
    const here = indexOf(memory.step);
    const there = at(here) === memory.step ? here + by : here;
    jump(at(Math.max(0, Math.min(size() - 1, there))));
  };
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
      h("label", {}, wide, " all steps"),
    ),
    chips,
    found,
    h("div", { class: "panes" }, list, detail),
  ];
}

function highlighted(text, words) {
  const box = foreign("", "span", "excerpt");
  const place = text.toLowerCase().indexOf(words.toLowerCase());
  if (place < 0) return fill(box, text);
  return fill(
    box,
    text.slice(0, place),
    h("mark", {}, text.slice(place, place + words.length)),
    text.slice(place + words.length),
  );
}
