let latest = 0;

/** Draw what depends on the state: the bar, the pictures of open sections, the samples. */
async function draw() {
  const ticket = ++latest, began = performance.now(), { phases, recorded } = header;
  document.documentElement.removeAttribute("data-drawn");
  $("#slider").max = Math.max(0, phases.length - 1);
  $("#slider").value = phases.indexOf(state.phase);
  $("#slider").disabled = phases.length < 2;
  const mark = recorded.includes(state.phase) || !recorded.length ? "" : ", no record";
  $("#phase").textContent = phases.length ? `${state.phase} of ${phases.at(-1)}${mark}` : "–";
  drawSides();
  await drawToken(ticket);
  writeState();
  await drawSamples();
  for (const place of $$(".at")) {
    if (!place.closest("details:not([open])")) await drawRecord(place, ticket);
    if (ticket !== latest) return;
  }
  markPhase();
  document.documentElement.dataset.drawn = (performance.now() - began).toFixed(1);
}

/** Draw the latest record of a probe of one run that is not after the phase. */
async function drawRecord(place, ticket) {
  const name = place.dataset.probe, index = state[place.dataset.side];
  const { label, records } = header.runs[index], phases = records[name] ?? [];
  const phase = phases.findLast((recorded) => recorded <= state.phase);
  const note = place.previousElementSibling, run = header.runs.length > 1 ? label + ": " : "";
  const listed = phases.length ? "records: phases " + phases.join(", ") : "no records";
  const earlier = phase === state.phase ? "" : `, the latest record before phase ${state.phase}`;
  const isOver = records[name]?.length === 0; // all pictures are over phases
  note.textContent = isOver ? "" : phase === undefined
    ? `${run}Nothing is recorded by phase ${state.phase}; ${listed}.`
    : `${run}Phase ${phase}${earlier}; ${listed}.`;
  note.classList.toggle("earlier", !isOver && phase !== state.phase);
  const shown = `${index}-${phase}`;
  if (place.dataset.shown === shown) return;
  const over = (await block(`r${index}-over`))[name] ?? "";
  const at = phase === undefined ? "" : (await block(`r${index}-p${phase}`))[name];
  if (ticket !== latest) return;
  put(place, over + at);
  place.dataset.shown = shown;
}

/** Mark the points of the current phase in all curves over phases. */
function markPhase() {
  for (const mark of $$("svg .now")) mark.classList.remove("now");
  const words = `, phase ${state.phase}:`;
  for (const title of $$("figure svg g > title")) {
    if (title.textContent.includes(words)) title.parentElement.classList.add("now");
  }
}

/** Fill the selects of the two runs, if there are several. */
function drawSides() {
  $("#sides").hidden = header.runs.length < 2;
  for (const side of ["a", "b"]) {
    const options = header.runs.map(({ label }, i) => make("option", label, { value: i }));
    $("#" + side).replaceChildren(...options);
    $("#" + side).value = state[side];
  }
}

function step(by, everyPhase) {
  const { phases, recorded } = header;
  const stops = everyPhase || !recorded.length ? phases : recorded;
  const next = by > 0 ? stops.find((phase) => phase > state.phase)
    : stops.findLast((phase) => phase < state.phase);
  if (next !== undefined) state.phase = next;
  return draw();
}

/** Scroll to a section and open the fold that it is in. */
function show(id) {
  const target = document.getElementById(id);
  if (!target) return;
  const fold = target.closest("details") ?? $("details.fold", target);
  if (fold) fold.open = true;
  state.open = id;
  target.scrollIntoView();
  const heading = $("h2, summary", target.closest("section, details") ?? target);
  heading?.focus?.({ preventScroll: true });
  draw();
}

const showState = () => state.open ? show(state.open) : draw();

function onClick(event) {
  const link = event.target.closest("a[href^='#']"), button = event.target.closest("button");
  const picture = event.target.closest("figure svg");
  const tile = event.target.closest(".at > div > span[title]");
  if (link) {
    event.preventDefault();
    show(link.hash.slice(1));
  } else if (button?.dataset.sort) {
    sortSamples(button.dataset.sort);
    draw();
  } else if (button?.dataset.token) {
    moveToken(button.dataset.token.split(".").map(Number));
  } else if (tile) {
    openTile(tile);
  } else if (button && ACTIONS[button.id]) {
    ACTIONS[button.id]();
  } else if (picture) {
    $("#large div").replaceChildren(picture.cloneNode(true));
    $("#large").showModal();
  }
}

const ACTIONS = {
  back: () => step(-1),
  forward: () => step(1),
  help: () => $("#keys").showModal(),
  close: TOKEN_KEYS.Escape,
  "job-start": startJob,
  "job-cancel": () => postJob({ cancel: true }),
  more: () => { shownRows += MORE_ROWS; draw(); },
  selection: () => { Object.assign(state, { sort: "", find: "", every: false }); draw(); },
};

const KEYS = {
  ArrowLeft: (event) => step(-1, event.shiftKey),
  ArrowRight: (event) => step(1, event.shiftKey),
  "?": () => $("#keys").showModal(),
  "/": () => { show("samples"); $("#find")?.focus(); },
  s: () => { sortNext(); show("samples"); },
  o: () => {
    const folds = $$("details.probe"), isOpen = folds.every((fold) => fold.open);
    for (const fold of folds) fold.open = !isOpen;
  },
  t: () => state.token ? TOKEN_KEYS.Escape() : moveToken([0, 0]),
  Home: () => { state.open = ""; scrollTo(0, 0); writeState(); },
};

function onKey(event) {
  const { target, key } = event;
  const isTyping = target.matches?.("input:not([type=range], [type=checkbox]), select");
  const isWide = target.matches?.(".scroll") && target.scrollWidth > target.clientWidth;
  const isUsed = isTyping || (isWide && key.startsWith("Arrow"));  // by the browser
  if (event.ctrlKey || event.metaKey || event.altKey || isUsed || $("dialog[open]")) return;
  const isToken = event.target.closest?.("#token") && Object.hasOwn(TOKEN_KEYS, event.key);
  if (isToken) {
    event.preventDefault();
    TOKEN_KEYS[event.key]();
    return;
  }
  const digit = /^[0-9]$/.test(event.key) ? Number(event.key) || 10 : 0;
  if (!digit && !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  if (digit) show($(`#q${digit} a`)?.hash.slice(1));
  else KEYS[event.key](event);
}

function onInput(event) {
  const { id, value, checked } = event.target;
  if (id === "slider") state.phase = header.phases[value];
  else if (id === "find") state.find = value;
  else if (id === "every") state.every = checked;
  else if (id === "a" || id === "b") state[id] = Number(value);
  else return;
  shownRows = FIRST_ROWS;
  draw();
}

function start() {
  readHeader();
  readState();
  $("#steps").hidden = false;
  fillForms();
  showState();
  if (header.version) poll();
}

addEventListener("click", onClick);
addEventListener("keydown", onKey);
addEventListener("input", onInput);
addEventListener("hashchange", () => { readState(); showState(); });
addEventListener("toggle", (event) => event.target.matches("details.probe") && draw(), true);
start();
