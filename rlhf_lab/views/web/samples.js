const FIRST_ROWS = 40, MORE_ROWS = 200, LARGEST_GAPS = 3;
const QUANTILES = [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1];
let shownRows = FIRST_ROWS;

/** Return the rows of each run's phase with the largest gaps (or KLs) and quantiles of the reward.
 *  All gaps of hacked samples are among them. */
function selectedRows(samples) {
  const { columns, gap, hacked } = header.samples, extreme = columns.includes(gap) ? gap : "KL";
  const value = (row, name) => row[columns.indexOf(name)] ?? 0;
  const chosen = new Set();
  for (const { label } of header.runs) {
    const rows = samples.filter((row) => row[0] === state.phase
      && (header.runs.length === 1 || value(row, "run") === label));
    if (!rows.length) continue;
    const largest = [...rows].sort((a, b) => value(b, extreme) - value(a, extreme));
    const ranked = [...rows].sort((a, b) =>
      value(a, "reward") - value(b, "reward") || value(a, "KL") - value(b, "KL"));
    const isShown = (row, i) => i < LARGEST_GAPS || (extreme === gap && value(row, gap) > hacked);
    if (columns.includes(extreme)) largest.filter(isShown).forEach((row) => chosen.add(row));
    for (const q of QUANTILES) chosen.add(ranked[Math.round(q * (ranked.length - 1))]);
  }
  return [...chosen];
}

/** Return the rows of the table in the order of the state: the selected ones by default. */
function orderedRows(samples) {
  const { columns } = header.samples, text = columns.length - 1;
  const find = state.find.toLowerCase(), column = columns.indexOf(state.sort);
  if (column < 0 && !find && !state.every) return selectedRows(samples);
  const rows = samples.filter((row) =>
    (state.every || row[0] === state.phase) && row[text].toLowerCase().includes(find));
  const key = column < 0 ? columns.indexOf("reward") : column, sign = state.up ? 1 : -1;
  const value = (row) => row[key] ?? -Infinity;
  return rows.sort((a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
}

async function drawSamples() {
  const table = $("#samples-table");
  if (!table) return;
  const samples = await block("s"), { columns } = header.samples;
  const rows = orderedRows(samples);
  const head = make("tr", "");
  for (const name of columns) {
    const cell = make("th", "", { className: name === "text" ? "words" : "" });
    const isSorted = name === state.sort, arrow = isSorted ? (state.up ? " ▲" : " ▼") : "";
    const button = make("button", name + arrow);
    button.dataset.sort = name;
    cell.ariaSort = isSorted ? (state.up ? "ascending" : "descending") : "none";
    cell.append(button);
    head.append(cell);
  }
  const { sort } = document.activeElement.dataset;
  $("thead", table).replaceChildren(head);
  if (sort) $$("button", head)[columns.indexOf(sort)].focus({ preventScroll: true });
  $("tbody", table).replaceChildren(...rows.slice(0, shownRows).map(sampleRow));
  const there = samples.filter((row) => state.every || row[0] === state.phase).length;
  const where = state.every ? "all phases" : "phase " + state.phase;
  const isSelection = !state.sort && !state.find && !state.every;
  const { gap, hacked } = header.samples;
  const extreme = columns.includes(gap) ? `gaps and all above ${hacked}` : "KLs";
  const order = isSelection ? `: largest ${extreme}, then from lowest to highest reward` : "";
  $("#count").textContent = `${rows.length} of ${there} samples of ${where}${order}`;
  $("#more").hidden = rows.length <= shownRows;
  $("#selection").hidden = isSelection;
  if (document.activeElement !== $("#find")) $("#find").value = state.find;
  $("#every").checked = state.every;
}

function sampleRow(values) {
  const row = make("tr", "");
  for (const [i, name] of header.samples.columns.entries()) {
    const value = values[i], isPlain = ["phase", "run", "tokens", "text"].includes(name);
    const text = value === null ? "–" : isPlain ? value : value.toFixed(3);
    const cell = make("td", text, { className: name === "text" ? "words" : "" });
    cell.dataset.label = name;
    row.append(cell);
  }
  return row;
}

function sortSamples(name) {
  state.up = state.sort === name && !state.up;
  state.sort = name;
  shownRows = FIRST_ROWS;
}

function sortNext() {
  const { columns } = header.samples;
  state.sort = columns[columns.indexOf(state.sort) + 1] ?? "";
  state.up = false;
}
