"""Activation checkpointing: what is kept for the backward pass, and the gradient that comes out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from rlhf_lab import functional as F
from rlhf_lab.errors import ConfigError
from rlhf_lab.models.forward import recomputing_blocks
from rlhf_lab.training import ReplayMemory, objective_terms


@contextmanager
def counting_kept_bytes(module: nn.Module) -> Iterator[dict[int, int]]:
    """The bytes of each storage that a graph keeps, weights not counted."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def pack(x: Tensor) -> Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = x.untyped_storage().nbytes()
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


def gradients_and_kept(make_trainer: Callable, parts: dict | None = None, **fields):
    """Gradients of the first minibatch's objective, and the bytes that its graph kept."""
    trainer = make_trainer(parts, gen_len=26, **fields)
    rollout = trainer.rollout_phase()
    minibatch = next(ReplayMemory(rollout, 2, 1).get_minibatches(torch.Generator()))
    with counting_kept_bytes(trainer.policy) as kept:
        terms = objective_terms(trainer.policy, trainer.reference, minibatch, trainer.objective)
    terms.objective.backward()
    named = trainer.policy.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}, sum(kept.values())


OWN_LOGPROBS = {"logprobs": lambda *given: F.get_logprobs(*given)}
PATHS = {
    "plain": (None, {}),
    "custom log-probs": (OWN_LOGPROBS, {}),
    "bf16": (None, {"precision": "bf16"}),
    "adapters": (None, {"lora_rank": 2}),
    "critic": (None, {"value_head": "separate"}),
    "critic in bf16": (None, {"value_head": "separate", "precision": "bf16"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "fields"), PATHS.values(), ids=PATHS.keys())
def test_the_gradient_is_the_same_to_the_bit_and_less_is_kept(make_trainer, parts, fields):
    plain, kept = gradients_and_kept(make_trainer, parts, **fields)
    again, kept_again = gradients_and_kept(
        make_trainer, parts, activation_checkpointing=True, **fields
    )
    assert plain.keys() == again.keys() and plain
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert kept_again < kept


@pytest.mark.slow
def test_what_is_kept_of_a_block_is_its_input(make_trainer):
    """Between 3 blocks and around them stand 4 residuals of 4 sequences of 29 tokens; of these the
    inputs of the 3 blocks are kept. Without checkpointing, a block of GPT-2's shape keeps at least
    14 times its residual: two norms, queries, keys and values, attention, and twice 4 in the MLP.
    """
    saved = {}
    for on in (False, True):
        trainer = make_trainer(activation_checkpointing=on, gen_len=26)
        model, tokens = trainer.policy.base_model, torch.full((4, 29), 5)
        with counting_kept_bytes(model) as kept, recomputing_blocks(model, on):
            model(tokens, stop_at_layer=model.cfg.n_layers)
        residual = 4 * 29 * model.cfg.d_model * 4
        saved[on] = sum(kept.values()) / (residual * model.cfg.n_layers)
    assert saved[True] < 2 < 14 < saved[False]


@pytest.mark.slow
@pytest.mark.parametrize("value_head", ["shared", "separate"])
def test_a_run_ends_with_the_weights_of_the_plain_run(make_trainer, parameters_of, value_head):
    ends = []
    for on in (False, True):
        trainer = make_trainer(
            activation_checkpointing=on, micro_batch_size=2, value_head=value_head
        )
        trainer.train()
        ends.append(parameters_of(trainer.policy))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_hooks_in_a_block_are_refused_before_anything_is_written(make_trainer):
    trainer = make_trainer(activation_checkpointing=True)
    trainer.policy.base_model.add_hook("blocks.1.hook_resid_post", lambda x, hook: x)
    with pytest.raises(ConfigError, match="activation_checkpointing=True.*blocks.1.*second time"):
        trainer.run_phase()
    assert trainer.run is None


def test_hooks_that_come_later_are_refused_when_learning_begins(make_trainer):
    trainer = make_trainer(activation_checkpointing=True)
    rollout = trainer.rollout_phase()
    trainer.policy.base_model.add_hook("blocks.0.attn.hook_q", lambda x, hook: x)
    with pytest.raises(ConfigError, match="activation_checkpointing=True.*blocks.0 "):
        trainer.learning_phase(rollout)


def test_a_hook_that_comes_between_forward_and_backward_is_refused_there(make_trainer):
    model = make_trainer().policy.base_model
    with recomputing_blocks(model):
        logits = model(torch.tensor([[4, 5, 6]]))
    model.add_hook("blocks.0.hook_resid_post", lambda x, hook: 2 * x)
    with pytest.raises(ConfigError, match="fire a second time"):
        logits.sum().backward()


@pytest.mark.slow
def test_hooks_outside_the_blocks_and_captures_go_on_firing_once(make_trainer):
    """Captures run forwards of their own, after learning; the final norm is not run again."""
    trainer, seen, captured = make_trainer(activation_checkpointing=True), [], []
    trainer.capture("blocks.0.hook_resid_post")(lambda ctx, acts: captured.append(acts.shape[0]))
    rollout = trainer.rollout_phase()
    trainer.policy.base_model.add_hook(
        "ln_final.hook_normalized", lambda x, hook: seen.append(x.requires_grad)
    )
    trainer.learning_phase(rollout)
    assert seen == [True] * 4
    trainer.policy.base_model.reset_hooks()
    trainer.run_phase()
    assert captured == [8]


def test_the_blocks_are_left_as_they_were(make_trainer):
    model = make_trainer().policy.base_model
    with recomputing_blocks(model):
        assert "forward" in vars(model.blocks[0])
    assert "forward" not in vars(model.blocks[0])
    model.blocks[0].forward = forward = lambda x, **more: 2 * x
    with recomputing_blocks(model):
        assert vars(model.blocks[0])["forward"] is not forward
    assert vars(model.blocks[0])["forward"] is forward
