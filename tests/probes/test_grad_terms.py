import pytest
import torch

from rlhf_lab import functional as F
from rlhf_lab.diffing import Groups
from rlhf_lab.errors import ConfigError
from rlhf_lab.probes import GradTerms, attach
from rlhf_lab.probes.grad_terms import cosines_of, gradient_products, term_gradients
from tests.probes.looking import same_weights, train_soundly


def test_products_and_cosines_by_hand():
    gradients = [
        {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])},
        {"a": torch.tensor([4.0, -3.0]), "b": torch.tensor([-2.0])},
        {"a": torch.zeros(2), "b": torch.tensor([0.5])},
    ]
    groups = Groups(["A", "B"], [[("a", None)], [("b", None)]])
    products = gradient_products(gradients, groups)
    assert products[..., 0].tolist() == [[25, 0, 0], [0, 25, 0], [0, 0, 0]]
    cosines = cosines_of(products)
    assert cosines[0, 1].tolist() == [0, -1] and cosines[2, 2].tolist() == [0, 1]
    assert cosines[0, 2].tolist() == [0, 1]


@pytest.mark.slow
def test_terms_of_a_run_and_what_they_do_not_reach(make_trainer):
    plain, trainer = (make_trainer(ent_coef=0.01) for _ in range(2))
    probes = GradTerms(every=1), GradTerms(step="last", every=1, name="late")
    attach(trainer, *probes)
    policy_gradients, norms = [], []

    @trainer.on("after_backward")
    def plain_policy_gradient(ctx):
        """At ratio 1 the clipped surrogate's is E[A grad log pi]."""
        if ctx.phase or ctx.step:
            return
        minibatch = ctx.minibatch
        with torch.enable_grad():
            logits, _ = ctx.policy(minibatch.tokens, minibatch.attention_mask)
            logs = F.get_logprobs(logits, minibatch.tokens, minibatch.prefix_len)
            mean = (logs * minibatch.whitened_advantages())[minibatch.mask].mean()
            weights = dict(ctx.policy.named_parameters())
            found = torch.autograd.grad(mean, list(weights.values()), allow_unused=True)
        norms.append(torch.cat([g.flatten() for g in found if g is not None]).norm().item())
        settings = minibatch, trainer.objective, ctx.kl_coef
        surrogate, *_ = term_gradients(ctx.policy, ctx.reference, *settings)
        for name, gradient in zip(weights, found, strict=True):
            expected = 0.0 if gradient is None else gradient
            policy_gradients.append((surrogate[name] - expected).abs().max().item())

    plain.train()
    run = train_soundly(trainer)
    assert max(policy_gradients) < 1e-6
    record, found = run.records("grad_terms")[0], run.tensors("grad_terms", 0)
    value, unembed = record["terms"].index("value_loss"), record["groups"].index("unembed")
    assert found["norms"][value, unembed] == 0 < found["norms"][value, 0]
    surrogate = record["terms"].index("clipped_surrogate")
    assert found["norms"][surrogate, -1].item() == pytest.approx(norms[0], rel=1e-4)
    kl = record["terms"].index("kl_penalty")
    assert found["norms"][kl].max() < 1e-6 < run.tensors("late", 1)["norms"][kl].max()
    assert record["groups"][-2:] == ["value_head", "all"]
    assert same_weights(trainer, plain)


def test_grad_terms_raises_on_step_in_backward(make_trainer):
    trainer = make_trainer(optimizer_in_backward=True, max_grad_norm=None)
    with pytest.raises(ConfigError, match="optimizer_in_backward=True"):
        attach(trainer, GradTerms())
