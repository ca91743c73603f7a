// Views, colours, and the start.

const VIEWS = ["playground", "live"];
// No element has such an id, so that the browser does not scroll or move the focus.
const ADDRESS = "#/";
const THEMES = ["auto", "light", "dark"];
const THEME = "jackfield.theme";

/** Show a view and say so in the address, so that it can be linked to. */
function showView(name, views) {
  for (const one of VIEWS) {
    const tab = byId(`tab-${one}`);
    byId(one).hidden = one !== name;
    tab.setAttribute("aria-selected", String(one === name));
    tab.tabIndex = one === name ? 0 : -1;
  }
  history.replaceState(null, "", ADDRESS + name);
  hideTooltip();
  views[name]?.();
}

function setUpTabs(views) {
  for (const one of VIEWS) {
    const tab = byId(`tab-${one}`);
    tab.addEventListener("click", () => showView(one, views));
    tab.addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = VIEWS.find((name) => name !== one);
      showView(other, views);
      byId(`tab-${other}`).focus();
    });
  }
  const named = location.hash.slice(ADDRESS.length);
  showView(VIEWS.includes(named) ? named : VIEWS[0], views);
}

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme-button").textContent = `Theme: ${name}`;
}

function setUpTheme() {
  let name = localStorage.getItem(THEME);
  if (!THEMES.includes(name)) name = THEMES[0];
  setTheme(name);
  byId("theme-button").addEventListener("click", () => {
    name = THEMES[(THEMES.indexOf(name) + 1) % THEMES.length];
    localStorage.setItem(THEME, name);
    setTheme(name);
  });
}

/** Show which model is served, and keep the default of max_tokens within its length. */
async function showModel() {
  try {
    const { data } = await (await ask("v1/models")).json();
    byId("model").textContent = data.map(({ id }) => id).join(", ");
    document.title = `${data[0].id} - Jackfield`;
    byId("max_tokens").value = Math.min(Number(byId("max_tokens").value), Math.floor(data[0].max_model_len / 2));
  } catch (error) {
    byId("model").textContent = error.message;
  }
}

buildSettings();
setUpTheme();
const playground = new Playground();
const live = new Live();
const decisions = new Decisions();
setUpTabs({
  live: () => {
    live.open();
    decisions.open();
  },
});
byId("settings").open = matchMedia("(min-width: 52rem)").matches;
byId("key-button").addEventListener("click", async () => {
  if (await askForKey("The key is sent with every request.")) showModel();
});
if (!byId("playground").hidden) byId("question").focus();
showModel();
