const LONGEST_WAIT = 30000;
let wait = 1000;

/** Ask whether the run has grown, and replace the page's content if it has. */
async function poll() {
  try {
    const answer = await fetch("state.json", { cache: "no-store" });
    const { version, job } = await answer.json(), began = performance.now();
    if (version !== header.version) await refresh();
    showJob(job);
    wait = Math.max(1000, 2 * (performance.now() - began));
    $("#live").textContent = "live";
  } catch {
    wait = Math.min(LONGEST_WAIT, 2 * wait);
    $("#live").textContent = `no answer; next try in ${Math.round(wait / 1000)} s`;
  }
  setTimeout(poll, wait);
}

/** Replace bar, sections and data; phase, folds, scrolling and typing stay as they are. */
async function refresh() {
  const page = await fetch("./", { cache: "no-store" });
  if (!page.ok) throw new Error(String(page.status));
  const next = new DOMParser().parseFromString(await page.text(), "text/html");
  const isLast = state.phase === header.phases.at(-1), place = scrollY;
  const open = new Set($$("details[open]").map(foldName));
  const { id, selectionStart } = document.activeElement;
  const typed = new Map($$("#job input, #job select").map((field) => [field.id, field.value]));
  for (const id of ["state", "main", "data"]) {
    document.getElementById(id).replaceWith(document.importNode(next.getElementById(id), true));
  }
  fillForms();
  for (const [name, value] of typed) document.getElementById(name).value = value;
  for (const fold of $$("details")) fold.open = open.has(foldName(fold));
  readHeader();
  if (isLast) state.phase = header.phases.at(-1) ?? 0;
  const focused = document.getElementById(id);
  if (id === "find") $("#find").value = state.find;
  focused?.focus({ preventScroll: true });
  if (id === "find") focused.setSelectionRange(selectionStart, selectionStart);
  await draw();
  scrollTo(0, place);
}

const foldName = (fold) => $("summary", fold).firstChild.textContent;
