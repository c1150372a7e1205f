// Lab: a recipe with the five techniques as switches and any other setting; runs are started, queued and stopped here.
import { Chart } from "./charts.js";
import { arrange, fill, foreign, h, throttle } from "./dom.js";
import { long } from "./names.js";
import { CURVES, legend } from "./panels.js";
import { settingsEditor } from "./settings.js";
import { get, onChange, pick, post, store, token } from "./store.js";

const WATCHED = ["eval/accuracy", "acc/mean", "actor/entropy", "response_length/mean"];
const DEMO = "demo";
const memory = { recipe: null, on: null, steps: null, seed: 0, prompts: null, changed: new Map() };

export function lab(_parameters, onClose) {
  if (memory.on === null) memory.recipe = null; // it could not be read
  const switches = h("div", { class: "switches" }),
    jobs = h("div", { class: "jobs" }),
    problem = h("p", { class: "problem", role: "alert" });
  const numeric = (id, min, max) => h("input", { type: "number", min, max, class: "step", id });
  const steps = numeric("lab-steps", "1", "1000000"),
    seed = numeric("lab-seed", "0", "2147483647"),
    prompts = numeric("lab-prompts", "1", "100000");
  const recipes = h("select", {
    id: "lab-recipe",
    "aria-label": "Recipe",
    onchange: () => {
      Object.assign(memory, { recipe: recipes.value, on: null, steps: null });
      memory.changed.clear();
      describe();
    },
  });
  const about = h("p", { class: "hint" });
  const settings = settingsEditor(memory.changed, async () => (await post("lab/check", {}, wanted())).problem);
  const start = h("button", { type: "submit", class: "main" }, "Start the run");
  const secret = h("input", {
    type: "password",
    autocomplete: "off",
    id: "lab-token",
    placeholder: "token",
    onchange: () => {
      token.set(secret.value.trim());
      check();
    },
  });
  const gate = h(
    "label",
    { class: "gate", hidden: true },
    "The token that ",
    h("code", {}, "dapo board"),
    " printed: ",
    secret,
  );
  const key = h("div", {}),
    grid = h("div", { class: "grid two" });
  const charts = new Map(
    WATCHED.map((metric) => {
      const hint = CURVES.find(([name]) => name === metric)?.[1];
      return [metric, new Chart(metric, { hint, optional: true })];
    }),
  );
  grid.append(...[...charts.values()].map((chart) => chart.element));

  async function check() {
    const fine =
      token.get() !== "" &&
      (await post("lab/token").then(
        () => true,
        () => false,
      ));
    gate.hidden = fine;
    start.disabled = !fine;
    drawJobs();
  }

  let asked = 0;
  async function describe() {
    const mine = ++asked;
    fill(problem);
    let answer;
    try {
      answer = await get("lab", { recipe: memory.recipe });
    } catch (error) {
      if (mine !== asked) return;
      fill(problem, error.message);
      fill(switches); // they are another recipe's
      return;
    }
    if (mine !== asked) return; // another recipe has been chosen since
    store.jobs = answer.jobs;
    if (memory.on === null)
      Object.assign(memory, {
        recipe: answer.recipe,
        on: new Set(answer.techniques.filter((t) => t.on).map((t) => t.name)),
        steps: answer.steps,
        seed: answer.seed,
        prompts: answer.eval_prompts,
      });
    steps.value = String(memory.steps);
    seed.value = String(memory.seed);
    prompts.value = memory.prompts === null ? "" : String(memory.prompts);
    prompts.placeholder = "all";
    fill(
      recipes,
      answer.recipes.map((each) =>
        h(
          "option",
          {
            value: each.name,
            selected: each.name === answer.recipe,
            disabled: each.problem !== null,
            title: each.problem,
          },
          each.problem === null ? each.name : `${each.name} (cannot be read: ${each.problem})`,
        ),
      ),
    );
    fill(
      about,
      answer.recipe === DEMO
        ? "A model of a million parameters learns arithmetic on this machine in minutes. "
        : ["Trains ", foreign(answer.model), ". "],
      "Switch a technique on or off to see its effect.",
    );
    fill(
      switches,
      answer.techniques.map((technique) => {
        const setting = h("small", { class: "setting" });
        const tell = () => fill(setting, technique.settings[box.checked ? 1 : 0]);
        const box = h("input", {
          type: "checkbox",
          role: "switch",
          checked: memory.on.has(technique.name),
          onchange: () => {
            box.checked ? memory.on.add(technique.name) : memory.on.delete(technique.name);
            tell();
          },
        });
        tell();
        return h(
          "label",
          { class: "switch" },
          box,
          h("span", {}, h("b", {}, technique.name), h("span", { class: "hint" }, technique.meaning), setting),
        );
      }),
    );
    settings.describe(answer.settings);
    drawJobs();
  }

  /** The choice, as the server takes it. */
  function wanted() {
    Object.assign(memory, {
      steps: Number(steps.value),
      seed: Number(seed.value),
      prompts: prompts.value === "" ? null : Number(prompts.value),
    });
    return {
      recipe: memory.recipe,
      techniques: [...(memory.on ?? [])],
      steps: memory.steps,
      seed: memory.seed,
      eval_prompts: memory.prompts,
      settings: Object.fromEntries(memory.changed),
    };
  }

  async function begin(event) {
    event.preventDefault();
    if (memory.on === null) return describe(); // the recipe has not been read, and this says why
    start.disabled = true;
    fill(problem);
    try {
      const { name } = await post("lab/start", {}, wanted());
      fresh.add(name);
    } catch (error) {
      fill(problem, error.message);
    }
    start.disabled = false;
  }

  const fresh = new Set();
  const drawn = new Map(); // what is drawn of the queue and of each job stays while its buttons stay the same
  function kept(name, key, build) {
    if (drawn.get(name)?.key !== key) drawn.set(name, { key, ...build() });
    return drawn.get(name);
  }

  function drawJobs() {
    const waiting = store.jobs.filter((job) => job.state === "waiting");
    const queue = kept("", JSON.stringify([waiting, start.disabled]), () => ({
      element: h(
        "section",
        { class: "queue", "aria-label": "Queue" },
        h("h3", {}, `Queue: ${waiting.length} ${waiting.length === 1 ? "run waits" : "runs wait"}`),
        h("ol", {}, waiting.map(queued)),
      ),
    }));
    const others = store.jobs.filter((job) => job.state !== "waiting").map(started);
    arrange(jobs, waiting.length ? [queue.element, ...others] : others);
  }

  const act = (action, job, label, { says = label, disabled = false } = {}) =>
    h(
      "button",
      {
        type: "button",
        class: `quiet ${action}`,
        disabled: start.disabled || disabled,
        title: says,
        "aria-label": `${says} ${job.name}`,
        onclick: () => post(`lab/${action}`, { run: job.name }).catch((error) => fill(problem, error.message)),
      },
      label,
    );

  function queued(job) {
    return h(
      "li",
      { class: "card job", data: { job: job.name } },
      h(
        "div",
        { class: "line" },
        h("small", {}, `${job.place}.`),
        h("b", {}, foreign(job.name)),
        h("span", { class: "state waiting" }, "waiting"),
        h("span", { class: "grow" }),
        act("sooner", job, "↑", { says: "move up", disabled: job.place === 1 }),
        act("remove", job, "remove"),
      ),
      h("small", {}, long(job.recipe)),
    );
  }

  function started(job) {
    const row = store.runs.get(job.name),
      going = job.state === "running" || job.state === "stopping";
    const said = job.state === "running" && !(row?.step > 0) ? "starting" : job.state;
    const card = kept(job.name, `${said} ${job.state} ${start.disabled}`, () => {
      const step = h("small");
      const output = foreign("", "pre");
      const element = h(
        "article",
        { class: "card job", data: { job: job.name } },
        h(
          "div",
          { class: "line" },
          h("b", {}, foreign(job.name)),
          h("span", { class: `state ${said}` }, said),
          step,
          h("span", { class: "grow" }),
          going ? act("stop", job, job.state === "stopping" ? "stop immediately" : "stop") : null,
        ),
        h("small", {}, long(job.recipe)),
        h("details", { open: job.state === "failed" }, h("summary", {}, "output"), output),
      );
      return { element, step, output };
    });
    fill(card.step, row ? `step ${row.step} of ${row.steps ?? "?"}` : "");
    fill(card.output, job.tail || "nothing yet");
    return card.element;
  }

  let turn = 0;
  async function load() {
    const mine = ++turn;
    grid.hidden = !store.picked.length;
    if (grid.hidden) {
      fill(key, h("p", { class: "empty" }, "The curves of a run appear here when it has started."));
      return;
    }
    const names = store.picked;
    const curves = await get("curves", { run: names, metric: WATCHED, points: 500, share: 0.1 });
    if (mine !== turn || !grid.isConnected) return;
    fill(key, legend());
    for (const [metric, chart] of charts)
      chart.draw(Object.fromEntries(names.filter((n) => curves[n]).map((name) => [name, curves[name][metric]])));
  }

  /** Without a choice, the newest run is shown; returns whether it was picked just now. */
  function pickNewest() {
    if (store.picked.length || !store.runs.size) return false;
    const newest = [...store.runs.values()].reduce((a, b) => ((b.started ?? 0) > (a.started ?? 0) ? b : a));
    pick([newest.name]);
    return true;
  }

  const live = throttle(load, 1500);
  onClose(
    onChange((changed) => {
      const open = new Set([...jobs.querySelectorAll("details[open]")].map((d) => d.closest(".job").dataset.job));
      for (const name of [...fresh])
        if (store.runs.has(name)) {
          fresh.delete(name);
          pick([...store.picked, name]);
        }
      drawJobs();
      for (const d of jobs.querySelectorAll("details")) if (open.has(d.closest(".job").dataset.job)) d.open = true;
      if (store.picked.some((name) => changed.has(name)) || pickNewest()) live();
    }),
  );
  onClose(() => {
    turn++;
    charts.forEach((chart) => chart.close());
  });
  queueMicrotask(() => {
    describe();
    check();
    pickNewest();
    load();
  });
  return h(
    "div",
    { class: "lab" },
    h(
      "form",
      { class: "card", onsubmit: begin },
      h("label", { class: "recipe" }, h("h3", {}, "Recipe"), recipes),
      about,
      switches,
      settings.element,
      h(
        "div",
        { class: "bar" },
        h("label", {}, "steps ", steps),
        h("label", {}, "seed ", seed),
        h("label", {}, "held-out prompts ", prompts),
      ),
      gate,
      h("div", { class: "bar" }, start),
      problem,
      jobs,
    ),
    h("div", {}, key, grid),
  );
}
