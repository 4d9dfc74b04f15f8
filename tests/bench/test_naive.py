"""The learner's loop of the benchmarks: it must be right before it may be slow."""

import pytest
import torch

from benchmarks.naive import NaiveTrainer
from benchmarks.work import SHAPES, write_model
from rlhf_lab.config import RLHFArgs
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.rewards import load_reward
from rlhf_lab.training import Objective, RLHFTrainer, objective_terms
from rlhf_lab.training.rollout import ReplayMemory
from tests.tiny_models import randomize

pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")


@pytest.fixture(scope="module")
def nano_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("nano")
    write_model(SHAPES["nano"], directory)
    return directory


@pytest.fixture
def both(nano_dir):
    """The package's trainer and the naive one, on one policy that both can see."""
    fields = dict(preset="gpt2-medium", base_model=str(nano_dir), device="cpu", prefix="w2 w3 w4")
    fields |= dict(batch_size=8, gen_len=6, top_k=None, ent_coef=0.3, reward_fn="count:w1")
    args = RLHFArgs(**fields)
    policy = TransformerWithValueHead(load_model(str(nano_dir)))
    randomize(policy.value_head, 3)
    trainer = RLHFTrainer(args, policy=policy)
    return trainer, NaiveTrainer(args, policy, load_reward(args))


def move(policy, seed):
    """A policy that has left both the reference and the policy that sampled."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.slow
def test_objective_and_its_gradient_are_those_of_the_package(both):
    trainer, naive = both
    move(trainer.policy, 1)
    rollout = trainer.rollout_phase()
    memory = naive.score(rollout.samples.tokens, rollout.texts)
    torch.testing.assert_close(memory.advantages, rollout.advantages, atol=1e-4, rtol=0)
    torch.testing.assert_close(memory.logprobs, rollout.samples.logprobs, atol=1e-4, rtol=0)

    move(trainer.policy, 2)
    rows = torch.tensor([5, 0, 3])
    minibatch = ReplayMemory(rollout, 1, 1)._take(rows, rollout.samples.is_padded)
    terms = objective_terms(trainer.policy, trainer.reference, minibatch, Objective(trainer.args))
    objective = naive.objective(memory.take(rows))
    assert terms.kl_penalty.item() > 0.01
    assert abs(terms.clipped_surrogate.item()) > 1e-4
    assert objective.item() == pytest.approx(terms.objective.item(), abs=1e-5)
    parameters = list(trainer.policy.parameters())
    ours = torch.autograd.grad(terms.objective, parameters, allow_unused=True)
    theirs = torch.autograd.grad(objective, parameters, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-3)
