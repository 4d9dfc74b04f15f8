"""Steps on the same weights, texts and scores return the numbers that TRL's PPOTrainer returned.

The JSON file holds three steps of TRL 0.11.4, with two passes each over one minibatch; the script
beside it wrote it, and has the weights' formula.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_lab.compat import TRLStats, trl_stats
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.training import RLHFTrainer

REFERENCE = Path(__file__).parent.parent / "functional" / "reference" / "trl_step.json"
CASE = json.loads(REFERENCE.read_text())
GIVEN = CASE["given"]
SEVERAL = "of several numbers"


def formula(model: nn.Module, shift: float) -> None:
    """The weights of the other side."""
    for k, (name, parameter) in enumerate(sorted(model.named_parameters())):
        i = torch.arange(parameter.numel(), dtype=torch.float64)
        noise = 0.3 * torch.sin(0.7 * i + k + shift).reshape(parameter.shape)
        is_gain = re.search(r"ln_\w+\.weight", name) is not None
        parameter.data = (noise + 1 if is_gain else noise).float()
    model.transformer.ln_f.weight.data.fill_(1.0)
    model.transformer.ln_f.bias.data.zero_()


@pytest.fixture(scope="module")
def directories(make_tiny_gpt2, save_model, gpt2_tokenizer, tmp_path_factory) -> list[str]:
    """Policy and reference before the first step."""
    made = []
    for shift in (0.0, 0.05):
        model = make_tiny_gpt2(tie_word_embeddings=False)
        formula(model, shift)
        place = tmp_path_factory.mktemp("trl") / "model"
        made.append(str(save_model(model, gpt2_tokenizer, place)))
    return made


@pytest.fixture
def trainer(directories, tmp_path) -> RLHFTrainer:
    """TRL's settings; frozen is what GPT-2 lacks, and the last normalisation, as on its side."""
    settings = GIVEN["settings"]
    base, reference = (load_model(name) for name in directories)
    base.unembed.b_U.requires_grad_(False)
    for parameter in base.ln_final.parameters():
        parameter.requires_grad_(False)
    head = nn.Linear(16, 1)
    head.weight.data = 0.2 * torch.sin(1.3 * torch.arange(16.0))[None]
    head.bias.data = torch.tensor([0.1])
    args = RLHFArgs(
        base_model=directories[0],
        reward_fn="zero",
        prefix="w1",
        total_phases=3,
        warmup_steps=0,
        final_scale=1.0,
        batch_size=settings["batch_size"],
        num_minibatches=1,
        batches_per_learning_phase=settings["ppo_epochs"],
        base_lr=settings["learning_rate"],
        head_lr=settings["learning_rate"],
        weight_decay=0.0,
        max_grad_norm=1e9,
        clip_coef=settings["cliprange"],
        vf_clip=settings["cliprange_value"],
        vf_coef=settings["vf_coef"],
        ent_coef=1e-7,
        advantages="gae",
        gen_len=8,
        top_k=None,
        kl_in="reward",
        kl_estimator="k1",
        kl_coef=settings["init_kl_coef"],
        normalize_reward=False,
    )
    policy = TransformerWithValueHead(base, head)
    return RLHFTrainer(args, out=tmp_path / "run", policy=policy, reference=reference)


def take_steps(trainer: RLHFTrainer, masks: list[list[int]] | None = None) -> list[dict[str, Any]]:
    watch, found = TRLStats(trainer), []
    for scores in GIVEN["scores"]:
        trainer.step(GIVEN["queries"], GIVEN["responses"], scores, masks)
        found.append(watch.stats)
    return found


@pytest.mark.slow
def test_three_steps_return_trls_numbers(trainer):
    """Before learning, after it, and again: losses, returns, KL and clip fractions alike.

    Rounding grows with the steps: without vector instructions (ATEN_CPU_CAPABILITY=default) the
    second one's KL is 2.4e-5 off, on an Intel processor 5.1e-5 (AVX2) and 5.8e-5 (AVX-512).
    """
    allowed = ({"rel": 1e-4, "abs": 2e-5}, *2 * [{"rel": 2e-4, "abs": 7e-5}])
    both = zip(take_steps(trainer), CASE["steps"].values(), strict=True)
    for (ours, theirs), bounds in zip(both, allowed, strict=True):
        numbers = {k: v for k, v in theirs.items() if isinstance(v, float)}
        assert len(numbers) > 20
        assert {name: ours[name] for name in numbers} == pytest.approx(numbers, **bounds)
        assert ours["objective/kl_dist"].tolist() == pytest.approx(
            theirs["objective/kl_dist"], rel=1e-3, abs=1e-4
        )


@pytest.mark.slow
def test_every_name_of_trls_is_there_but_three_times_of_its_parts(trainer):
    theirs = CASE["steps"]["0"]
    names = {*theirs, *theirs[SEVERAL], "time/ppo/total", "time/ppo/optimize_step"} - {SEVERAL}
    (ours, *_) = take_steps(trainer)
    assert names <= ours.keys()
    logged = {f"env/reward_{what}" for what in ("mean", "std", "dist")}
    assert ours.keys() - names == logged


@pytest.mark.slow
def test_tensors_hold_the_real_tokens_of_both_passes(trainer):
    (stats, *_) = take_steps(trainer)
    assert stats["ppo/policy/ratio"].shape == stats["ppo/policy/advantages"].shape == (2 * 11,)
    assert stats["ppo/policy/ratio"][:11].tolist() == pytest.approx([1.0] * 11, abs=1e-4)
    assert stats["tokens/responses_dist"].tolist() == [3.0, 2.0, 5.0, 1.0]
    assert stats["env/reward_dist"].tolist() == GIVEN["scores"][0]
    assert stats["objective/logprobs"].shape == stats["objective/ref_logprobs"].shape == (4, 5)


@pytest.mark.slow
def test_masked_tokens_count_for_nothing_as_in_trl(trainer):
    """KL, entropy and values are of what counts; the score is paid at the last token that does."""
    (ours, *_), theirs = take_steps(trainer, GIVEN["masks"]), CASE["masked_steps"]["0"]
    for name in (
        "objective/kl",
        "objective/entropy",
        "ppo/mean_non_score_reward",
        "ppo/val/mean",
        "ppo/val/var",
        "ppo/mean_scores",
    ):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name
    assert ours["ppo/policy/ratio"].shape == (2 * 8,)


def returns_by_hand(rollout: Any, holes_are_states: bool) -> list[float]:
    """Returns of the tokens that count, one row after the other, gamma 1 and lambda 0.95.

    Args:
        holes_are_states: TRL's way: a token that does not count is a state of value 0 and reward 0;
            else the next token that counts is the next state.
    """
    found, samples = [], rollout.samples
    kl = samples.logprobs - rollout.ref_logprobs
    for i, mask in enumerate(samples.mask.tolist()):
        last = max(t for t, counts in enumerate(mask) if counts)
        places = [t for t in range(last + 1) if mask[t] or holes_are_states]
        following, advantage, row = 0.0, 0.0, []
        for t in reversed(places):
            value = samples.values[i, t].item() if mask[t] else 0.0
            paid = -0.2 * kl[i, t].item() if mask[t] else 0.0
            paid += rollout.rewards[i].item() if t == last else 0.0
            advantage = paid + following - value + 0.95 * advantage
            following = value
            row = [advantage + value, *row] if mask[t] else row
        found += row
    return found


@pytest.mark.slow
def test_returns_skip_masked_tokens_where_trl_takes_them_for_states_of_value_0(trainer):
    seen = []
    trainer.on("after_score")(lambda ctx: seen.append(ctx.rollout))
    (ours, *_), theirs = take_steps(trainer, GIVEN["masks"]), CASE["masked_steps"]["0"]
    skipped, as_states = (returns_by_hand(seen[0], way) for way in (False, True))
    assert ours["ppo/returns/mean"] == pytest.approx(sum(skipped) / 8, abs=1e-5)
    assert theirs["ppo/returns/mean"] == pytest.approx(sum(as_states) / 8, abs=1e-4)
    assert abs(ours["ppo/returns/mean"] - theirs["ppo/returns/mean"]) > 0.01


@pytest.mark.slow
def test_masked_tokens_are_read_as_context_and_stay_in_the_text(trainer):
    seen = []
    trainer.on("after_score")(lambda ctx: seen.append(ctx.rollout))
    masks, responses = GIVEN["masks"], GIVEN["responses"]
    trainer.step(GIVEN["queries"], responses, GIVEN["scores"][0], masks)
    (rollout,) = seen
    assert rollout.texts[0] == trainer.tokenizer.decode(GIVEN["queries"][0] + responses[0])
    for i, row in enumerate(masks):
        assert rollout.samples.mask[i, : len(row)].int().tolist() == row
        assert not rollout.samples.mask[i, len(row) :].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("masks", "complaint"),
    [
        ([[1, 1, 1]], "response_masks has 1 entries for 4 responses"),
        ([[1, 1], [1, 1], [1] * 5, [1]], r"response_masks\[0\]=.*response of 3 tokens"),
        ([[1, 1, 1], [0, 0], [1] * 5, [1]], r"response_masks\[1\]=.*at least one 1"),
        ([[1, 1, 1], [1, 1], [1, 2, 1, 1, 1], [1]], r"response_masks\[2\]=.*a 0 or a 1"),
    ],
)
def test_masks_that_do_not_fit_are_refused(trainer, masks, complaint):
    with pytest.raises(ConfigError, match=complaint):
        trainer.step(GIVEN["queries"], GIVEN["responses"], GIVEN["scores"][0], masks)
    assert trainer.phase == 0


def test_before_the_first_phase_there_are_no_statistics(make_trainer):
    with pytest.raises(RunError, match="no phase has ended yet"):
        _ = TRLStats(make_trainer()).stats


@pytest.mark.slow
def test_without_a_kl_estimate_the_kl_is_exact_and_without_an_entropy_bonus_the_rollouts(
    make_trainer,
):
    trainer = make_trainer(ent_coef=0.0)
    watch = TRLStats(trainer)
    report = trainer.run_phase()
    assert watch.stats["objective/kl"] == pytest.approx(report.kl_per_sequence, abs=1e-6)
    assert "objective/ref_logprobs" not in watch.stats
    assert watch.stats["ppo/policy/entropy"] == report.entropy_per_token
    assert watch.stats["ppo/mean_non_score_reward"] == 0.0
    assert watch.stats["ppo/val/clipfrac"] == 0.0
    assert trl_stats(report, trainer.args).keys() <= watch.stats.keys()


@pytest.mark.slow
def test_watching_changes_no_weight(make_trainer, parameters_of):
    watched, plain = make_trainer(), make_trainer()
    TRLStats(watched)
    for trainer in (watched, plain):
        trainer.run_phase()
    ours, theirs = parameters_of(watched.policy), parameters_of(plain.policy)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_statistics_are_means_over_the_minibatches_of_a_phase(make_trainer):
    """Two minibatches, two passes; in the total, the value's loss is weighed by vf_coef."""
    trainer = make_trainer(num_minibatches=2, vf_coef=0.5)
    watch, losses = TRLStats(trainer), []
    trainer.on("after_loss")(lambda ctx: losses.append(-ctx.terms.clipped_surrogate.item()))
    trainer.run_phase()
    stats = watch.stats
    assert len(losses) == 4
    assert stats["ppo/loss/policy"] == pytest.approx(sum(losses) / 4, abs=1e-6)
    assert stats["ppo/loss/total"] == pytest.approx(
        stats["ppo/loss/policy"] + 0.5 * stats["ppo/loss/value"], abs=1e-6
    )
    explained = 1 - stats["ppo/val/error"] / stats["ppo/returns/var"]
    assert stats["ppo/val/var_explained"] == pytest.approx(explained)
    assert all(math.isfinite(v) for v in stats.values() if isinstance(v, float))
