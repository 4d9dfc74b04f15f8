"""Activation checkpointing: what is kept for the backward pass, and the resulting gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.forward import recomputing_blocks
from rlhf_lab.training import ReplayMemory, objective_terms

ON = {"activation_checkpointing": True}


@contextmanager
def counting_kept_bytes(module: nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes of each storage that a graph keeps, without the weights."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(x: Tensor) -> Tensor:
        address = x.untyped_storage().data_ptr()
        if address not in own:
            kept[address] = x.untyped_storage().nbytes()
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


def gradients_and_kept(make_trainer: Callable, parts: dict | None = None, **fields):
    """Return the gradients of the first minibatch's objective, and the bytes its graph kept."""
    trainer = make_trainer(parts, gen_len=26, **fields)
    rollout = trainer.rollout_phase()
    minibatch = next(ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator()))
    with counting_kept_bytes(trainer.policy) as kept:
        terms = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective)
    terms.objective.backward()
    named = trainer.policy.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}, sum(kept.values())


PATHS = {
    "plain": (None, {}),
    "custom log-probs": ({"logprobs": lambda *args: F.get_logprobs(*args)}, {"lora_rank": 2}),
    "critic in bf16": (None, {"value_head": "separate", "precision": "bf16"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "fields"), PATHS.values(), ids=PATHS.keys())
def test_gradient_is_bitwise_equal_and_less_is_kept(make_trainer, parts, fields):
    plain, kept = gradients_and_kept(make_trainer, parts, **fields)
    again, kept_again = gradients_and_kept(make_trainer, parts, **ON, **fields)
    assert plain.keys() == again.keys() and plain
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert kept_again < kept


def test_each_block_keeps_its_input_only(make_trainer):
    """3 blocks keep 3 residuals; otherwise each keeps at least 14 times its residual: two norms,
    queries, keys and values, attention, and twice 4 in the MLP.
    """
    model, tokens, saved = make_trainer().policy.base_model, torch.full((4, 29), 5), []
    residuals = 4 * 29 * model.cfg.d_model * 4 * model.cfg.n_layers
    for on in (True, False):
        with counting_kept_bytes(model) as kept, recomputing_blocks(model, on):
            model(tokens, stop_at_layer=model.cfg.n_layers)
        saved.append(sum(kept.values()) / residuals)
    assert saved[0] < 2 < 14 < saved[1]


def test_hooks_in_a_block_raise(make_trainer):
    """Before a run is written, at the start of learning, and between forward and backward.

    Hooks outside the blocks fire once.
    """
    trainer, seen = make_trainer(**ON), []
    model, rollout = trainer.policy.base_model, trainer.rollout_phase()
    model.add_hook("ln_final.hook_normalized", lambda x, hook: seen.append(x.requires_grad))
    trainer.learning_phase(rollout)
    assert seen == [True] * 4
    model.add_hook("blocks.1.hook_resid_post", lambda x, hook: x)
    for run in (trainer.run_phase, lambda: trainer.learning_phase(rollout)):
        with pytest.raises(ConfigError, match="activation_checkpointing=True.*blocks.1.*second"):
            run()
    assert trainer.run is None
    model.reset_hooks()
    with recomputing_blocks(model):
        assert "forward" in vars(model.blocks[0])
        logits = model(torch.tensor([[4, 5, 6]]))
    assert "forward" not in vars(model.blocks[0])
    model.add_hook("blocks.0.hook_resid_post", lambda x, hook: 2 * x)
    with pytest.raises(ConfigError, match="fire a second time"):
        logits.sum().backward()
