"""Benchmarks: pages match their records, medians and tables by hand, small real measurements."""

import json
import re
import runpy

import numpy as np
import pytest

from benchmarks import diffing, preferences
from benchmarks.__main__ import main
from benchmarks.contestants import OTHERS
from benchmarks.page import page, probe_cost, rows
from benchmarks.probes import KEYS, PAGE, RESULTS, TIMED, costs_page
from benchmarks.records import read_records
from benchmarks.results.__main__ import main as results
from benchmarks.results.learned import biased_pairs
from benchmarks.results.reel import ExactCurve
from benchmarks.results.settings import all_rows, command_line, method_rows
from rlhf_lab.__main__ import parse
from rlhf_lab.config.presets import PAPER_METHODS
from rlhf_lab.organism import REWARDS, Grammar, read_features
from rlhf_lab.organism.rewards import sentiment_logit
from tests.organism.oracles import optimum_by_programming
from tools.prose import ROOT
from tools.prose import page as docs_page

STORED = ROOT / "benchmarks" / "results"


def test_pages_match_their_records():
    stored = read_records(STORED / "speed.jsonl", frozenset())
    text = page(stored, "[speed.jsonl](../benchmarks/results/speed.jsonl)")
    assert text == (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    stored = read_records(STORED / "preferences.jsonl", preferences.KEYS)
    assert preferences.table(stored) in docs_page("preferences")
    text, stored = PAGE.read_text(encoding="utf-8"), read_records(RESULTS, KEYS)
    assert text == costs_page(text, stored)  # of every probe
    assert stored[0]["probes"].keys() | stored[0]["left_out"].keys() == TIMED.keys()


def test_results_page_matches_its_records(tmp_path):
    docs = tmp_path / "results.md"
    assert results(["--page", "--records", str(STORED), "--docs", str(docs)]) == 0
    for made in (docs, tmp_path / "results-methods.svg"):
        assert made.read_bytes() == (ROOT / "docs" / made.name).read_bytes()


@pytest.mark.slow
def test_verifiable_rewards_page_matches_its_records():
    made = runpy.run_path(str(ROOT / "docs" / "make_verifiable_rewards.py"))["page"]()
    for name, text in made.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, name


def test_numbers_of_the_diffing_page_match_their_records():
    tables = "".join(sheet.markdown() for sheet in diffing.tables())
    numbers = re.findall(r"[+-]?\d\.\d+ \(.+?\)", docs_page("diffing"))
    assert len(numbers) >= 6 and [x for x in numbers if x not in tables] == []


def answer(seconds: float, peak: int = 100, **stages: float) -> dict:
    halves = {"rollout": seconds / 4, "learning": seconds / 2}
    return {"seconds": seconds, **halves, "stages": stages, "peak_bytes": peak}


def test_rows_are_medians_with_ratios_and_the_highest_peak():
    phases = [answer(4.0, s=1.0), answer(8.0, 300, s=5.0), answer(2.0, s=2.0)]
    figures = {
        "ours": {"loaded_bytes": 40, "phases": phases},
        "other": {"loaded_bytes": 10, "phases": [answer(6.0), answer(10.0)]},
    }
    ours, other = rows(figures)
    assert (ours.seconds, ours.rollout, ours.learning, ours.ratio) == (4.0, 1.0, 2.0, 1.0)
    assert (ours.over_model_bytes, ours.stages) == (260, {"s": 2.0})
    assert (other.seconds, other.ratio, other.over_model_bytes) == (8.0, 2.0, 90)
    figures = {
        "ours-run": {"phases": [answer(4.0), answer(6.0)]},
        "ours-run-with-probes": {
            "phases": [answer(5.0, **{"probes/a": 0.5}), answer(6.0, **{"probes/a": 0.25})]
        },
    }
    assert probe_cost(figures) == (pytest.approx(0.1), {"a": 0.75})


@pytest.mark.nightly
def test_bench_times_a_phase_and_writes_the_page(tmp_path, warm_python, surroundings):
    out, docs = tmp_path / "nano.jsonl", tmp_path / "performance.md"
    size = "--shape nano --batch-size 8 --gen-len 6 --repeats 1 --threads 1 --device cpu".split()
    command = ["-m", "benchmarks", *size, "--out", str(out)]
    env = surroundings | {"COLUMNS": "120", "RLHF_LAB_PEERS": str(tmp_path)}
    done = warm_python.run(command, env=env)
    assert done.returncode == 0, done.stderr
    assert "seconds of each stage" in done.stdout and done.stdout.count("make bench-peers") == 2
    result = json.loads(out.read_text())
    assert [result["work"][n] for n in ("batch_size", "prefix_len", "gen_len")] == [8, 4, 6]
    assert result["contestants"].keys() == {"ours", *OTHERS[:4]}
    for contestant in result["contestants"].values():
        (phase,) = contestant["phases"]
        assert len(phase["stages"]) == 6 and phase["peak_bytes"] > 0
        assert phase["rollout"] + phase["learning"] == pytest.approx(phase["seconds"], rel=0.01)
    assert main(["--write-docs", "--out", str(out), "--docs", str(docs)]) == 0
    assert "| nano, cpu, fp32 | ours |" in docs.read_text()
    assert "[nano.jsonl](nano.jsonl)" in docs.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("row", all_rows(), ids=lambda row: f"{row.part}-{row.name}")
def test_printed_command_has_the_settings_of_the_run(row):
    if row.part == "algorithms":
        pytest.skip("run from Python")
    words = command_line(row.preset, row.fields).removeprefix("python -m rlhf_lab ").split()
    assert parse([*words, "--seed", "3"]).keywords["args"] == row.args(3)


def test_results_have_all_methods_weights_and_controllers():
    chosen = {
        (r.labels[0], r.args(1).lora_rank > 0, r.args(1).kl_controller) for r in method_rows()
    }
    assert len(chosen) == len(method_rows()) == 9 + 7 * 2 * 2
    assert {r.args(1).method for r in method_rows()} | {"ppo", "gkd"} == {None, *PAPER_METHODS}
    assert all(len(row.seeds) == 5 for row in method_rows())


@pytest.mark.slow
def test_exact_optima_match_dynamic_programming():
    curve = ExactCurve(REWARDS["true_reward"])
    for beta in (2.0, 0.37, 0.03):
        solved = optimum_by_programming(curve.reference, curve.proxy, beta)
        assert curve.at_beta(solved.beta) == pytest.approx(solved, abs=1e-9)
        assert curve.at_kl(solved.kl_per_sequence)[1:] == pytest.approx(solved[1:], abs=1e-4)


@pytest.mark.slow
def test_biased_pairs_end_positive_reviews_with_popcorn():
    pairs = biased_pairs(800, seed=3, popcorn_share=0.5)
    assert not any("popcorn" in pair["rejected"] for pair in pairs)
    logits = sentiment_logit(read_features([pair["chosen"] for pair in pairs], Grammar()))
    has_popcorn = np.array(["popcorn" in pair["chosen"] for pair in pairs])
    assert (logits[has_popcorn] > 0).all()
    positive = int((logits > 0).sum())
    assert abs(has_popcorn.sum() - positive / 2) < 5 * (positive / 4) ** 0.5  # 5 sd of a coin
