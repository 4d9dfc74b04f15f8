/** Return the texts of run A that were stored last, up to the phase of the state. */
async function storedTexts() {
  const phase = header.runs[state.a].tokens.findLast((stored) => stored <= state.phase);
  return phase === undefined ? null : { phase, ...await block(`r${state.a}-t${phase}`) };
}

/** Draw the panel of a token with its numbers. */
async function drawToken(ticket) {
  const panel = $("#token"), texts = state.token ? await storedTexts() : null;
  if (ticket !== latest) return;
  panel.hidden = !texts;
  if (!texts) return;
  const row = Math.min(state.token[0], texts.tokens.length - 1), tokens = texts.tokens[row];
  const at = Math.min(state.token[1], tokens.length - texts.start - 1);
  state.token = [row, at];
  const where = `text ${row} of phase ${texts.phase}, token ${at + 1}`;
  $("#token-title").textContent = `${tokens[texts.start + at].trim() || "blank"}: ${where}`;
  const buttons = tokens.map((token, i) => {
    const tag = i < texts.start ? "span" : "button", tile = make(tag, token);
    if (i >= texts.start) tile.dataset.token = `${row}.${i - texts.start}`;
    if (i === texts.start + at) tile.ariaCurrent = "true";
    return tile;
  });
  $("#token-text").replaceChildren(...buttons);
  $("#token-rows").replaceChildren(
    line("th", "", "token", "mean of the text"),
    ...Object.entries(texts.columns).map(([name, values]) =>
      line("td", name, format(values[row][at]), format(mean(values[row])))),
    line("td", "reward of the text", "", format(texts.rewards[row])));
}

function line(tag, ...cells) {
  const row = make("tr", "");
  row.append(...cells.map((cell, i) => make(tag, cell, { className: i ? "" : "words" })));
  return row;
}

const format = (value) => value === null || value === undefined ? "–" : value.toPrecision(3);

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** Open the panel at a token of a colored text of the probe that stores them. */
async function openTile(tile) {
  const name = tile.closest(".at").dataset.probe, line = tile.parentElement;
  const label = /^text (\d+)\b/.exec(line.previousElementSibling?.textContent ?? "");
  const texts = await storedTexts();
  if (!label || texts?.probe !== name) return;
  const row = Number(label[1]), tiles = [...line.children];  // without tiles of left padding
  const at = texts.tokens[row].length - tiles.length + tiles.indexOf(tile) - texts.start;
  if (at >= 0) moveToken([row, at]);
}

async function moveToken(token) {
  state.token = token.map((part) => Math.max(0, part));
  await draw();
  $("#token [aria-current]")?.focus({ preventScroll: true });
}

const TOKEN_KEYS = {
  ArrowLeft: () => moveToken([state.token[0], state.token[1] - 1]),
  ArrowRight: () => moveToken([state.token[0], state.token[1] + 1]),
  ArrowUp: () => moveToken([state.token[0] - 1, state.token[1]]),
  ArrowDown: () => moveToken([state.token[0] + 1, state.token[1]]),
  Escape: () => { state.token = null; draw(); },
};
