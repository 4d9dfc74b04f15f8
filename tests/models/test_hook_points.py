"""Tests that a hook at any hook point takes effect, in rollout and in learning."""

from functools import cache

import pytest
import torch

from rlhf_lab.models import has_hooks, load_model, run_policy
from rlhf_lab.models.hooked_model import without_hooks
from rlhf_lab.sampling import SamplingSpec, sample
from tests.models.test_paths import LLAMA, TOKENS, random_policy

GEMMA3 = {"qk_norm": "head", "use_normalization_before_and_after": True}
GEMMA3 |= {"attn_types": ["local", "global"], "window_size": 2}
MODELS = {
    "GPT-2": {},
    "Gemma 3": LLAMA | GEMMA3,
    "NeoX": {"parallel_attn_mlp": True, "positional_embedding_type": "rotary"},
}
make_policy = cache(lambda kind: random_policy(**MODELS[kind]))
SITES = [
    pytest.param(
        kind,
        name,
        marks=pytest.mark.nightly if kind == "NeoX" or name.startswith("blocks.1.") else [],
    )
    for kind in MODELS
    for name in make_policy(kind).hook_dict
]
GEN_LEN, PROMPTS = 3, [[4, 9], [7, 3]]


def shift(x):
    """Return a change that no norm or softmax removes."""
    generator = torch.Generator().manual_seed(1)
    return x + 0.5 * torch.rand(x.shape, generator=generator)


def shift_in_place(x, hook):
    x.copy_(shift(x))


ACTIONS = {"replace": lambda x, hook: shift(x), "in place": shift_in_place}


def roll_out(policy):
    samples = sample(policy, PROMPTS, SamplingSpec(GEN_LEN), torch.Generator().manual_seed(0))
    return torch.cat([samples.logprobs, samples.values], 1)


def learn(policy):
    policy.zero_grad()
    out = run_policy(policy, TOKENS, 2)
    (out.logprobs.sum() + out.values.sum()).backward()
    gradients = [p.grad.flatten() for p in policy.parameters() if p.grad is not None]
    return torch.cat([out.logprobs.flatten(), out.values.flatten(), *gradients]).detach()


PHASES = {"rollout": roll_out, "learning": learn}
run_unhooked = cache(lambda kind, phase: PHASES[phase](make_policy(kind)))


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("kind", "name"), SITES)
def test_hook_takes_effect(kind, name, phase):
    policy, run = make_policy(kind), PHASES[phase]
    without, fired = run_unhooked(kind, phase), []
    with policy.hooks([(name, lambda x, hook: fired.append(x.shape))]):
        read = run(policy)
    assert len(fired) == (GEN_LEN if phase == "rollout" else 1)
    torch.testing.assert_close(read, without, atol=1e-4, rtol=1e-4)
    changed = {}
    for action, hook in ACTIONS.items():
        with policy.hooks([(name, hook)]):
            changed[action] = run(policy)
        assert not torch.allclose(changed[action], without, atol=1e-3), action
    torch.testing.assert_close(changed["replace"], changed["in place"])
    assert not has_hooks(policy) and torch.equal(run(policy), without)


def test_without_hooks_removes_and_restores_them():
    policy, name = random_policy(), "blocks.0.hook_resid_post"
    before = policy(TOKENS)[0]
    with policy.hooks([(name, ACTIONS["replace"])], [(name, lambda x, hook: None)]):
        within = policy(TOKENS)[0]
        with without_hooks(policy):
            assert not has_hooks(policy) and torch.equal(policy(TOKENS)[0], before)
        assert torch.equal(policy(TOKENS)[0], within) and not torch.equal(within, before)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), SITES)
def test_backward_hook_gets_the_gradient(kind, name):
    policy, gradients = make_policy(kind), []
    with policy.hooks(bwd_hooks=[(name, lambda grad, hook: gradients.append(grad))]):
        learn(policy)
    assert len(gradients) == 1 and gradients[0].isfinite().all() and gradients[0].any()


def test_accumulated_bias_adds_the_attention_before_an_mlp(gpt2_dir):
    model = load_model(str(gpt2_dir))
    torch.nn.init.ones_(model.blocks[0].attn.b_O)
    before, at_mlp = (model.accumulated_bias(0, mlp_input) for mlp_input in (False, True))
    assert not before.any() and (at_mlp == 1).all()
