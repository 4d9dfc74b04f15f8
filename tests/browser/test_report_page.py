"""The report of a run in a real browser without a network, on light and dark pages."""

import os
import re
import subprocess
import sys

import pytest

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
def reports(chromium, tmp_path_factory):
    """The reports of a plain run and of one with the default probes, by name."""
    place = tmp_path_factory.mktemp("runs")
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", RUNS], cwd=place, env=env, check=True)
    return {name: place / name / "report.html" for name in ("plain", "probed")}


def ledger_is_whole(page):
    """The last table of the ledger's section fits on the page, and its shares are its sum.

    The shares are rounded to five decimals: 26 of them are off by less than 26 * 5e-6.
    """
    heading = page.locator("h3", has_text="step_ledger")
    table = heading.locator("xpath=following::table[2]")
    assert table.locator("th").all_inner_texts()[-1] == "share"
    assert table.evaluate("t => t.offsetWidth <= t.parentElement.clientWidth")
    shares = [float(row.split("\t")[-1]) for row in table.locator("tbody tr").all_inner_texts()]
    said = heading.locator("xpath=following::p[starts-with(., 'Sequence')][1]").inner_text()
    total = float(re.search(r"adds (-?[\d.]+);", said)[1])
    assert len(shares) > 10 and abs(sum(shares) - total) < 26 * 5e-6
    terms = heading.locator("xpath=following::table[1]")
    last = terms.locator("tbody tr").last.inner_text().split("\t")
    numbers = [float(cell.split(" [")[0]) for cell in last]
    row = dict(zip(terms.locator("th").all_inner_texts(), numbers, strict=True))
    parts = row["clipped surrogate"] - row["− value loss"] + row["+ entropy bonus"]
    assert abs(parts - row["− KL penalty"] - row["= objective"]) < 1e-4
    assert f"the objective, {row['= objective']:.3f}"[:-1] in said


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["plain", "probed"])
def test_a_report_is_whole_and_legible_without_a_network(
    chromium, reports, legible, pictures, name, scheme
):
    context = chromium.new_context(
        offline=True, color_scheme=scheme, viewport={"width": 1280, "height": 900}
    )
    page, asked, said = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(reports[name].as_uri())

    assert [url for url in asked if not url.startswith("data:")] == [reports[name].as_uri()]
    assert said == []
    widths = page.locator("svg").evaluate_all("all => all.map(s => s.getBBox().width)")
    assert len(widths) > 4 and min(widths) > 0
    assert page.evaluate("document.body.scrollWidth <= window.innerWidth")
    if name == "probed":
        ledger_is_whole(page)
    legible(page, "body")
    page.screenshot(path=pictures / f"report_{name}_{scheme}.png", full_page=True)
    context.close()
