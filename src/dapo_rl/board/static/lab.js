// Lab: the five techniques as switches; runs of the embedded default are started and stopped here.
import { Chart } from "./charts.js";
import { fill, foreign, h, throttle } from "./dom.js";
import { CURVES, legend } from "./panels.js";
import { get, onChange, pick, post, store, token } from "./store.js";

const WATCHED = ["eval/accuracy", "acc/mean", "actor/entropy", "response_length/mean"];
const memory = { on: null, steps: null, seed: 0, prompts: 128 };

export function lab(_parameters, onClose) {
  const switches = h("div", { class: "switches" }),
    jobs = h("div", { class: "jobs" }),
    problem = h("p", { class: "problem", role: "alert" });
  const steps = h("input", { type: "number", min: "1", max: "10000", class: "step", id: "lab-steps" });
  const seed = h("input", { type: "number", min: "0", class: "step", id: "lab-seed", value: String(memory.seed) });
  const prompts = h("input", {
    type: "number",
    min: "1",
    max: "512",
    class: "step",
    id: "lab-prompts",
    value: String(memory.prompts),
  });
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
    WATCHED.map((metric) => [metric, new Chart(metric, { hint: CURVES.find(([name]) => name === metric)?.[1] })]),
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

  async function describe() {
    const answer = await get("lab");
    store.jobs = answer.jobs;
    memory.on ??= new Set(answer.techniques.filter((t) => t.on).map((t) => t.name));
    memory.steps ??= answer.steps;
    steps.value = String(memory.steps);
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
    drawJobs();
  }

  async function begin(event) {
    event.preventDefault();
    start.disabled = true;
    fill(problem);
    Object.assign(memory, { steps: Number(steps.value), seed: Number(seed.value), prompts: Number(prompts.value) });
    try {
      const { name } = await post(
        "lab/start",
        {},
        { techniques: [...memory.on], steps: memory.steps, seed: memory.seed, eval_prompts: memory.prompts },
      );
      fresh.add(name);
    } catch (error) {
      fill(problem, error.message);
    }
    start.disabled = false;
  }

  const fresh = new Set();
  function drawJobs() {
    fill(
      jobs,
      store.jobs.map((job) => {
        const row = store.runs.get(job.name),
          going = job.state === "running" || job.state === "stopping";
        const said = job.state === "running" && !(row?.step > 0) ? "starting" : job.state;
        return h(
          "article",
          { class: "card job", data: { job: job.name } },
          h(
            "div",
            { class: "line" },
            h("b", {}, foreign(job.name)),
            h("span", { class: `state ${said}` }, said),
            h("small", {}, row ? `step ${row.step} of ${row.steps ?? "?"}` : ""),
            h("span", { class: "grow" }),
            going
              ? h(
                  "button",
                  {
                    type: "button",
                    class: "quiet stop",
                    disabled: start.disabled,
                    onclick: () => post("lab/stop", { run: job.name }).catch((error) => fill(problem, error.message)),
                  },
                  job.state === "stopping" ? "stop immediately" : "stop",
                )
              : null,
          ),
          h(
            "details",
            { open: job.state === "failed" },
            h("summary", {}, "output"),
            foreign(job.tail || "nothing yet", "pre"),
          ),
        );
      }),
    );
  }

  let turn = 0;
  async function load() {
    const mine = ++turn;
    if (!store.picked.length) return;
    const names = store.picked;
    const curves = await get("curves", { run: names, metric: WATCHED, points: 500, share: 0.1 });
    if (mine !== turn || !grid.isConnected) return;
    fill(key, legend());
    for (const [metric, chart] of charts)
      chart.draw(Object.fromEntries(names.filter((n) => curves[n]).map((name) => [name, curves[name][metric]])));
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
      if (store.picked.some((name) => changed.has(name))) live();
    }),
  );
  onClose(() => {
    turn++;
    charts.forEach((chart) => chart.close());
  });
  queueMicrotask(() => {
    describe();
    check();
    load();
  });
  return h(
    "div",
    { class: "lab" },
    h(
      "form",
      { class: "card", onsubmit: begin },
      h("h3", {}, "A run of the embedded default"),
      h(
        "p",
        { class: "hint" },
        "A model of a million parameters learns arithmetic on this machine in minutes. Switch a technique off to see its effect.",
      ),
      switches,
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
