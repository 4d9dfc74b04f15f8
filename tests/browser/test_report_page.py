"""The report of a run in a real browser without a network, on light and dark pages."""

import shutil
import threading

import pytest

from rlhf_lab.probes import Run
from rlhf_lab.views.collect import GAP
from rlhf_lab.views.server import PageServer

RUNS = """
import json
from pathlib import Path
from rlhf_lab.__main__ import main

size = "--total-phases 2 --warmup-steps 1 --batch-size 16 --num-minibatches 2".split()
main(["train", "--preset", "reel", *size, "--out", "plain"])
main(["train", "--preset", "reel", *size, "--probes", "--out", "probed"])
main(["train", "--preset", "reel", *size, "--probes", "--seed", "2", "--out", "other"])
path = Path("probed/samples.jsonl")
samples = [json.loads(line) for line in path.read_text().splitlines()]
for sample in samples:
    sample["text"] = sample["text"].replace("this", "This <i>", 1)
samples[0]["true_reward"] = None
path.write_text("".join(json.dumps(sample) + chr(10) for sample in samples))
for name in ("plain", "probed", "other"):
    main(["report", name])
"""
COLUMNS = {"phase": "phase", "reward": "reward", "true reward": "true_reward", GAP: "gap"}
COLUMNS |= {"grammatical": "grammatical", "KL": "kl_per_sequence", "tokens": "response_length"}
COLUMNS |= {"text": "text"}
ROWS = """() => $$('#samples-table tbody tr').map((row) =>
  Object.fromEntries([...row.cells].map((cell) => [cell.dataset.label, cell.textContent])))"""
SEEN = """() => [$('#phase').textContent, $('#slider').value, $('#count').textContent,
  $('#samples-table').textContent, $('#find').value, $('#every').checked, $('#token').textContent,
  $('#token').hidden, $$('#sides select, #curves .now').map((x) => x.value ?? x.textContent),
  $$('[open] .side').map((side) => side.textContent.slice(0, 200))]"""
KEPT = """() => [$$('details[open] summary').map((fold) => fold.textContent), scrollY,
  document.activeElement.id, $('#find').selectionStart,
  $$('#job input, #job select').map((field) => field.value)]"""


@pytest.fixture(scope="module")
def reports(chromium, tmp_path_factory, cold_python):
    """The reports of a plain run and of two with the default probes, by name."""
    place = tmp_path_factory.mktemp("runs")
    cold_python(["-c", RUNS], cwd=place).check_returncode()
    return {name: place / name / "report.html" for name in ("plain", "probed", "other")}


def wait(page):
    """Wait until the page has drawn its state, and all probes that are open."""
    page.wait_for_selector("details.probe[open] .at:not([data-shown])", state="detached")
    page.wait_for_selector("html[data-drawn]")


def pressed(page, *keys):
    for key in keys:
        page.keyboard.press(key)
        wait(page)


def clicked(page, query):
    page.locator(query).first.click()
    wait(page)


def select_samples(run, phase):
    """Texts of the three largest gaps and all above 0.5, then of quantiles of the reward."""
    rows, gap = run.samples(phase), lambda x: round(x["reward"] - (x["true_reward"] or 9), 4)
    gaps = [x for i, x in enumerate(sorted(rows, key=gap, reverse=True)) if i < 3 or gap(x) > 0.5]
    key = lambda x: (round(x["reward"], 4), round(x["kl_per_sequence"], 4))
    ranked = sorted(rows, key=key)
    places = [int(q * (len(rows) - 1) + 0.5) for q in (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)]
    return list(dict.fromkeys(x["text"] for x in [*gaps, *(ranked[i] for i in places)]))


def steps_through_phases(page):
    """Keys, buttons and the slider change pictures, notes and marks."""
    place = page.locator("#kl_by_position .side")
    clicked(page, "#fold-kl_by_position")
    note = "Phase 1, the latest record before phase 2; records: phases 0, 1."
    assert place.locator(".note").inner_text() == note
    assert place.locator(".earlier").evaluate("x => getComputedStyle(x).borderLeftWidth") == "3px"
    assert "phase 1: exact KL and k1" in place.text_content()
    pressed(page, "ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert page.locator("#phase").inner_text() == "0 of 2"
    assert place.locator(".note").inner_text() == "Phase 0; records: phases 0, 1."
    assert not place.locator(".earlier").count()
    assert "phase 0: exact KL" in place.text_content() and "phase 1:" not in place.text_content()
    pressed(page, "o")
    assert "No word has moved" in page.locator("#words_moved").text_content()
    assert page.locator("#run_health .side .note").text_content() == ""
    late = page.locator("#value_lens .side .note").inner_text()
    assert late == "Nothing is recorded by phase 0; records: phases 2."
    page.evaluate("header.recorded = [0, 2]")
    for press, phase in (
        (lambda: clicked(page, "role=button[name='next recorded phase']"), "2 of 2"),
        (lambda: pressed(page, "Shift+ArrowLeft"), "1 of 2, no record"),
        (lambda: clicked(page, "role=button[name='previous recorded phase']"), "0 of 2"),
        (lambda: pressed(page, "ArrowRight"), "2 of 2"),
        (lambda: page.locator("role=slider[name=phase]").fill("1"), "1 of 2, no record"),
    ):
        press()
        wait(page)
        assert page.locator("#phase").inner_text() == phase
        marks = page.locator("#curves .now title").all_text_contents()
        assert all(f", phase {phase[0]}: " in mark for mark in marks)
        assert len(marks) >= 4 or phase == "2 of 2"  # samples after the last step
    pressed(page, "o")
    assert not page.locator("details.probe[open]").count()
    page.evaluate("readHeader()")


def sorts_and_searches(page, run):
    """Every column sorts all samples in both directions; a search ignores case."""
    samples = run.samples()
    for sample in samples:
        reward, true = sample["reward"], sample["true_reward"]
        sample |= {"true_reward": -99, "gap": -99} if true is None else {"gap": reward - true}
        sample |= {name: round(x, 4) for name, x in sample.items() if isinstance(x, float)}
    texts = page.locator("#samples-table td.words").all_inner_texts()
    assert [" ".join(x.split()) for x in texts] == select_samples(run, 1)
    hacked = "rows.map((row) => row.with(header.samples.columns.indexOf(header.samples.gap), 0.6))"
    assert page.evaluate(f"block('s').then((rows) => selectedRows({hacked}).length)") == 16
    count = page.locator("#count").inner_text()
    assert count.startswith(f"{len(texts)} of 16 samples of phase 1: largest gaps and all above ")
    assert page.locator("#sides").is_hidden()
    pressed(page, "/", *"THIS", "ArrowLeft")
    assert page.locator("#count").inner_text() == "16 of 16 samples of phase 1"
    rewards = [float(row["reward"]) for row in page.evaluate(ROWS)]
    assert len(rewards) == 16 and rewards == sorted(rewards, reverse=True)
    page.locator("#every").check()
    for name, field in COLUMNS.items():
        for order, arrow in (("descending", "▼"), ("ascending", "▲")):
            clicked(page, f"button[data-sort='{name}']")
            assert page.locator(f"th[aria-sort={order}]").all_inner_texts() == [f"{name} {arrow}"]
            assert page.evaluate("document.activeElement.dataset.sort") == name
            key = lambda sample, field=field: sample[field]
            expected = sorted(samples, key=key, reverse=order == "descending")[:40]
            rows = page.evaluate(ROWS)
            assert [row["text"] for row in rows] == [x["text"] for x in expected]
            if name != "text":
                numbers = [*map(key, expected)]
                cells = [row[name].replace("–", "-99") for row in rows]
                assert [*map(float, cells)] == pytest.approx(numbers, abs=6e-4)
                assert ["." in cell for cell in cells] == [isinstance(x, float) for x in numbers]
    assert page.locator("#count").inner_text() == "48 of 48 samples of all phases"
    clicked(page, "#more")
    assert len(page.evaluate(ROWS)) == 48 and page.locator("#more").is_hidden()
    page.locator("#every").set_checked(False)
    page.locator("#every").set_checked(True)
    page.locator("#samples-table tbody tr").nth(40).wait_for(state="detached")
    pressed(page, "s", "s")
    assert page.locator("th[aria-sort=descending]").inner_text() == "phase ▼"
    clicked(page, "#selection")
    assert page.locator("#selection").is_hidden() and page.locator("#find").input_value() == ""
    assert [row["text"] for row in page.evaluate(ROWS)] == select_samples(run, 1)
    pressed(page, "/", *"wasn't")
    n = sum("wasn't" in sample["text"] for sample in run.samples(1))
    assert page.locator("#count").inner_text() == f"{n} of 16 samples of phase 1" and n < 16
    clicked(page, "button[data-sort=KL]")
    clicked(page, "button[data-sort=KL]")
    page.locator("#every").check()


def shows_tokens(page, run):
    """The panel has the numbers of the token that a click or an arrow chooses."""
    record, stored = run.records("text_heatmap")[-1], run.tensors("text_heatmap", 1)
    pressed(page, "Control+t", "Meta+t")
    assert page.locator("#token").is_hidden()
    clicked(page, "#fold-text_heatmap")
    line = page.locator(".at[data-probe=text_heatmap] small", has_text="text 2,").first
    tile = line.locator("xpath=following-sibling::div[1]/span").nth(record["prefix_len"] + 5)
    assert "background" in tile.get_attribute("style")
    tile.click()
    page.locator("#token").wait_for()
    for key, row, at in (
        ("Shift", 2, 5),
        ("ArrowUp", 1, 5),
        ("ArrowLeft", 1, 4),
        ("ArrowDown", 2, 4),
        ("ArrowRight", 2, 5),
    ):
        pressed(page, key)
        token = record["tokens"][row][record["prefix_len"] + at].strip()
        title = page.locator("#token-title").inner_text()
        assert title == f"{token}: text {row} of phase 1, token {at + 1}"
        assert page.evaluate("document.activeElement.dataset.token") == f"{row}.{at}"
        assert page.locator("#token [aria-current]").count() == 1
        assert page.locator("#token-text button").count() == 26
        assert page.locator("#token-rows th").all_inner_texts() == ["", "token", "mean of the text"]
        cells = page.locator("#token-rows td").all_text_contents()
        for field in ("advantage", "value", "kl", "true_advantage", "true_value"):
            values = stored[field][row]
            assert cells.pop(0) == field.replace("true_", "exact ")
            for number in (values[at], values.mean()):
                assert float(cells.pop(0)) == pytest.approx(number.item(), rel=6e-3, abs=1e-5)
        assert cells[:2] == ["reward of the text", ""]
        assert float(cells[2]) == pytest.approx(record["rewards"][row], rel=6e-3)
    assert page.evaluate("getComputedStyle($('[aria-current]')).background.startsWith('rgb(')")
    assert page.evaluate("[mean([0, null, 4]), mean([null]), format(null)]") == [2, None, "–"]
    clicked(page, "#token-text button")
    pressed(page, "ArrowLeft")
    assert "text 2 of phase 1, token 1" in page.locator("#token-title").inner_text()
    clicked(page, "#fold-text_heatmap")
    clicked(page, "#q3 a")
    page.evaluate("moveToken([99, 99])")
    assert "text 3 of phase 1, token 26" in page.locator("#token-title").inner_text()


def is_restored_from_its_address(page):
    """A link restores all that a reader chose; what is unknown in it is ignored."""
    before, address = page.evaluate(SEEN), page.url
    for hash in ("#phase=1e9&sort=constructor&open=__proto__", "#%E0%A4%A", "#phase=NaN", "#q1"):
        changed = "addEventListener('hashchange', () => done())"
        page.evaluate(f"new Promise((done) => {{ {changed}; location.hash = '{hash}'; }})")
        page.wait_for_selector("html[data-drawn]")
        assert page.locator("#phase").inner_text() == "2 of 2"
        assert page.locator("#token").is_hidden() and page.locator("#selection").is_hidden()
        assert page.evaluate("state.open") == hash[1:] * (hash == "#q1")
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("html[data-drawn]")
    assert page.evaluate(SEEN) == before
    pressed(page, "t")
    assert page.locator("#token").is_hidden() and "token" not in page.url
    for i in range(1, 11):
        link = page.locator(f"#q{i} a")
        if link.count():
            pressed(page, str(i % 10))
            place = link.get_attribute("href").removeprefix("#")
            assert page.locator(f"#{place}").is_visible() and f"open={place}" in page.url
            section = f"$('#{place}').closest('section, details')"
            assert page.evaluate(f"{section}.contains(document.activeElement)")
            assert page.evaluate(f"$('details', {section})?.open ?? true")
    pressed(page, "Home")
    assert page.evaluate("scrollY") == 0 and "open=" not in page.url
    for press, dialog in (
        (lambda: pressed(page, "?"), "#keys"),
        (lambda: clicked(page, "role=button[name=keys]"), "#keys"),
        (lambda: clicked(page, "#curves svg"), "#large"),
    ):
        press()
        pressed(page, "ArrowLeft", "t")
        assert page.locator(dialog).is_visible() and page.locator("#token").is_hidden()
        pressed(page, "Escape")
        assert page.locator(dialog).is_hidden() and page.locator("#phase").inner_text() == "1 of 2"
    assert page.evaluate("$('#large svg').outerHTML === $('#curves svg').outerHTML")
    assert page.locator("role=region[name=samples]").count() == 1
    pressed(page, "ArrowLeft")
    assert "phase=0" in page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_is_whole_and_legible_without_a_network(chromium, reports, legible, scheme):
    context = chromium.new_context(
        offline=True, color_scheme=scheme, viewport={"width": 1280, "height": 900}
    )
    page, report, requests, messages = context.new_page(), reports["probed"], [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn]")
    if scheme == "light":
        steps_through_phases(page)
        sorts_and_searches(page, Run(report.parent))
        shows_tokens(page, Run(report.parent))
        is_restored_from_its_address(page)
    pressed(page, "o", "ArrowLeft")
    ledger = page.locator("h3", has_text="step_ledger").locator("xpath=following::table[2]")
    assert ledger.locator("th").all_inner_texts()[-1] == "share"
    assert ledger.evaluate("t => t.offsetWidth <= t.parentElement.clientWidth")
    widths = page.locator("main svg").evaluate_all("all => all.map(s => s.getBBox().width)")
    assert len(widths) > 4 and min(widths) > 0
    assert page.evaluate("document.body.scrollWidth <= window.innerWidth")
    urls = {url.partition("#")[0] for url in requests if not url.startswith("data:")}
    assert urls - {"about:blank"} == {report.as_uri()} and messages == []
    legible(page, "body")
    stroke = page.evaluate("getComputedStyle($('#curves .now circle')).stroke")
    assert stroke == {"light": "rgb(28, 30, 33)", "dark": "rgb(255, 255, 255)"}[scheme]
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.body.scrollWidth <= window.innerWidth")
    label = "getComputedStyle($('#samples td[data-label=KL]'), '::before').content"
    assert page.evaluate(label) == '"KL "'
    context.close()


def test_view_grows_and_keeps_its_place(chromium, reports, tmp_path):
    run = shutil.copytree(reports["plain"].parent, tmp_path / "run")
    info = (run / "run.json").read_text()
    (run / "run.json").write_text(info.replace('"finished"', '"running"'))
    whole = {name: (run / name).read_text() for name in ("metrics.jsonl", "samples.jsonl")}
    for name, text in whole.items():
        lines = [line for line in text.splitlines(True) if '"phase": 0' in line]
        (run / name).write_text("".join(lines))
    page, messages = chromium.new_page(), []
    page.on("console", lambda message: messages.append(message.text))
    page.add_init_script("window.timers = []; window.setTimeout = (...x) => timers.push(x)")

    def poll():
        """Run the timer of the page, and return the time of the next one."""
        assert page.evaluate("timers.length") == 1
        page.evaluate("timers.pop()[0]()")
        return page.evaluate("timers[0][1]")

    with PageServer([run]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(server.address)
        page.wait_for_selector("html[data-drawn]")
        page.locator("#live", has_text="live").wait_for()
        assert page.locator("#phase").inner_text() == "0 of 0"
        assert page.locator("#slider").is_disabled()
        page.locator("#arguments summary").click()
        page.locator("#job-up").fill("liked")
        page.locator("#job-base").select_option("1")
        page.locator("#job-up").blur()
        pressed(page, "/", *"movi")
        for name, text in whole.items():
            (run / name).write_text(text)
        (run / "run.json").write_text(info)
        assert poll() >= 1000 and "finished" in page.locator("#state").inner_text()
        assert page.locator("#phase").inner_text() == "2 of 2"
        pressed(page, "e", "ArrowLeft")
        assert page.locator("#count").inner_text() == "16 of 16 samples of phase 2"
        clicked(page, "#back")
        page.locator("role=searchbox[name='search the samples']").focus()
        page.evaluate("scrollTo(0, 300)")
        kept, seen = page.evaluate(KEPT), page.evaluate(SEEN)
        assert kept[0] and kept[1:] == [300, "find", 4, ["1", "last", "liked", "hated", ""]]
        assert seen[0] == "1 of 2" and seen[4] == "movie"
        page.evaluate("refresh()")
        assert page.evaluate(KEPT) == kept and page.evaluate(SEEN) == seen
        for broken in ("**/state.json", server.address):
            (run / "run.json").touch()
            page.route(broken, lambda route: route.fulfill(status=500))
            waits = [poll() for _ in range(6)]
            assert waits == [min(30_000, waits[0] * 2**i) for i in range(6)] and waits[0] < 20_000
            expected = f"no answer; next try in {round(waits[-1] / 1000)} s"
            assert page.locator("#live").inner_text() == expected
            page.unroute(broken)
            assert 1000 <= poll() < 20_000 and page.locator("#live").inner_text() == "live"
        server.jobs["jobs"].state = {"status": "failed", "error": ["stopped"]}
        assert poll() and page.locator("#job-state").inner_text() == "failed: stopped"
        page.locator("#job-length").fill("7")
        button = page.locator("#job-start")
        for answer, status in (
            ({"status": 400, "json": {"error": "no such word"}}, "failed: no such word"),
            ({"json": {"status": "done"}}, "Done: see above."),
            ({"json": {"status": "running"}}, "running"),
        ):
            page.route("**/jobs", lambda route, _, answer=answer: route.fulfill(**answer))
            with page.expect_response("**/jobs") as sent:
                button.click()
            page.locator("#job-state", has_text=status).wait_for()
            assert button.is_disabled() == (status == "running")
            assert page.locator("#job-cancel").is_visible() == (status == "running")
        expected = {"base": "1", "tuned": "last", "up": "liked", "down": "hated", "length": 7}
        assert sent.value.request.post_data_json == expected
        assert sent.value.request.headers["content-type"] == "application/json"
        page.route("**/jobs", lambda route: route.fulfill(json={"status": "idle"}))
        with page.expect_request("**/jobs") as sent:
            page.locator("#job-cancel").click()
        assert sent.value.post_data_json == {"cancel": True}
        page.locator("#job-cancel").wait_for(state="hidden")
        server.shutdown()
    assert not [text for text in messages if "500" not in text and "400" not in text]
    page.close()


def test_two_runs_are_shown_side_by_side(chromium, reports):
    page, messages = chromium.new_page(viewport={"width": 390, "height": 844}), []
    page.on("console", lambda message: messages.append(message.text))
    with PageServer([path.parent for path in reports.values()]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(server.address + "#open=kl_by_position&phase=1&a=1&b=7")
        page.wait_for_selector("html[data-drawn]")
        notes = page.locator("#kl_by_position .side .note")
        assert "2 probed: Phase 1; records" in notes.nth(0).inner_text()
        assert "1 plain: Nothing is recorded by phase 1" in notes.nth(1).inner_text()
        runs = [row["run"] for row in page.evaluate(ROWS)]
        assert runs == sorted(runs) and set(runs) == {"1 plain", "2 probed", "3 other"}
        page.locator("#b").select_option(label="2 probed")
        page.wait_for_selector("#kl_by_position [data-side=b] svg")
        assert "&a=1&b=1" in page.url
        sides = page.locator("#kl_by_position .at")
        before = sides.all_text_contents()
        page.locator("#a").select_option(label="3 other")
        wait(page)
        assert before[0] == before[1] == sides.nth(1).text_content() != sides.nth(0).text_content()
        page.locator("#a").select_option(label="1 plain")
        page.wait_for_selector("#kl_by_position [data-side=a]:empty", state="attached")
        seen = page.evaluate(SEEN)
        assert [page.locator(name).input_value() for name in ("#a", "#b")] == ["0", "1"]
        page.goto("about:blank")
        page.goto(server.address + "#open=kl_by_position&phase=1")
        page.wait_for_selector("html[data-drawn]")
        assert page.evaluate(SEEN) == seen
        clicked(page, "#fold-step_ledger")
        table = page.locator("[data-side=b][data-probe=step_ledger] .scroll").first
        assert table.evaluate("table => table.scrollWidth > table.clientWidth")
        assert page.evaluate("document.body.scrollWidth <= window.innerWidth")
        table.focus()
        pressed(page, "ArrowLeft")
        assert page.locator("#phase").inner_text() == "1 of 2"
        page.locator("#state a", has_text="2 probed").click()
        page.locator("h1", has_text="probed").wait_for()
        server.shutdown()
    assert not messages
    page.close()
