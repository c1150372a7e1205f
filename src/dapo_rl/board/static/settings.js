// Changes any setting of a recipe: a key with search as you type, its documentation, and a value.
import { fill, h } from "./dom.js";

/** `changed`: a Map of keys and values, which is edited here; `check`: what the server says is wrong with them. */
export function settingsEditor(changed, check) {
  let known = new Map();
  const keys = h("datalist", { id: "lab-keys" }),
    choices = h("datalist", { id: "lab-choices" });
  const key = h("input", {
    type: "text",
    list: "lab-keys",
    id: "lab-key",
    placeholder: "search",
    "aria-label": "Setting",
    autocomplete: "off",
    spellcheck: "false",
    oninput: show,
    onkeydown: (event) => enter(event, () => value.focus()),
  });
  const value = h("input", {
    type: "text",
    list: "lab-choices",
    id: "lab-value",
    placeholder: "value",
    "aria-label": "Value",
    autocomplete: "off",
    spellcheck: "false",
    onkeydown: (event) => enter(event, set),
  });
  const button = h("button", { type: "button", class: "quiet", onclick: set }, "change");
  const about = h("p", { class: "hint about" }),
    problem = h("p", { class: "problem", role: "alert" }),
    list = h("ul", { class: "changes", "aria-label": "Changed settings" });

  function enter(event, act) {
    if (event.key !== "Enter") return;
    event.preventDefault(); // it would start the run
    act();
  }

  function show() {
    const setting = known.get(key.value.trim());
    fill(problem);
    value.disabled = button.disabled = !setting;
    fill(choices, setting ? setting.choices.map((each) => h("option", { value: each })) : []);
    value.placeholder = setting ? setting.value : "value";
    fill(about, setting ? [setting.meaning, " In the recipe: ", h("code", {}, setting.value), "."] : matching());
  }

  /** What a part of a name, or a word of the documentation, can mean. */
  function matching() {
    const words = key.value.trim().toLowerCase();
    if (!words) return null;
    const found = [...known.values()].filter((s) => `${s.key} ${s.meaning}`.toLowerCase().includes(words)).slice(0, 8);
    if (!found.length) return "No setting has this in its name or documentation.";
    return found.map((setting) =>
      h(
        "button",
        {
          type: "button",
          class: "quiet found",
          title: setting.meaning,
          onclick: () => {
            key.value = setting.key;
            show();
            value.focus();
          },
        },
        setting.key,
      ),
    );
  }

  async function set() {
    const name = key.value.trim(),
      before = changed.get(name);
    if (!known.has(name) || value.value.trim() === "") return;
    changed.set(name, value.value.trim());
    const wrong = await check().catch((error) => error.message);
    if (wrong) {
      before === undefined ? changed.delete(name) : changed.set(name, before);
      fill(problem, wrong);
      return;
    }
    key.value = value.value = "";
    show();
    drawList();
    key.focus();
  }

  function drawList() {
    fill(
      list,
      [...changed].map(([name, now]) =>
        h(
          "li",
          {},
          h("code", {}, `${name}=${now}`),
          h(
            "button",
            {
              type: "button",
              class: "quiet",
              "aria-label": `Undo ${name}`,
              onclick: () => {
                changed.delete(name);
                drawList();
              },
            },
            "×",
          ),
        ),
      ),
    );
  }

  const element = h(
    "fieldset",
    { class: "settings" },
    h("legend", {}, "Other settings"),
    h("div", { class: "bar" }, key, value, button),
    keys,
    choices,
    about,
    problem,
    list,
  );
  return {
    element,
    /** Shows the settings of a recipe. */
    describe(settings) {
      known = new Map(settings.map((setting) => [setting.key, setting]));
      fill(keys, settings.map((setting) => h("option", { value: setting.key })));
      show();
      drawList();
    },
  };
}
