"""A run that was interrupted and resumed equals one that was not, for every kind of state."""

import pytest

from tests.training.recorded_runs import CONFIGURATIONS, assert_same_run, copy_weights, is_equal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resumed_run_equals_uninterrupted_run(runs, resumed, name):
    """The latter has callbacks at every event, which therefore change nothing."""
    whole, again = runs(name), resumed(name)
    assert_same_run(again.run.path, whole.path)
    assert is_equal(copy_weights(again.policy), whole.weights[-1])
    assert is_equal(copy_weights(again.reference), copy_weights(whole.trainer.reference))
    assert not is_equal(whole.weights[-1], whole.weights[0])
    assert all(weight.isfinite().all() for weight in whole.weights[-1].values())
