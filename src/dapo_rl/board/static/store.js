// The state of the page: the runs as last sent by the server, the selected ones, and requests for more.

const LIGHT = ["#3b6fd4", "#d9822b", "#2a9d6f", "#c4475d", "#8a63c9", "#1f9bb5", "#a5812a", "#c25aa3"];
const DARK = ["#82aaff", "#f5a65b", "#5fd0a0", "#f07f8e", "#b99aef", "#5cc8de", "#d9bd62", "#ea8fcc"];
export const TOP = LIGHT.length;

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export const store = { runs: new Map(), reports: [], jobs: [], hasLab: true, picked: [], loaded: false };

/** A colour by number, for lines that are not runs. */
export const tint = (index, dark = isDark()) => (dark ? DARK : LIGHT)[index % TOP];

const listeners = new Set();
/** Subscribes to changes, called with the names of the changed runs; returns a function to unsubscribe. */
export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function tell(changed) {
  for (const listener of [...listeners]) listener(changed);
}

// A run keeps its colour while it is selected.
const slots = new Map();
export function colour(name, dark = isDark()) {
  for (const known of [...slots.keys()]) if (!store.picked.includes(known)) slots.delete(known);
  if (!slots.has(name)) {
    const taken = new Set(slots.values());
    slots.set(name, [...LIGHT.keys()].find((i) => !taken.has(i)) ?? slots.size % TOP);
  }
  return (dark ? DARK : LIGHT)[slots.get(name)];
}

export function pick(names) {
  store.picked = [...new Set(names)].filter((name) => store.runs.has(name)).slice(-TOP);
}

export async function get(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value])
      if (one !== undefined && one !== null) query.append(key, one);
  }
  return answer(await fetch(`/api/${path}?${query}`));
}

export async function post(path, parameters = {}, body = undefined) {
  const headers = { "X-Dapo-Token": token.get() };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const query = new URLSearchParams(parameters);
  return answer(
    await fetch(`/api/${path}?${query}`, {
      method: "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
    }),
  );
}

async function answer(response) {
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(content.error ?? `the server responded with ${response.status}`);
  return content;
}

// The token is in the fragment of the printed address, which browsers never send; beyond localhost it is in the query,
// for which the server sets a cookie.
export const token = {
  get() {
    try {
      return sessionStorage.getItem("token") ?? "";
    } catch {
      return this.kept ?? "";
    }
  },
  set(value) {
    this.kept = value;
    try {
      sessionStorage.setItem("token", value);
    } catch {
      /* kept above */
    }
  },
};
const brought = /^#token=([\w-]+)$/.exec(location.hash)?.[1];
const asked = new URLSearchParams(location.search).get("token");
if (brought || asked) {
  token.set(brought ?? asked);
  history.replaceState(null, "", location.pathname + (brought || !location.hash ? "#/runs" : location.hash));
}

/** The parameters after the view in the address: #/groups?run=a&step=3 */
export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path || "runs", parameters: new URLSearchParams(query ?? "") };
}

let current = location.hash; // the address of what is shown

/** The route to show now. */
export function arrive() {
  current = location.hash;
  return route();
}

/** Puts a view's state into the address; not if that has changed already, and is about to be shown. */
export function remember(view, parameters) {
  if (location.hash !== current) return;
  const query = new URLSearchParams(
    Object.entries(parameters).filter(([, v]) => v !== undefined && v !== null && v !== ""),
  );
  history.replaceState(null, "", `#/${view}${query.size ? `?${query}` : ""}`);
  current = location.hash;
}
