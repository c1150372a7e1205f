// The outcomes of groups and tokens from the server's table: labels, colours, order.
import { get } from "./store.js";

const { outcomes } = await get("vocabulary");
const OUTCOMES = new Map(outcomes.map((outcome) => [outcome.key, outcome]));
const ORDER = [...OUTCOMES.keys()];
const place = (outcome) => (OUTCOMES.has(outcome) ? ORDER.indexOf(outcome) : ORDER.length);

export const outcomeName = (outcome) => OUTCOMES.get(outcome)?.label ?? String(outcome).replaceAll("_", " ");
export const outcomeWhy = (outcome) => OUTCOMES.get(outcome)?.why ?? "";
export const outcomeTint = (outcome) => OUTCOMES.get(outcome)?.tint ?? "#999999";
/** How a group is marked: good, dropped, bad or calm. */
export const outcomeClass = (outcome) => OUTCOMES.get(outcome)?.role ?? "dropped";
/** Known outcomes in the order of the table, then any others. */
export const byOutcome = (a, b) => place(a) - place(b);
