"""The work of this package's own contestants."""

import pytest

from benchmarks import ours
from benchmarks.work import Work, write_model
from benchmarks.worker import Clock


@pytest.mark.slow
def test_the_probed_run_is_timed_to_its_end(tmp_path):
    """The probes look at the final weights, too, and that can cost the most of all."""
    work = Work(shape="nano", batch_size=8, gen_len=6)
    write_model(work.size, tmp_path)
    turn, spent = ours.load_run(True, work.setup(tmp_path)), []
    for _ in range(work.run_turns):
        clock = Clock("cpu")
        turn(clock)
        spent.append(clock.stages["probes/weight_delta"])
    assert spent[0] > 0 and spent[-1] > 0
    assert set(spent[1:-1]) == {0.0}


def test_the_precision_of_the_work_is_the_trainers(tmp_path):
    for precision in ("fp32", "bf16"):
        setup = Work(shape="nano", precision=precision).setup(tmp_path)
        assert ours.bench_args(setup).precision == precision
