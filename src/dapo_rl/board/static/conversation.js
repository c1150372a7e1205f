// An episode as a conversation: turns with their tokens, messages, tool calls, times and rewards.
import { counted, fill, foreign, h, isNumber, signed } from "./dom.js";
import { occurs } from "./search.js";

const LONG = 2000; // characters of a message that are drawn at first
const SCROLLS = 300; // characters from which on a text may need the keyboard to scroll
const MOST_ARGUMENTS = 50;

const seconds = (value) => (value < 9.95 ? `${value.toFixed(value < 0.0995 ? 2 : 1)} s` : `${Math.round(value)} s`);

/** What an episode did, in numbers. */
export function episodeFacts(sample) {
  const turns = sample.policy_turns ?? sample.turns.filter((turn) => turn.author === "policy").length;
  const facts = [counted(turns, "turn")];
  if (isNumber(sample.tool_calls)) facts.push(counted(sample.tool_calls, "tool call"));
  if (sample.env_wait_s > 0) facts.push(`${seconds(sample.env_wait_s)} in the environment`);
  if (isNumber(sample.env_reward)) facts.push(`environment's reward ${signed(sample.env_reward)}`);
  if (sample.forks > 0) facts.push(counted(sample.forks, "fork"));
  return h(
    "div",
    { class: "line facts" },
    h("small", {}, facts.join(" · ")),
    sample.tool_errors > 0 ? h("span", { class: "chip bad" }, counted(sample.tool_errors, "tool error")) : null,
  );
}

/** Whether a message has the words, in anything that is shown of it. */
export const mentions = (sample, words) =>
  sample.turns?.some((turn) => turn.messages.flatMap(textsOf).some((text) => occurs(text, words))) ?? false;

const textsOf = ({ content, reasoning, calls }) => [
  content,
  reasoning,
  ...calls.flatMap((call) => argumentsOf(call.arguments)?.flat() ?? call.arguments),
];

/**
 * The turns of a sample. `plain` shows what the policy said instead of its tokens; `most` limits the tokens that are
 * drawn at first, if not all is to be seen; `tokens({first, last, most, grey})` draws some.
 */
export function conversation(sample, plain, most, tokens) {
  const whole = most === Infinity;
  let number = 0;
  let left = most;
  return h(
    "ol",
    { class: "talk", "aria-label": "Conversation" },
    sample.turns.map((turn, place) => {
      const { author, first, last } = turn;
      const policy = author === "policy";
      if (policy) number++;
      const share = { first, last, most: Math.max(0, left) };
      if (policy) left -= last - first;
      const drawn = h(
        "li",
        { class: `turn ${policy ? "policy" : "environment"}` },
        heading(turn, policy ? `turn ${number}` : "environment"),
        policy
          ? said(turn, plain, whole, () => tokens(share))
          : answered(turn, whole, () => tokens({ first, last, grey: true })),
      );
      return [begun(sample.trajectories ?? [], place), drawn];
    }),
  );
}

/** The heading of a trajectory, before its first turn, if the episode forked. */
function begun(trajectories, place) {
  const number = trajectories.findIndex(({ turn }) => turn === place);
  if (number < 0) return null;
  const { tokens, prompt } = trajectories[number];
  return h(
    "li",
    { class: "trajectory" },
    h("b", {}, `trajectory ${number + 1} of ${trajectories.length}`),
    h("small", {}, counted(tokens, "token")),
    prompt ? h("details", {}, h("summary", {}, "prompt"), foreign(prompt, "pre")) : null,
  );
}

function heading(turn, name) {
  const facts = [];
  if (turn.tokens) facts.push(counted(turn.tokens, "token"));
  if (turn.seconds > 0) facts.push(seconds(turn.seconds));
  return h(
    "div",
    { class: "line" },
    h("b", {}, name),
    h("small", {}, facts.join(" · ")),
    turn.reward
      ? h("span", { class: `chip ${turn.reward > 0 ? "good" : "bad"}` }, `reward ${signed(turn.reward)}`)
      : null,
  );
}

/** A turn of the policy: its tokens, or what it said if nothing is to be coloured, and the tool calls in it. */
function said(turn, plain, whole, tokens) {
  const [message] = turn.messages;
  const calls = (isSearched) => message?.calls.map((call) => callView(call, whole, isSearched));
  if (!message || (!plain && turn.last > turn.first))
    return [searched(h("div", { class: "tokens" }, tokens())), calls(false)];
  const { reasoning, content } = message;
  return [reasoning && body(reasoning, whole, "reasoning"), content && body(content, whole), calls(true)];
}

/** The environment's messages, and the tokens that the policy read. */
function answered(turn, whole, tokens) {
  const some = turn.last > turn.first;
  if (!turn.messages.length) return some ? searched(h("div", { class: "tokens" }, tokens())) : null;
  const holder = h("div", { class: "tokens" });
  const ontoggle = ({ target }) => target.open && !holder.firstChild && fill(holder, tokens());
  return [
    turn.messages.map((message) => [sender(message), body(message.content, whole)]),
    some ? h("details", { ontoggle }, h("summary", {}, "as tokens"), holder) : null,
  ];
}

const sender = ({ role, name }) =>
  role === "tool" ? h("small", {}, "result of ", toolName(name)) : h("small", {}, foreign(role || "message"));

const toolName = (name) => foreign(name || "a tool", "code");

function callView(call, whole, isSearched) {
  const given = argumentsOf(call.arguments);
  const view = h(
    "div",
    { class: "call" },
    h("small", {}, "calls ", toolName(call.name)),
    given
      ? h(
          "dl",
          {},
          given.map(([name, value]) => h("div", {}, foreign(name, "dt"), h("dd", {}, body(value, whole)))),
        )
      : call.arguments && body(call.arguments, whole),
  );
  if (!isSearched) for (const part of view.querySelectorAll("[data-find]")) delete part.dataset.find;
  return view;
}

/** Arguments as names and values; null if the policy wrote anything else. */
function argumentsOf(text) {
  let values;
  try {
    values = JSON.parse(text);
  } catch {
    return null;
  }
  if (values === null || typeof values !== "object" || Array.isArray(values)) return null;
  const shown = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const entries = Object.entries(values).map(([name, value]) => [name, shown(value)]);
  return entries.length <= MOST_ARGUMENTS ? entries : null;
}

/** A text of a message, as text. A long one is drawn in full when asked for. */
function body(text, whole, cls = "") {
  const cut = !whole && text.length > LONG;
  const box = foreign(cut ? `${text.slice(0, LONG)}…` : text, "pre", cls);
  if (text.length > SCROLLS) box.tabIndex = 0;
  searched(box);
  if (!cut) return box;
  const more = h(
    "button",
    {
      type: "button",
      class: "quiet",
      onclick: () => {
        fill(box, text);
        more.remove();
      },
    },
    `show ${counted(text.length - LONG, "more character")}`,
  );
  return [box, more];
}

/** Lets the search look into an element. */
function searched(element) {
  element.dataset.find = "response";
  return element;
}
