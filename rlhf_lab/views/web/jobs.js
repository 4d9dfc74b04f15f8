/** Fill the form of samples, and that of interventions, which a served page has. */
function fillForms() {
  for (const place of $$("[data-form]")) {
    place.replaceChildren(document.getElementById(place.dataset.form).content.cloneNode(true));
  }
  const names = $("#job")?.dataset.names.split(" ");
  if (names) for (const [id, chosen] of [["base", names[0]], ["tuned", names.at(-1)]]) {
    $("#job-" + id).replaceChildren(...names.map((name) => make("option", name)));
    $("#job-" + id).value = chosen;
  }
}

/** Ask the server to compute an intervention, or to cancel the one that is running. */
async function postJob(fields) {
  const answer = await fetch("jobs", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(fields),
  });
  const state = await answer.json();
  showJob(answer.ok ? state : { status: "failed", error: [state.error] });
}

function startJob() {
  const value = (name) => $("#job-" + name).value, length = Number(value("length"));
  const fields = { base: value("base"), tuned: value("tuned"), up: value("up"),
    down: value("down") };
  postJob(length ? { ...fields, length } : fields);
}

/** Show the state of the job, which the server also sends with every poll. */
function showJob({ status, error }) {
  if (!$("#job") || !status) return;
  const isRunning = status === "running";
  $("#job-start").disabled = isRunning;
  $("#job-cancel").hidden = !isRunning;
  const words = { idle: "", done: "Done: see above." };
  $("#job-state").textContent = words[status] ?? [status, ...error ?? []].join(": ");
}
