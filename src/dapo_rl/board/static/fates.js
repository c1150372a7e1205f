// The fates of groups and tokens from the server's table: labels, colours, order.
import { get } from "./store.js";

const { fates } = await get("vocabulary");
const FATES = new Map(fates.map((fate) => [fate.key, fate]));
const ORDER = [...FATES.keys()];
const place = (fate) => (FATES.has(fate) ? ORDER.indexOf(fate) : ORDER.length);

export const fateName = (fate) => FATES.get(fate)?.label ?? String(fate).replaceAll("_", " ");
export const fateWhy = (fate) => FATES.get(fate)?.why ?? "";
export const fateTint = (fate) => FATES.get(fate)?.tint ?? "#999999";
/** How a group is marked: good, dropped, bad or calm. */
export const fateClass = (fate) => FATES.get(fate)?.role ?? "dropped";
/** Known fates in the order of the table, then any others. */
export const byFate = (a, b) => place(a) - place(b);
