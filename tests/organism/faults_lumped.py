"""Faults of expected true reward by lumped states, written before looking what tells them.

`run` names the test that does.
"""

from tests.probes.planting import Fault

LUMPED_FAULTS = (
    Fault(
        "negation is ignored",
        "lumped",
        "organism.lumped:_behind",
        "-sign if state.negated else sign",
        "sign",
        "test_the_whole_population_has_its_own_mean",
    ),
    Fault(
        "was for wasn't",
        "lumped",
        "organism.lumped:_behind",
        'word == "wasn\'t"',
        'word == "was"',
        "test_the_whole_population_has_its_own_mean",
    ),
    Fault(
        "samples are followed, not the kernel",
        "lumped",
        "organism.lumped:expected_true_reward",
        "occupancy @ (flow / np.maximum(visited, 1)[:, None])",
        "flow.sum(0) / len(state)",
        "test_fewer_samples_do_than_for_a_mean_of_rewards",
    ),
    Fault(
        "lost is not counted",
        "lumped",
        "organism.lumped:expected_true_reward",
        "lost += occupancy[visited == 0].sum()",
        "lost += 0.0",
        "test_states_that_no_sample_visits_are_reported_as_lost",
    ),
    Fault(
        "probabilities one position late",
        "lumped",
        "organism.lumped:expected_true_reward",
        "chances[:, step]",
        "chances[:, step - 1]",
        "test_the_whole_population_has_its_own_mean",
    ),
)
