"""`python -m benchmarks.results`: what it makes, what it leaves, and how it goes on."""

import pytest
from rich.console import Console

from benchmarks.results.__main__ import Options, Progress, jobs, make
from benchmarks.results.records import asked, is_done, read_records, write_record
from benchmarks.results.reel import run_method
from benchmarks.results.settings import Row
from rlhf_lab.errors import ConfigError, RunError

ONLY = ("rloo-all-constant", "grpo-all-constant")


@pytest.fixture
def options(tmp_path):
    return Options(only=ONLY, records=tmp_path / "results", docs=tmp_path / "results.md")


@pytest.fixture
def run(method_record):
    """Stands in for training; notes what it was asked for, and may be killed after some runs."""
    made = []

    def train(job, options, killed_after=None):
        if len(made) == killed_after:
            raise KeyboardInterrupt
        row, seed = job
        made.append((row.name, seed))
        return method_record(row.name, seed, gold=0.9, best=1.0) | asked(row, seed)

    train.made = made
    return train


def test_a_killed_command_goes_on_with_the_run_that_was_not_finished(options, run):
    with pytest.raises(KeyboardInterrupt):
        make(options, lambda job, options: run(job, options, killed_after=3))
    assert len(read_records(options.records)) == 3 and not options.docs.exists()
    assert make(options, run) == 0
    assert len(run.made) == len(set(run.made)) == 2 * 5
    assert "GRPO" in options.docs.read_text()
    make(options, run)
    assert len(run.made) == 10


def test_a_record_from_other_settings_or_other_weights_is_made_anew(options, run):
    make(options, run)
    there = read_records(options.records)
    for seed, change in ((1, {"fields": {"kl_coef": 9.0}}), (2, {"weights": "older"})):
        old = next(r for r in there if (r["labels"][0], r["seed"]) == ("GRPO", seed))
        write_record(options.records, old | change)
    assert len(read_records(options.records)) == len(there)
    assert [(row.name, seed) for row, seed in jobs(options)] == [
        ("grpo-all-constant", 1),
        ("grpo-all-constant", 2),
    ]


def test_real_models_are_left_alone_unless_their_directories_are_given(tmp_path):
    assert {row.part for row, _ in jobs(Options(records=tmp_path))} == {
        "methods",
        "unheld",
        "loophole",
        "learned",
        "algorithms",
    }
    given = Options(("real",), records=tmp_path, language_model=tmp_path, classifier=tmp_path)
    assert [row.labels for row, _ in jobs(given)] == [("plain",), ("LoRA",), ("bf16",)]


def test_a_directory_that_a_real_run_lacks_is_named(tmp_path):
    with pytest.raises(ConfigError, match="language_model='None' is no directory"):
        jobs(Options(only=("real",), records=tmp_path))
    with pytest.raises(ConfigError, match="classifier='None' is no directory"):
        jobs(Options(language_model=tmp_path, records=tmp_path))


def test_a_seed_can_be_chosen_and_an_unknown_name_is_refused(options):
    chosen = jobs(Options(only=ONLY, seeds=(4,), records=options.records))
    assert [seed for _, seed in chosen] == [4, 4]
    with pytest.raises(ConfigError, match="'ppo2' is unknown; choose of"):
        jobs(Options(only=("ppo2",)))


def test_the_page_alone_makes_no_run(options, run):
    make(Options(page=True, records=options.records, docs=options.docs), run)
    assert run.made == [] and options.docs.exists()


def test_the_estimate_is_the_pace_so_far_times_what_is_left(options, monkeypatch):
    now = iter([100.0, 130.0])
    monkeypatch.setattr("benchmarks.results.__main__.perf_counter", lambda: next(now))
    work = jobs(options)
    # 3 of 10 equal runs in 30 seconds leave 7 of 10 seconds each.
    assert Progress(work, Console()).left(3) == "70 seconds"


def test_a_file_that_is_no_record_is_refused_with_its_name(tmp_path):
    path = tmp_path / "methods.jsonl"
    for content in ("{", "[1]", '{"seed": 1}'):
        path.write_text(content + "\n")
        with pytest.raises(RunError, match=r"methods.jsonl .*line 1.*; delete that line"):
            read_records(tmp_path)


def test_a_stored_record_answers_its_question_and_holds_six_digits(tmp_path, method_record):
    row = Row("methods", ("a, b+ c", "all"), {"base_lr": 3e-4})
    assert row.name == "a-bp-c-all"
    write_record(tmp_path, asked(row, 1) | {"curve": [{"gold": 0.123456789}]})
    assert is_done(tmp_path, row, 1) and not is_done(tmp_path, row, 2)
    assert read_records(tmp_path)[0]["curve"] == [{"gold": 0.123457}]
    (line,) = (tmp_path / "methods.jsonl").read_text().splitlines()
    assert '"labels":["a, b+ c","all"]' in line


def test_a_records_line_stays_where_it_is_when_the_run_is_made_again(tmp_path):
    rows = [Row("methods", (name, "all"), {}) for name in "abc"]
    for row in rows:
        write_record(tmp_path, asked(row, 1) | {"figure": 1})
    write_record(tmp_path, asked(rows[1], 1) | {"figure": 2})
    write_record(tmp_path, asked(rows[1], 2) | {"figure": 3})
    found = [(r["labels"][0], r["seed"], r["figure"]) for r in read_records(tmp_path)]
    assert found == [("a", 1, 1), ("b", 1, 2), ("c", 1, 1), ("b", 2, 3)]


@pytest.mark.slow
def test_a_methods_run_tells_gold_before_and_after_and_the_best_at_its_kl():
    fields = {
        "total_phases": 2,
        "warmup_steps": 0,
        "batch_size": 8,
        "num_minibatches": 2,
        "base_lr": 0.0,
    }
    found = run_method(Row("methods", ("still",), fields), 1)
    # A policy that does not learn has no KL, for which nothing better than the grammar's own
    # posterior mean of one half is to be had.
    assert found["final"]["kl_per_sequence"] == 0.0
    assert found["best_gold"] == pytest.approx(0.5, abs=1e-3)
    assert 0.0 <= found["initial"]["gold"] <= found["initial"]["grammatical"] <= 1.0
    assert found["final"]["samples"] == 4 * 8
