// The left side of the groups: a step's groups, or its samples sorted and filtered by the server.
import { counted, fill, foreign, h, signed, throttle } from "./dom.js";
import { address } from "./download.js";
import { byOutcome, outcomeClass, outcomeName, outcomeWhy } from "./outcomes.js";
import { mark } from "./samples.js";
import { marked } from "./search.js";
import { get } from "./store.js";

const PAGE = 100;
const SORTS = {
  draw: "draw",
  reward: "reward",
  length: "length",
  verdict: "verdict",
  advantage: "advantage",
  turns: "turns",
};

/** Buttons that switch a filter on and off: `counts` {key: number}, `on` a set of keys. */
export function chipsOf(counts, on, { name, cls = () => "", why = () => "", order, changed }) {
  for (const key of [...on]) if (!(key in counts)) on.delete(key);
  return Object.entries(counts)
    .sort(([a], [b]) => order(a, b))
    .map(([key, count]) =>
      h(
        "button",
        {
          type: "button",
          class: `chip ${cls(key)}`,
          "aria-pressed": String(on.has(key)),
          title: why(key),
          onclick: () => {
            on.has(key) ? on.delete(key) : on.add(key);
            changed();
          },
        },
        `${name(key)} ${count}`,
      ),
    );
}

export const outcomeChips = (counts, on, changed) =>
  chipsOf(counts, on, { name: outcomeName, cls: outcomeClass, why: outcomeWhy, order: byOutcome, changed });

function episode(row) {
  const facts = [counted(row.turns, "turn")];
  if (row.tool_calls > 0) facts.push(counted(row.tool_calls, "tool call"));
  if (row.tool_errors > 0) facts.push(counted(row.tool_errors, "tool error"));
  return facts.join(" · ");
}

export const verdictName = (status) => (status === "correct" ? "right" : String(status));

export function groupLine(group, current, open) {
  const right = group.samples.filter((s) => s.correct).length;
  return h(
    "button",
    {
      type: "button",
      role: "listitem",
      class: "group",
      "aria-current": String(current),
      data: { draw: String(group.draw) },
      onclick: open,
    },
    h(
      "span",
      { class: "line" },
      foreign(group.prompt.trim().slice(0, 160), "span", "prompt"),
      h("span", { class: `chip ${outcomeClass(group.fate)}` }, outcomeName(group.fate)),
    ),
    h(
      "span",
      { class: "line" },
      h(
        "span",
        { class: "marks" },
        group.samples.map((s) => h("i", { class: mark(s), title: s.status ?? "not judged" })),
      ),
      h(
        "small",
        {},
        `${right} of ${group.samples.length} right · ${counted(group.tokens, "token")}`,
      ),
    ),
  );
}

/** The samples of a step. `where()` gives {run, step, words, outcomes}, `open(row)` shows a sample. */
export class SampleList {
  constructor(memory, { where, open, drawn }) {
    Object.assign(this, { memory, where, open, drawn });
    this.rows = [];
    this.matched = 0;
    this.turn = 0;
    this.list = h("div", { class: "list", role: "list" });
    this.verdicts = h("span", { class: "chips" });
    this.tools = h("span", { class: "chips", role: "group", "aria-label": "Tools" });
    this.note = h("span", { class: "hint", role: "status" });
    this.links = h("span", { class: "links" });
    const later = throttle(() => this.load(), 300);
    this.sort = h(
      "select",
      {
        "aria-label": "Sort samples by",
        onchange: () => {
          memory.sort = this.sort.value;
          this.load();
        },
      },
      Object.entries(SORTS).map(([key, label]) => h("option", { value: key, selected: key === memory.sort }, label)),
    );
    this.direction = h("button", {
      type: "button",
      class: "quiet",
      "aria-label": "Reverse the order",
      onclick: () => this.reverse(),
    });
    const bound = (key, label) =>
      h("input", {
        type: "number",
        step: "any",
        class: "bound",
        "aria-label": label,
        placeholder: key.startsWith("min") ? "min" : "max",
        value: memory[key],
        oninput: (event) => {
          memory[key] = event.target.value;
          later();
        },
      });
    const range = (name) => {
      const [low, high] = [bound(`min_${name}`, `Least ${name}`), bound(`max_${name}`, `Most ${name}`)];
      return h("span", { class: "range" }, `${name} `, low, "–", high);
    };
    this.turns = range("turns");
    this.controls = h(
      "div",
      { class: "bar filters" },
      h("label", {}, "sort by ", this.sort, this.direction),
      range("reward"),
      range("length"),
      this.turns,
      this.verdicts,
      this.tools,
      h("span", { class: "grow" }),
      this.note,
      this.links,
    );
  }

  parameters() {
    const { run, step, words, outcomes } = this.where();
    const { sort, down, verdicts, tools, errors, ...bounds } = this.memory;
    const chosen = { fate: [...outcomes], verdict: [...verdicts], tool: [...tools], ...bounds };
    if (errors.size) chosen.tool_errors = "true";
    return { run, step, q: words, ...chosen, sort, down: down ? "true" : null };
  }

  reverse() {
    this.memory.down = !this.memory.down;
    this.load();
  }

  nextSort() {
    const keys = Object.keys(SORTS);
    this.memory.sort = keys[(keys.indexOf(this.memory.sort) + 1) % keys.length];
    this.load();
  }

  /** Reads the list from the start, or from `first` on. */
  async load(first = 0) {
    const mine = ++this.turn;
    const wanted = this.parameters();
    const given = Object.fromEntries(Object.entries(wanted).filter(([, value]) => value !== ""));
    const failed = (error) => ({ rows: [], why: error.message });
    const answer = await get("samples", { ...given, first, limit: PAGE }).catch(failed);
    if (mine !== this.turn) return;
    this.rows = first ? [...this.rows, ...answer.rows] : answer.rows;
    this.matched = answer.matched ?? 0;
    const chosen = this.choices();
    this.draw(answer, wanted);
    this.drawn(answer);
    if (this.choices() < chosen && !answer.why) this.load(); // the list is without what this step does not have
  }

  /** How many outcomes, verdicts and tools are chosen. A choice that a step does not offer is dropped. */
  choices() {
    const { verdicts, tools, errors } = this.memory;
    return [this.where().outcomes, verdicts, tools, errors].reduce((sum, set) => sum + set.size, 0);
  }

  draw(answer, wanted) {
    this.sort.value = wanted.sort;
    fill(this.direction, this.memory.down ? "↓" : "↑");
    this.direction.title = this.memory.down ? "largest first" : "smallest first";
    fill(
      this.verdicts,
      chipsOf(answer.verdicts ?? {}, this.memory.verdicts, {
        name: verdictName,
        order: (a, b) => (a < b ? -1 : 1),
        changed: () => this.load(),
      }),
    );
    this.drawEpisodes(answer);
    fill(this.note, answer.why ? "" : `${this.matched.toLocaleString("en")} of ${counted(answer.total, "sample")}`);
    fill(
      this.links,
      [
        ["csv", "CSV"],
        ["jsonl", "JSONL"],
      ].map(([kind, label]) =>
        h(
          "a",
          { href: address(`rows.${kind}`, wanted), download: "", title: `Download these samples as ${label}` },
          `⤓ ${label}`,
        ),
      ),
    );
    const left = this.matched - this.rows.length;
    const none = answer.why ?? (answer.total ? "No sample passes these filters." : "No samples at this step.");
    fill(
      this.list,
      this.rows.map((row) => this.line(row, wanted.q)),
      this.rows.length ? null : h("p", { class: "empty" }, none),
      left > 0
        ? h(
            "button",
            { type: "button", class: "quiet", onclick: () => this.load(this.rows.length) },
            `show ${Math.min(PAGE, left)} more`,
          )
        : null,
    );
    this.point(this.current);
  }

  /** The filters of episodes, at a step that has any. */
  drawEpisodes({ turns, tools = {}, tool_errors = 0 }) {
    const { memory } = this;
    const changed = () => this.load();
    const most = (a, b) => tools[b] - tools[a] || (a < b ? -1 : 1);
    this.turns.hidden = !(turns?.[1] > 1 || memory.min_turns || memory.max_turns);
    fill(
      this.tools,
      chipsOf(tools, memory.tools, {
        name: (tool) => tool || "no name",
        why: () => "calls this tool",
        order: most,
        changed,
      }),
      chipsOf(tool_errors ? { errors: tool_errors } : {}, memory.errors, {
        name: () => "tool errors",
        cls: () => "bad",
        why: () => "a tool call was malformed or failed",
        order: () => 0,
        changed,
      }),
    );
  }

  line(row, words) {
    const reward = row.reward === null ? `score ${signed(row.score)}` : `reward ${signed(row.reward)}`;
    return h(
      "button",
      {
        type: "button",
        role: "listitem",
        class: "group",
        data: { key: `${row.draw}.${row.sample}` },
        onclick: () => this.open(row),
      },
      h(
        "span",
        { class: "line" },
        h("span", { class: "marks" }, h("i", { class: mark(row) }), h("b", {}, verdictName(row.status))),
        h("small", {}, `${reward} · ${counted(row.length, "token")}`),
      ),
      marked((row.opening ?? "").trim(), words, "span", "prompt"),
      row.turns > 1 || row.tool_calls > 0 ? h("small", {}, episode(row)) : null,
      h(
        "span",
        { class: "line" },
        h("small", {}, `draw ${row.draw} · sample ${row.sample} · answer `, marked(row.answer ?? "–", words)),
        h("span", { class: `chip ${outcomeClass(row.fate)}` }, outcomeName(row.fate)),
      ),
    );
  }

  /** Marks the row of the open sample. */
  point(current) {
    this.current = current;
    const key = current ? `${current.draw}.${current.sample}` : null;
    for (const element of this.list.querySelectorAll(".group")) {
      const here = element.dataset.key === key;
      element.setAttribute("aria-current", String(here));
      if (here) element.scrollIntoView({ block: "nearest" });
    }
  }

  /** Opens the sample `by` places from the open one; reads on where the list ends. */
  async go(by) {
    const here = this.rows.findIndex((row) => row.draw === this.current?.draw && row.sample === this.current?.sample);
    const there = here < 0 ? 0 : here + by;
    if (there >= this.rows.length && this.rows.length < this.matched) await this.load(this.rows.length);
    if (this.rows[there]) this.open(this.rows[there]);
  }
}
