"""The report of a run in a real browser without a network, on light and dark pages."""

import shutil
import threading

import pytest

from rlhf_lab.probes import Run
from rlhf_lab.views.report import runs_page
from rlhf_lab.views.server import PageServer

RUNS = """
from rlhf_lab import RLHFArgs, RLHFTrainer
from rlhf_lab.__main__ import main
from rlhf_lab.probes import attach, default_suite

size = "--total-phases 2 --warmup-steps 1 --batch-size 16 --num-minibatches 2".split()
main(["train", "--preset", "reel", *size, "--out", "plain"])
args = RLHFArgs(preset="reel", total_phases=2, warmup_steps=1, batch_size=16, num_minibatches=2)
trainer = RLHFTrainer(args, out="probed")
attach(trainer, default_suite(trainer))
trainer.train()
for name in ("plain", "probed"):
    main(["report", name])
"""


@pytest.fixture(scope="module")
def reports(chromium, tmp_path_factory, cold_python):
    """The reports of a plain run and of one with the default probes, by name."""
    place = tmp_path_factory.mktemp("runs")
    cold_python(["-c", RUNS], cwd=place).check_returncode()
    return {name: place / name / "report.html" for name in ("plain", "probed")}


def pressed(page, *keys):
    """Press keys, and wait until the page has drawn what they change."""
    for key in keys:
        page.keyboard.press(key)
        page.wait_for_selector("html[data-drawn]")


def select_samples(run, phase):
    """Texts of the three largest gaps and all above 0.5, then of quantiles of the reward."""
    rows, gap = run.samples(phase), lambda x: round(x["reward"] - x["true_reward"], 4)
    gaps = [x for i, x in enumerate(sorted(rows, key=gap, reverse=True)) if i < 3 or gap(x) > 0.5]
    key = lambda x: (round(x["reward"], 4), round(x["kl_per_sequence"], 4))
    ranked = sorted(rows, key=key)
    places = [int(q * (len(rows) - 1) + 0.5) for q in (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)]
    return list(dict.fromkeys(x["text"] for x in [*gaps, *(ranked[i] for i in places)]))


def is_used_by_keyboard(page, run):
    """Phases step from record to record; samples are searched and sorted; a link restores all."""
    texts = page.locator("#samples-table td.words").all_inner_texts()
    assert [" ".join(x.split()) for x in texts] == select_samples(run, 2)
    pictures = page.locator(".at[data-probe=kl_by_position]")
    assert page.locator("#phase").inner_text() == "2 of 2"
    pressed(page, "ArrowLeft")
    assert "phase 1: exact KL and k1" in pictures.text_content()
    pressed(page, "ArrowLeft", "ArrowLeft")
    assert page.locator("#phase").inner_text() == "0 of 2"
    assert "phase 0: exact KL" in pictures.text_content()
    assert "No word has moved" in page.locator("#words_moved").text_content()
    assert page.locator("#run_health .side .note").text_content() == ""
    assert page.locator("#curves .now").count() >= 4
    pressed(page, "/", *"movie")
    page.locator("button[data-sort=KL]").click()
    page.wait_for_selector("html[data-drawn]")
    assert page.locator("#count").inner_text() == "16 of 16 samples of phase 0"
    page.locator("#every").check()
    page.wait_for_selector("th[aria-sort=descending] button[data-sort=KL]")
    assert page.locator("#count").inner_text() == "48 of 48 samples of all phases"
    column = page.locator("#samples-table td[data-label=KL]").all_inner_texts()
    assert len(column) == 40 and sorted(map(float, column), reverse=True) == [*map(float, column)]
    page.locator("#more").click()
    page.locator("#samples-table tbody tr").nth(47).wait_for()
    for i in range(1, 11):
        link = page.locator(f"#q{i} a")
        if link.count():
            pressed(page, str(i % 10))
            assert page.locator(link.get_attribute("href")).is_visible()
    address = page.url
    assert "phase=0" in address and "sort=KL" in address and "find=movie" in address
    for hash in ("#phase=1e9&sort=constructor&open=__proto__", "#%E0%A4%A", "#phase=NaN", "#q1"):
        page.goto("about:blank")
        page.goto(address.split("#")[0] + hash)
        page.wait_for_selector("html[data-drawn]")
        assert page.locator("#phase").inner_text() == "2 of 2"
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("html[data-drawn]")
    assert page.locator("#phase").inner_text() == "0 of 2"
    assert page.locator("#find").input_value() == "movie"
    assert page.evaluate("mean([0, null, 4])") == 2
    page.locator("#samples .scroll").focus()
    pressed(page, "?", "Escape", "o", "ArrowRight", "t", "ArrowRight", "ArrowRight", "ArrowDown")
    assert "text 1 of phase 1, token 3" in page.locator("#token-title").inner_text()
    for name in ("exact value", "advantage"):
        tiles = page.locator(f".at[data-probe=text_heatmap] span[title^='{name}']")
        tile = tiles.nth(5 + 26 + 2)  # after the color key and the first text
        value = page.locator("#token-rows tr", has_text=name).locator("td").nth(1).inner_text()
        assert abs(float(value) - float(tile.get_attribute("title").split()[-1])) < 0.005
        assert "background" in tile.get_attribute("style")
    assert "token=1.2" in page.url
    tile.click()
    assert "text 1 of phase 1, token 3" in page.locator("#token-title").inner_text()
    page.evaluate("moveToken([99, 99])")
    assert "text 3 of phase 1, token 26" in page.locator("#token-title").inner_text()
    pressed(page, "Escape")
    assert page.locator("#token").is_hidden() and "token" not in page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["plain", "probed"])
def test_a_report_is_whole_and_legible_without_a_network(chromium, reports, legible, name, scheme):
    context = chromium.new_context(
        offline=True, color_scheme=scheme, viewport={"width": 1280, "height": 900}
    )
    page, asked, said = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(reports[name].as_uri())
    page.wait_for_selector("html[data-drawn]")
    if name == "probed":
        page.keyboard.press("o")
        page.wait_for_selector("details.probe[open] .at svg")

    assert [url for url in asked if not url.startswith("data:")] == [reports[name].as_uri()]
    widths = page.locator("main svg").evaluate_all("all => all.map(s => s.getBBox().width)")
    assert len(widths) > 4 and min(widths) > 0
    assert page.evaluate("document.body.scrollWidth <= window.innerWidth")
    if name == "probed":
        ledger = page.locator("h3", has_text="step_ledger").locator("xpath=following::table[2]")
        assert ledger.locator("th").all_inner_texts()[-1] == "share"
        assert ledger.evaluate("t => t.offsetWidth <= t.parentElement.clientWidth")
        is_used_by_keyboard(page, Run(reports[name].parent))
    assert said == []
    legible(page, "body")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.body.scrollWidth <= window.innerWidth")
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
    with PageServer([run]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(server.address)
        page.wait_for_selector("html[data-drawn]")
        assert page.locator("#phase").inner_text() == "0 of 0"
        assert page.locator("#job-base option").all_inner_texts()[-1] == "last"
        page.locator("#arguments summary").click()
        page.locator("#job-up").fill("liked")
        page.locator("#job-up").blur()
        pressed(page, "/", *"movi")
        for name, text in whole.items():
            (run / name).write_text(text)
        page.locator("#phase", has_text="2 of 2").wait_for()
        pressed(page, "e")
        assert page.locator("#find").input_value() == "movie"
        assert page.locator("#count").inner_text() == "16 of 16 samples of phase 2"
        assert page.locator("#arguments details").get_attribute("open") is not None
        assert page.locator("#job-up").input_value() == "liked"
        page.route("**/jobs", lambda route: route.fulfill(json={"status": "idle"}))
        page.locator("#job-length").fill("7")
        with page.expect_request("**/jobs") as sent:
            page.locator("#job-start").click()
        expected = {"base": "0", "tuned": "last", "up": "liked", "down": "hated", "length": 7}
        assert sent.value.post_data_json == expected
        buttons = "[$('#job-start').disabled, $('#job-cancel').hidden]"
        assert page.evaluate(f"showJob({{ status: 'running' }}), {buttons}") == [True, False]
        server.shutdown()
    page.locator("#live", has_text="no answer").wait_for()
    assert not [text for text in messages if "ERR_CONNECTION_" not in text]
    page.close()


def test_two_runs_are_shown_side_by_side(chromium, reports, tmp_path):
    page, messages = chromium.new_page(viewport={"width": 390, "height": 844}), []
    page.on("console", lambda message: messages.append(message.text))
    (tmp_path / "page.html").write_text(
        runs_page([Run(path.parent) for path in reports.values()]), encoding="utf-8"
    )
    page.goto((tmp_path / "page.html").as_uri() + "#open=kl_by_position&phase=1&a=1&b=7")
    page.wait_for_selector("html[data-drawn]")
    notes = page.locator("#kl_by_position .side .note")
    assert "2 probed: Phase 1; records" in notes.nth(0).inner_text()
    assert "1 plain: Nothing is recorded by phase 1" in notes.nth(1).inner_text()
    page.locator("#b").select_option(label="2 probed")
    page.wait_for_selector("#kl_by_position [data-side=b] svg")
    assert "&a=1&b=1" in page.url and not messages
    assert page.evaluate("document.body.scrollWidth <= window.innerWidth")
    page.close()
