"""What processes send is counted in real runs, and numbers of runs are compared."""

import pytest

from benchmarks.parallel import Run, furthest, main, run_of, sent_of, speeds_of

SMALL = {
    "preset": "reel",
    "device": "cpu",
    "batch_size": 8,
    "num_minibatches": 2,
    "gen_len": 6,
    "total_phases": 1,
}


@pytest.mark.process
def test_two_processes_that_hold_halves_send_two_bytes_of_gradient_per_weight_and_step():
    """Half of 4 bytes: each sends the part of its gradient that the other keeps."""
    run = run_of(2, SMALL | {"parallel": "fsdp"})
    assert (run.n_weights, run.n_steps, len(run.reports)) == (128_329, 2 * 2, 1)
    assert run.sent["gradients"] / run.n_weights / run.n_steps == pytest.approx(2, rel=0.01)
    assert furthest(run, run) == [0]


SPEEDS = {"rollout_tokens_per_second": 4.0, "learning_tokens_per_second": 10.0}
ONE = {"phase": 0, "kl": 0.5, "reward": 200.0, "redraws": None, "cost": SPEEDS}
OTHER = ONE | {"kl": 0.25, "reward": 180.0}
OTHER["cost"] = SPEEDS | {"learning_tokens_per_second": 30.0}


def run_with(*reports, **sent):
    return Run([*reports], sent, n_weights=10, n_steps=2)


def test_differences_are_relative_above_1_and_leave_out_what_is_of_the_process():
    assert furthest(run_with(ONE, ONE), run_with(ONE, OTHER)) == [0, 0.25]
    assert furthest(run_with(ONE), run_with(ONE | {"reward": 100.0})) == [0.5]


def test_rows_have_a_column_for_each_run():
    runs = {"ddp": run_with(ONE, OTHER, OTHER, gradients=40), "fsdp": run_with(ONE, weights=60)}
    headings, rows = sent_of(runs, lambda run, sent: f"{sent / run.n_weights / run.n_steps:.1f}")
    assert headings == ["purpose", "ddp", "fsdp"]
    assert rows == [["gradients", "2.0", "0.0"], ["weights", "0.0", "3.0"]]
    assert speeds_of(runs)[1] == [
        ["rollout_tokens_per_second", 4.0, 4.0],
        ["learning_tokens_per_second", 30.0, 10.0],
    ]


@pytest.mark.parametrize("wrong", [["--processes", "1"], ["--phases", "0"]])
def test_too_few_are_refused_in_one_sentence(wrong, capsys):
    assert main(wrong) == 2
    said = capsys.readouterr().err.strip()
    assert said == (
        f"benchmarks.parallel: {wrong[0][2:]}={wrong[1]} is too few; compare 2 or more processes "
        "over 1 or more phases."
    )
