"""NeuronRank: the split of a shift by hand, and a planted neuron by name."""

import copy

import pytest
import torch

from rlhf_lab.models.tokenization import single_token
from rlhf_lab.probes import NeuronRank
from rlhf_lab.probes.neuron_rank import NeuronEnd, neuron_shift
from tests.probes.looking import with_models

pytestmark = pytest.mark.usefixtures("no_type_checks")


def test_a_shift_is_split_by_hand():
    end = lambda a, w, b, s: NeuronEnd(
        *(torch.tensor(x, dtype=torch.float64) for x in ([[a]], [w], [b], [s]))
    )
    # (3 * 2 - 1 * 1) and (-1 * 0.5 * 2 - 2 * 0.5), with the scale 1 before and 1/2 after
    before, after = end([1.0, 2.0], [1.0, 0.5], 0.5, 1.0), end([3.0, -1.0], [1.0, 0.5], 1.0, 2.0)
    by_neuron, by_activation, b_out = neuron_shift(before, after)
    assert by_neuron.tolist() == [[[5.0, -2.0]]] and b_out.tolist() == [[1.5]]
    assert by_activation.tolist() == [[[2 * 1.5, -3 * 0.75]]]


@pytest.mark.slow
def test_a_planted_neuron_ranks_first(trained_runs):
    """One neuron that writes the difference of the words where it is active, and nothing else."""
    run = trained_runs("padded")
    model = copy.deepcopy(run.ctx.reference)
    words = [single_token(model.tokenizer, word) for word in ("loved", "hated")]
    with torch.no_grad():
        u = model.unembed.W_U[:, words[0]] - model.unembed.W_U[:, words[1]]
        model.blocks[0].mlp.W_out[37] = 0
        model.blocks[1].mlp.W_out[11] += 3 * u / u.norm()
        model.blocks[1].mlp.b_in[11] += 2
    values = NeuronRank(n=4).observe(with_models(run, run.ctx.reference, model)).values
    assert values["neurons"][0] == "L1N11" and values["contribution"][0] > 0
