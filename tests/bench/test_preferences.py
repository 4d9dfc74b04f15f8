"""Preference tuning over seeds: the table is that of the records, and nothing is made twice."""

import json

import pytest

from benchmarks import preferences as module
from benchmarks.preferences import KEYS, METHODS, asked, main, table
from benchmarks.records import RESULTS, read_records
from tests.pages import ROOT, page

RECORDS = read_records(ROOT / RESULTS / "preferences.jsonl", KEYS)
PAGE = "# Mine\n\n<!-- figures -->\n\nold\n\n<!-- end of figures -->\n\nmore\n"


def record(method, seed, before, after, kl=1.0):
    drift = {"gold_before": before, "gold_after": after, "kl_per_sequence": kl}
    return asked(method, seed) | {"drift": drift, "accuracy": 0.75}


def test_the_table_of_the_page_is_that_of_its_records():
    assert table(RECORDS) in page("preferences")
    seeds = {name: [r["seed"] for r in RECORDS if r["method"] == name] for name in METHODS}
    assert all(found == list(range(5)) for found in seeds.values())


def test_means_and_ranges_by_hand():
    rows = [record("DPO", 0, 0.4, 0.7, 1.0), record("DPO", 1, 0.5, 0.6, 2.0)]
    assert table(rows).splitlines()[2:] == [
        "| DPO | 0.450 | 0.650 | +0.200 (+0.100 to +0.300) | 1.50 | 0.750 |",
        "",
        "Seeds per row: 2.",
    ]


def test_what_is_stored_is_not_made_again_and_the_page_keeps_its_words(tmp_path, monkeypatch):
    made = []

    def tune(method, seed):
        made.append((method, seed))
        found = record(method, seed, 0.5, 0.6)
        return {"drift": found["drift"], "accuracy": 0.5}

    monkeypatch.setattr(module, "tune", tune)
    monkeypatch.setattr(module, "METHODS", {name: METHODS[name] for name in ("DPO", "KTO")})
    docs, file = tmp_path / "p.md", tmp_path / "preferences.jsonl"
    docs.write_text(PAGE, encoding="utf-8")
    # seed 0 of DPO is there, that of KTO with another loss
    old = record("KTO", 0, 0.1, 0.2) | {"loss": {}}
    file.write_text("".join(json.dumps(r) + "\n" for r in (record("DPO", 0, 0.1, 0.2), old)))
    places = ["--records", str(tmp_path), "--docs", str(docs)]
    assert main([*places, "--seeds", "2"]) == 0
    assert made == [("KTO", 0), ("DPO", 1), ("KTO", 1)]
    found = docs.read_text(encoding="utf-8")
    assert found.startswith("# Mine\n\n<!-- figures -->\n\n| method") and found.endswith("\nmore\n")
    assert table(read_records(file, KEYS)) in found and "\nold\n" not in found
    assert main([*places, "--page"]) == 0 and len(made) == 3


def test_seeds_that_are_none_are_refused_in_one_sentence(capsys):
    assert main(["--seeds", "0"]) == 2
    assert capsys.readouterr().err.startswith("benchmarks.preferences: seeds=0 is out of")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["DPO", "KTO", "ORPO"])
def test_a_run_is_that_of_the_method(method, monkeypatch):
    """Few pairs, few steps: another method on the same seed makes another model."""
    monkeypatch.setattr(module, "N_PAIRS", 20)
    monkeypatch.setattr(module, "OWN_TEXTS", module.OwnTexts(4, 5))
    few = module.Fitting(steps=2, batch_size=4)
    monkeypatch.setattr(module, "PREFERENCES", few)
    found = module.tune(method, 0)
    assert found["drift"]["samples"] == 4 and 0 <= found["accuracy"] <= 1
    assert found["drift"]["kl_per_sequence"] > 0
