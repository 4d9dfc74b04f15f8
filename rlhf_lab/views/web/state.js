const state = { phase: 0, sort: "", up: false, find: "", every: false, open: "", a: 0, b: 1, token: null };

/** Set the state from the address; what is unknown or out of range is left out or clamped. */
function readState() {
  const text = decodeHash(), known = new URLSearchParams(text);
  const phases = header.phases, last = phases.at(-1) ?? 0;
  const wanted = known.has("phase") ? Number(known.get("phase")) : last;
  state.phase = Number.isFinite(wanted) ? nearest(phases, wanted) : last;
  const sort = known.get("sort") ?? "";
  state.sort = header.samples.columns.includes(sort) ? sort : "";
  state.up = known.get("up") === "1";
  state.every = known.get("every") === "1";
  state.find = (known.get("find") ?? "").slice(0, 100);
  for (const side of ["a", "b"]) {
    const index = known.has(side) ? Number(known.get(side)) : state[side];
    state[side] = header.runs[index] ? index : 0;
  }
  const token = /^(\d{1,4})\.(\d{1,4})$/.exec(known.get("token") ?? "");
  state.token = token ? [Number(token[1]), Number(token[2])] : null;
  const open = text.includes("=") ? known.get("open") ?? "" : text;
  state.open = document.getElementById(open)?.closest("main") ? open : "";
}

function decodeHash() {
  try { return decodeURIComponent(location.hash.slice(1)); } catch { return ""; }
}

function nearest(phases, wanted) {
  const below = phases.filter((phase) => phase <= wanted);
  return below.at(-1) ?? phases[0] ?? 0;
}

/** Write the state into the address; a page in an iframe has none. */
function writeState() {
  const known = new URLSearchParams();
  if (state.phase !== header.phases.at(-1)) known.set("phase", state.phase);
  for (const name of ["sort", "find", "open"]) if (state[name]) known.set(name, state[name]);
  for (const name of ["up", "every"]) if (state[name]) known.set(name, "1");
  if (state.token) known.set("token", state.token.join("."));
  if (header.runs.length > 1) for (const side of ["a", "b"]) known.set(side, state[side]);
  try {
    history.replaceState(null, "", "#" + known);
  } catch { /* the state stays in memory */ }
}
