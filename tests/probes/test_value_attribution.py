"""ValueAttribution: numbers by hand, mean ablation as the truth, and models of other kinds."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.models import make_value_head
from rlhf_lab.models.value_head import ValueHead
from rlhf_lab.probes import Run, ValueAttribution, attach, secant_value_rows
from tests.probes.looking import train_soundly


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_head(d_model: int = 6, seed: int = 0) -> ValueHead:
    head = make_value_head(d_model, seed).double()
    with torch.no_grad():
        for at, weight in enumerate(head.parameters()):
            weight.copy_(normal(*weight.shape, seed=seed + at))
    return head


def test_one_number_by_hand():
    """V = 2 relu(x - 1) - relu(-x) + 3; from -1 to 3 by parts that move by 1 and by 3.

    The first unit goes from 0 to 2 over 4: slope 1/2, times 2. The second from 1 to 0: -x falls by
    4, slope 1/4, so that V rises by 1/4 per unit. Each unit of x is worth 1.25: 1.25 and 3.75, in
    all 5, from V = 2 to V = 7.
    """
    head = ValueHead(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    with torch.no_grad():
        head[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        head[0].bias.copy_(torch.tensor([-1.0, 0.0]))
        head[2].weight.copy_(torch.tensor([[2.0, -1.0]]))
        head[2].bias.fill_(3.0)
    found = secant_value_rows(head, torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([[0.0], [-1.0]]))
    assert found.rows[:, 0].tolist() == pytest.approx([1.25, 3.75])
    assert (found.value.item(), found.base.item()) == (7.0, 2.0)
    assert found.on.tolist() == [[True, False]]


def test_rows_are_complete_and_the_integral_of_the_slope():
    """Sums to 1e-12; and the mean of 20,000 slopes along the line, by autograd."""
    head, parts = random_head(), normal(4, 5, 6, seed=9)
    origin = parts.mean(1)
    found = secant_value_rows(head, parts, origin)
    assert (found.rows.sum(0) - (found.value - found.base)).abs().max() < 1e-12
    torch.testing.assert_close(found.value, head(parts.sum(0))[:, 0])
    start, end = origin.sum(0), parts.sum(0)[2]
    share = (torch.arange(20_000, dtype=torch.float64)[:, None] + 0.5) / 20_000
    line = (start + share * (end - start)).requires_grad_()
    slope = torch.autograd.grad(head(line).sum(), line)[0].mean(0)
    torch.testing.assert_close(found.rows[:, 2], (parts[:, 2] - origin) @ slope, atol=2e-3, rtol=0)


def test_a_dead_head_and_a_part_that_never_moves_have_rows_of_0():
    head, parts = random_head(), normal(3, 4, 6)
    parts[1] = parts[1, :1]
    assert secant_value_rows(head, parts, parts.mean(1)).rows[1].abs().max() < 1e-12
    with torch.no_grad():
        head[0].bias.fill_(-1e3)
    found = secant_value_rows(head, parts, parts.mean(1))
    assert not found.on.any() and not found.rows.any() and found.value.std() == 0


@pytest.mark.parametrize(
    "head", [nn.Linear(6, 1), ValueHead(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))]
)
def test_another_head_raises(head):
    with pytest.raises(ConfigError, match="two linear layers"):
        secant_value_rows(head, normal(2, 3, 6).float(), normal(2, 6).float())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, truth):
    """A finished run with the probe, and its eval text."""
    from rlhf_lab.config import RLHFArgs
    from rlhf_lab.training import RLHFTrainer

    small = {"total_phases": 3, "batch_size": 32, "gen_len": 26, "num_minibatches": 2}
    args = RLHFArgs(preset="reel", reward_fn="true_reward", warmup_steps=1, head_lr=1e-2, **small)
    trainer = RLHFTrainer(args, out=tmp_path_factory.mktemp("attributed") / "run")
    tokens = truth.reviews(48, seed=5)[0]
    attach(trainer, ValueAttribution(slots=(10, -5), every=3), eval_tokens=tokens)
    train_soundly(trainer)
    return trainer, tokens


@pytest.mark.slow
def test_rows_go_with_mean_ablation_of_their_part(trained):
    """What the value loses when a part is its mean over texts, with the norm's scale as it was.

    Behind the verdict, where no two parts cancel; better than by the slope at the state alone.
    """
    trainer, tokens = trained
    run = Run(trainer.run.path)
    assert run.phases("value_attribution")[-1] == 3
    record, stored = run.records("value_attribution")[-1], run.tensors("value_attribution", 3)
    assert record["slots"] == ["CONN 2", "VERB"] and record["positions"] == [10, 24]
    policy = copy.deepcopy(trainer.policy)
    _, cache = policy.run_with_cache(tokens)
    pos, at = 24, 1
    scale = cache["ln_final.hook_scale"][:, pos]
    reads = cache["ln_final.hook_normalized"][:, pos]
    value = policy.value_head(reads)[:, 0]
    found, frozen, expected = [], [], []
    first, _, last = policy.value_head
    slope = ((first(reads) > 0) * last.weight[0]) @ first.weight
    for name in ("L0 mlp", "L1 mlp", "L1H1", "L1H2"):
        layer = int(name[1])
        part = cache[f"blocks.{layer}.hook_mlp_out"][:, pos]
        if "H" in name:
            z = cache[f"blocks.{layer}.attn.hook_z"][:, pos, int(name[-1])]
            part = z @ policy.base_model.blocks[layer].attn.W_O[int(name[-1])]
        part = (part - part.mean(-1, keepdim=True)) / scale
        ablated = policy.value_head(reads - part + part.mean(0))[:, 0]
        expected.append((value - ablated).detach())
        frozen.append(((part - part.mean(0)) * slope).sum(-1).detach())
        found.append(stored["rows"][at, record["components"].index(name)])
    rows, at_state, truth = (torch.cat(x).double() for x in (found, frozen, expected))
    assert torch.corrcoef(torch.stack([rows, truth]))[0, 1] > 0.98
    assert (rows - truth).norm() < 0.5 * (at_state - truth).norm()


def test_slots_of_fewer_than_two_texts_raise(no_type_checks):
    text = SimpleNamespace(tokens=torch.zeros(3, 6), attention_mask=torch.ones(3, 6).bool())
    for settings in ({"slots": (2,), "n": 1}, {"slots": ()}):
        with pytest.raises(ConfigError, match="of fewer than 2 of n="):
            ValueAttribution(**settings)._slots(SimpleNamespace(text=text))


@pytest.mark.slow
def test_a_separate_critic_raises(make_trainer, reviews):
    trainer = make_trainer(value_head="separate")
    with pytest.raises(ConfigError, match="another model's parts"):
        attach(trainer, ValueAttribution(), eval_tokens=reviews[0])
