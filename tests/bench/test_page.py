"""The page of figures, from a stored result whose numbers are known."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.command import command_line
from benchmarks.estimate import estimated_seconds, spoken
from benchmarks.options import Bench
from benchmarks.page import aims_page, page
from benchmarks.records import read_records
from benchmarks.sheets import sheets
from benchmarks.work import Work

ROOT = Path(__file__).parents[2]


def phase(seconds: float, stages: dict | None = None) -> dict:
    halves = {"rollout": seconds / 4, "learning": seconds * 3 / 4}
    stages = {"rollout/sampling": seconds / 8} if stages is None else stages
    return {"seconds": seconds, **halves, "stages": stages, "peak_bytes": 50_000_000}


def contestant(*seconds: float, stages: dict | None = None) -> dict:
    about = {"versions": {"torch": "9.9"}, "loaded_bytes": 20_000_000}
    return {**about, "phases": [phase(s, stages) for s in seconds]}


def stored(shape: str, ours: float, **more: object) -> dict:
    return {
        "machine": {
            "processor": "Abacus 3000",
            "cores": 2,
            "memory_gb": 23,
            "system": "Linux",
            "python": "3.11.7",
            "torch": "2.13.0",
            "transformer_lens": "3.9.0",
            "device": "cpu",
        },
        "work": Work(shape=shape).to_dict(),
        "command": f"python -m benchmarks --shape {shape}",
        "repeats": 3,
        "floor": {
            "flops": {"sampling": int(1e9), "learning": int(ours * 3e9)},
            "seconds": {"sampling": 0.5, "learning": 0.5},
        },
        "contestants": {
            "ours": contestant(ours, ours / 2, ours * 4),
            "naive": contestant(ours * 3),
        },
        "left_out": {"trl-1.12": "trl-1.12 is left out: not built."},
        **more,
    }


@pytest.fixture
def full():
    return stored(
        "tiny",
        2.0,
        generation={"ours-sampling": contestant(1.0), "hf-generate": contestant(1.5)},
        growth={
            "batch_size": [
                {"batch_size": 8, **contestant(1.0)},
                {"batch_size": 64, **contestant(8.0)},
            ],
            "gen_len": [{"gen_len": 25, **contestant(1.0)}, {"gen_len": 100, **contestant(16.0)}],
        },
        commands={"--help": [0.25, 0.5, 0.75], "train, to its end": [12.0, 13.0, 20.0]},
        probes={
            "ours-run": contestant(1.0, 1.0),
            "ours-run-with-probes": contestant(1.0, 1.25, stages={"probes/run_health": 0.1}),
        },
    )


def test_every_figure_of_the_page_is_worked_out_from_the_stored_ones(full):
    text = page([full], ["[speed.jsonl](speed.jsonl)"])
    # Ours 2 with extremes 1 and 8; halves a quarter and three quarters; 1600 tokens in 2 seconds;
    # 50 MB less 20 MB. Naive 6, 3 times as long.
    assert "| ours | 2.000 | 1.000 to 8.000 | 1.00 | 0.500 | 1.500 | 800 | 30 |" in text
    assert "| naive | 6.000 | 6.000 to 6.000 | 3.00 | 1.500 | 4.500 | 267 | 30 |" in text
    assert "| naive | 6 (3.00) |" in text
    assert "| rollout/sampling | 0.250 | 0.750 |" in text
    # The arithmetic: 1 and 6 GFLOP, half a second each; 2 seconds are twice that.
    assert "| all | 7.00 | 1.000 |" in text
    assert "2.00 times as long" in text
    assert "| hf-generate | 1.500 | 1.500 to 1.500 | 1.50 |" in text
    # Batch 8 to 64 is three doublings, time 1 to 8: exponent 1; length two doublings, four of time.
    assert "| batch_size | 8 | 64 | 1.00 |" in text
    assert "| gen_len | 25 | 100 | 2.00 |" in text
    assert "| --help | 0.50 | 0.25 to 0.75 |" in text
    assert "| train, to its end | 13.00 | 12.00 to 20.00 |" in text
    # 2.25 seconds with the probes, 2 without.
    assert "| the default probes in a run of 1 phases | seconds |" in text
    assert "| run_health | 0.200 |" in text
    assert "| added to the run, measured | 12.5% |" in text
    assert "Abacus 3000, 2 cores, 23 GB" in text
    assert "From [speed.jsonl](speed.jsonl), made by `python -m benchmarks --shape tiny`." in text
    assert "trl-1.12 is left out: not built." in text
    assert "growth of our time with a phase's arithmetic" not in text


def test_the_page_in_the_repository_comes_from_the_records_in_the_repository():
    results = read_records(ROOT / "benchmarks/results/speed.jsonl", frozenset())
    link = "[speed.jsonl](../benchmarks/results/speed.jsonl)"
    assert (ROOT / "docs" / "../benchmarks/results/speed.jsonl").is_file()
    stored = (ROOT / "docs/performance.md").read_bytes()
    assert page(results, [link] * len(results)).encode() == stored
    assert aims_page(results).encode() == (ROOT / "benchmarks/README.md").read_bytes()


def test_the_page_for_readers_has_no_aims_and_the_one_for_developers_has():
    plain = stored("tiny", 2.0)
    text = page([plain], ["[speed.jsonl](speed.jsonl)"])
    assert "Aims" not in text and "| met |" not in text
    # 3 times as long as this package, where 2.2 is aimed for.
    row = "| tiny, fp32: times faster than naive | at least 2.2 | 3.00 | yes |"
    assert row in aims_page([plain])


def test_growth_with_size_is_shown_for_results_that_differ_in_shape_only(full):
    # Operations 1e9 + 6e9 and 1e9 + 48e9: 7 times as many; time 2 and 16 seconds, 8 times:
    # log 8 / log 7 = 1.07.
    bigger = stored("small", 16.0)
    assert "| cpu, fp32: tiny, small | 1.07 |" in page([full, bigger], ["a.json", "b.json"])
    bigger["work"]["threads"] = 8
    assert "| cpu, fp32: tiny, small" not in page([full, bigger], ["a.json", "b.json"])


def test_results_of_one_kind_share_a_column_at_a_glance(full):
    text = page([full, stored("tiny", 3.0)], ["a.json", "b.json"])
    assert "| seconds per phase (ratio) | tiny, cpu, fp32 |\n" in text
    assert "| ours | 2 (1.00) |\n" in text


def test_the_tables_hold_all_parts_of_a_result(full):
    shown = sheets(full)
    assert shown[3].title == "Sampling alone:"
    assert [sheet.head[0] for sheet in shown] == [
        "",
        "seconds of each stage",
        "the arithmetic alone",
        "",
        "growth of our time with",
        "a command, as a process of its own",
        "the default probes in a run of 1 phases",
    ]
    assert len(sheets(stored("nano", 1.0))) == 3


def test_the_terminal_shows_what_the_page_shows(full):
    console = Console(width=300, file=io.StringIO())
    for sheet in sheets(full):
        console.print(sheet.rich())
        said = " ".join(console.file.getvalue().split())
        assert all(cell in said for line in [sheet.head, *sheet.body] for cell in line)
        assert sheet.title in said and sheet.note in said


def test_a_result_without_ours_has_no_ratio_and_no_distance(full):
    del full["contestants"]["ours"]
    text = page([full], ["tiny.json"])
    assert "| naive | 6.000 | 6.000 to 6.000 |  |" in text
    assert "times as long" not in text
    assert json.loads(json.dumps(full)) == full


def test_the_command_names_what_differs_from_the_defaults():
    assert command_line(Bench()) == "python -m benchmarks"
    options = Bench(shape="small", against=("naive",), growth=True, gen_len=20)
    expected = "python -m benchmarks --shape small --against naive --gen-len 20 --growth"
    assert command_line(options) == expected
    older = Bench(against=(), against_commit=("141faa5",))
    assert command_line(older) == "python -m benchmarks --against --against-commit 141faa5"
    assert older.contestants == ("ours", "ours@141faa5")


def test_the_estimate_grows_with_what_is_asked_for():
    work = Work(shape="nano")
    one = estimated_seconds(Bench(against=(), repeats=1), work, 1.0)
    assert one == pytest.approx(10 + 2 * (0.5 + 2.0))
    assert estimated_seconds(Bench(against=("naive",), repeats=1), work, 1.0) == pytest.approx(
        one + 10 + 2 * (0.5 + 5.0)
    )
    more = estimated_seconds(Bench(against=(), repeats=1, growth=True, probes=True), work, 1.0)
    assert more > one + 7 * 10


def test_durations_are_spoken():
    assert spoken(75.2) == "75 seconds"
    assert spoken(600.0) == "10 minutes"
