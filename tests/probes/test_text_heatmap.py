import pytest
import torch

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import compute_gae, token_rewards
from rlhf_lab.identity import Check
from rlhf_lab.probes import Probe, Record, Run, TextHeatmap, attach
from rlhf_lab.probes.text_heatmap import sampled_log_ratio, spell_tokens, telescoping_error


def test_one_step_advantages_telescope_and_a_wrong_one_is_measured():
    values, rewards = torch.tensor([[0.2, 0.5]]), torch.tensor([1.0])
    mask = torch.ones(1, 2, dtype=torch.bool)
    # A = [0.5 - 0.2, 1 - 0.5]; they sum to 0.8 = 1 - 0.2.
    right, wrong = torch.tensor([[0.3, 0.5]]), torch.tensor([[0.3, 0.6]])
    assert telescoping_error(right, values, rewards, mask, 1.0, 0.0) < 1e-7
    assert telescoping_error(wrong, values, rewards, mask, 1.0, 0.0) == pytest.approx(0.1)


def test_discounted_gae_telescopes_over_rows_of_any_length():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 5, generator=generator)
    rewards = torch.randn(3, generator=generator)
    mask = torch.arange(5) < torch.tensor([[5], [3], [1]])
    advantages = compute_gae(values, token_rewards(rewards, mask), 0.9, 0.8, mask)
    assert telescoping_error(advantages, values, rewards, mask, 0.9, 0.8) < 1e-6
    assert telescoping_error(advantages, values, rewards, mask, 0.9, 0.7) > 1e-2


def test_spelt_tokens_put_together_are_the_text(model, gpt2_tokenizer, reviews):
    for tokenizer, ids in ((model.tokenizer, reviews[0][0]), (gpt2_tokenizer, torch.arange(5))):
        pieces = spell_tokens(tokenizer, ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == tokenizer.decode(ids.tolist())


def test_what_is_stored_is_exact_beside_estimated(finished):
    record, tensors = finished.records("text_heatmap")[0], finished.tensors("text_heatmap", 0)
    assert tensors["advantage"].shape == (4, 26) and record["prefix_len"] == 3
    whole = tensors["truth_mask"].all(1)
    assert bool(whole.any())
    # Nothing is known before the first word: V = 1/2; the advantages lead from there to the reward.
    assert torch.equal(tensors["true_value"][:, 0], torch.full((4,), 0.5))
    ends = 0.5 + tensors["true_advantage"].sum(1)
    torch.testing.assert_close(
        ends[whole], torch.tensor(record["rewards"])[whole], atol=2e-6, rtol=0
    )


def test_before_learning_kl_is_zero_and_later_not(finished):
    assert bool((finished.tensors("text_heatmap", 0)["kl"] == 0).all())
    assert bool((finished.tensors("text_heatmap", 2)["kl"] > 0).any())


def test_an_unknown_field_is_refused():
    with pytest.raises(ConfigError, match="'mood'"):
        TextHeatmap(fields=("mood",))


def test_log_ratio_matches_a_forward_pass_of_the_reference(make_trainer):
    """At another temperature than 1, over the reference's whole vocabulary."""

    class Ratio(Probe):
        events = ("after_score",)

        def observe(self, seen):
            samples = seen.ctx.rollout.samples
            with torch.no_grad():
                logits = seen.ctx.reference(samples.tokens[:3])[:, samples.prefix_len - 1 : -1]
            logprobs = (logits / 0.7).log_softmax(-1)
            written = samples.tokens[:3, samples.prefix_len :, None]
            expected = samples.logprobs[:3] - logprobs.gather(-1, written)[..., 0]
            found = sampled_log_ratio(seen.ctx.rollout, 3, seen)
            return Record(checks=[Check.at_most("x", (found - expected).abs().max().item(), 1e-4)])

    trainer = make_trainer(temperature=0.7, base_lr=3e-3)
    attached = attach(trainer, Ratio())
    trainer.train()
    checks = Run(trainer.run.path).checks()
    assert attached.notes == [] and len(checks) == 2 and all(check.ok for check in checks)
