import numpy as np
import pytest
import torch
from torch import nn

from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import bootstrap_interval
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism.bundled import LANGUAGE_MODELS
from rlhf_lab.probes import ValueLens
from rlhf_lab.probes.probe import RESAMPLES
from rlhf_lab.probes.tuned_lens import PENALTIES
from rlhf_lab.probes.value_lens import (
    RESIDUAL_SITES,
    fit_ridge,
    held_out_fits,
    normalize_residual,
    r2_interval,
    r_squared,
    value_lens,
)
from rlhf_lab.training.capture import capture_activations


def readability(*rows, **options):
    """Return R2 of held-out fits, and True for each defined one."""
    found = [r_squared(*fit) for fit in held_out_fits(*rows, **options)]
    return [torch.stack(column) for column in zip(*found, strict=True)]


def random_tokens(policy, batch=3, seq=9):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(policy.base_model.cfg.d_vocab, (batch, seq), generator=generator)


def test_the_norm_is_that_of_the_final_layer_norm_or_rms_norm(policy):
    model, tokens = policy.base_model, random_tokens(policy)
    _, cache = model.run_with_cache(tokens)
    last = cache[f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"]
    torch.testing.assert_close(
        normalize_residual(model, last), cache["ln_final.hook_normalized"], atol=1e-6, rtol=1e-5
    )


def test_the_last_layer_s_lens_is_the_model_s_value(policy):
    tokens = random_tokens(policy)
    acts = capture_activations(policy, tokens, [*RESIDUAL_SITES, "values"])
    values = acts.pop("values")
    lens = value_lens(policy, torch.stack(list(acts.values())))
    assert lens.shape == (5, 3, 9)
    torch.testing.assert_close(lens[-1], values, atol=1e-5, rtol=1e-5)
    assert (lens[0] - values).abs().max() > 1e-2


def test_a_planted_linear_head_reads_an_exact_projection(model):
    head = nn.Linear(64, 1)
    policy = TransformerWithValueHead(model, head)
    residual = torch.randn(2, 3, 4, 64, generator=torch.Generator().manual_seed(2))
    x = residual.double().numpy()
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.cfg.eps)
    expected = x @ head.weight[0].detach().double().numpy() + head.bias.item()
    found = value_lens(policy, residual).double().numpy()
    assert np.abs(found - expected).max() < 1e-5


def test_ridge_without_a_penalty_is_least_squares_and_masked_rows_do_not_count():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(20, 3)), generator.normal(size=20)
    design = np.concatenate([x, np.ones((20, 1))], 1)
    expected = np.linalg.lstsq(design, y, rcond=None)[0]
    wild = np.concatenate([x, np.full((5, 3), 1e3)])
    labels = np.concatenate([y, np.full(5, -1e3)])
    mask = torch.arange(25) < 20
    slope, intercept = fit_ridge(torch.tensor(wild), torch.tensor(labels), mask, 0.0)
    assert slope.numpy() == pytest.approx(expected[:3], abs=1e-9)
    assert intercept.item() == pytest.approx(expected[3], abs=1e-9)


def test_ridge_shrinks_by_hand():
    x, y = torch.tensor([[-1.0], [1.0]]), torch.tensor([-3.0, 3.0])
    # X'X = 2, which is also the variance times n: w = 6 / (2 + 0.5 * 2) = 2.
    slope, intercept = fit_ridge(x, y, torch.tensor([True, True]), 0.5)
    assert (slope.item(), intercept.item()) == pytest.approx((2.0, 0.0))


def test_r_squared_by_hand_and_where_it_is_undefined():
    y = torch.tensor([[0.0, 1.0, 2.0], [4.0, 4.0, 4.0]])
    predicted = torch.tensor([[0.0, 1.0, 1.0], [4.0, 4.0, 4.0]])
    # total 2, error 1
    r2, defined = r_squared(predicted, y, torch.ones(2, 3, dtype=torch.bool))
    assert r2.tolist() == [0.5, 0.0] and defined.tolist() == [True, False]


def test_a_linear_target_is_read_and_noise_is_not_though_it_could_be_overfitted():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 90, 2, 40, generator=generator)
    direction = torch.randn(40, generator=generator)
    target = torch.stack([x[0, :, 0] @ direction, torch.randn(90, generator=generator)], 1)
    r2, defined = readability(x, target, torch.ones(90, 2, dtype=torch.bool))
    assert bool(defined.all())
    assert r2[0, 0] > 0.999 and r2[0, 1] < 0.2


def test_pooled_positions_share_one_fit():
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 30, 5, 4, generator=generator)
    target = x[0] @ torch.tensor([1.0, -2.0, 0.5, 3.0])
    mask = torch.rand(30, 5, generator=generator) < 0.8
    r2, _ = readability(x, target, mask, pooled=True)
    assert r2.shape == (2, 1)
    assert r2[0, 0] > 0.999 and r2[1, 0] < 0.2


@pytest.mark.parametrize("pooled", [False, True])
def test_the_interval_of_r2_draws_whole_sequences(pooled):
    """Against a call of R2 per resample, on the sequences with all their tokens."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 60, 3, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    target = x[0] @ torch.tensor([1.0, -2.0, 0.5, 3.0]).double() + 2 * noise
    target[:, 2] = 1.0
    mask = torch.rand(60, 3, generator=generator) < 0.8
    fits = held_out_fits(x, target, mask, pooled=pooled)
    found = r2_interval(fits, 20)
    r2, defined = readability(x, target, mask, pooled=pooled)
    assert found.n == 20 and found.value.shape == r2.shape == (2, 1 if pooled else 3)
    torch.testing.assert_close(found.value[defined], r2[defined])
    if not pooled:
        assert not defined[:, 2].any() and found.low[:, 2].isnan().all()
    tokens = 3 if pooled else 1
    predicted, y, counts = (part[0].reshape(20, tokens) for part in fits[0])
    of_rows = lambda *rows: r_squared(*(row.flatten() for row in rows))[0]
    one = bootstrap_interval(predicted, y, counts, statistic=of_rows, resamples=RESAMPLES)
    ends = torch.stack([found.low[0, 0], found.high[0, 0]])
    torch.testing.assert_close(ends, torch.stack([one.low, one.high]))


def test_too_few_sequences_are_refused():
    with pytest.raises(ValueError, match="batch is 5"):
        readability(torch.zeros(1, 5, 2, 3), torch.zeros(5, 2), torch.ones(5, 2).bool())


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_bundled_policy_holds_the_exact_value_where_the_next_word_asks_for_it(name, truth):
    """Behind "i" comes the verb. At "ADJ 3", the stop and "i" the value is the same number."""
    tokens, _ = truth.reviews(900, seed=11)
    acts = capture_activations(load_model(name), tokens, RESIDUAL_SITES)
    values, mask = truth.values(tokens)
    r2, defined = readability(torch.stack(list(acts.values())), values, mask, 1e-4)
    last, before_verb = r2[-1], truth.grammar.slot("VERB") - 1
    at_the_adjective, at_the_stop = (truth.grammar.slot("ADJ", 2), before_verb - 1)
    assert truth.slot_names(tokens.shape[1])[at_the_stop] == "STOP"
    assert last[before_verb] > 0.9
    assert last[at_the_adjective] < last[before_verb] - 0.1
    assert last[at_the_stop] < last[before_verb] - 0.1
    assert r2[0, before_verb] < 0.05
    # Nothing is known before the first adjective.
    assert defined[0].tolist() == [False] * 9 + [True] * 20


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_word_before_the_verb_counts_the_votes_and_its_mlp_weighs_them(name, truth):
    """What the value is beyond the best linear function of the votes is made by the last MLP there.

    Three votes of odds 17 to 3 each: 3 positive ones give 17^3 / (17^3 + 3^3) = .9945, 2 of 3 give
    .85. The best linear function explains .938 of that.
    """
    reviews = truth.grammar.sample(4000, np.random.default_rng(3))
    tokens = torch.from_numpy(reviews.tokens)
    slots = truth.slot_names(tokens.shape[1])
    adjective, before_verb = slots.index("ADJ 3"), slots.index("I")
    values, mask = truth.values(tokens)
    value = values[:, adjective].double().numpy()
    votes = np.asarray(reviews.latents.polarity, dtype=float).sum(1)
    for sum_of_votes, posterior in ((3, 0.9945), (1, 0.85), (-1, 0.15), (-3, 0.0055)):
        assert value[votes == sum_of_votes] == pytest.approx(posterior, abs=1e-4)
    slope, intercept = np.polyfit(votes, value, 1)
    beyond = value - slope * votes - intercept
    assert 1 - beyond.var() / value.var() == pytest.approx(0.938, abs=0.003)

    acts = capture_activations(load_model(name), tokens, RESIDUAL_SITES)
    sites = ("blocks.1.hook_resid_mid", "blocks.1.hook_resid_post")
    x = torch.stack([acts[site][:, [adjective, before_verb]] for site in sites])
    everywhere = mask[:, [adjective, before_verb]]

    def read(target: np.ndarray) -> torch.Tensor:
        both = torch.from_numpy(target).float()[:, None].expand(-1, 2)
        return readability(x, both, everywhere)[0]

    counted, weighed = read(votes), read(beyond)
    assert counted[:, 1].min() > 0.95 and counted[:, 0].max() < 0.95
    assert weighed[:, 0].max() < 0.2
    assert weighed[1, 1] > weighed[0, 1] + 0.1


def test_a_run_stores_the_lens_and_what_can_be_read(finished):
    record = finished.records("value_lens")[0]
    assert record["phase"] == 0 and len(record["sites"]) == 5
    tensors = finished.tensors("value_lens", 0)
    assert tensors["lens"].shape == (5, 4, 29) and len(record["r2"]) == 5


@pytest.mark.slow
def test_r2_of_a_record_matches_least_squares_by_numpy(make_trainer, truth):
    """Ridge as least squares with rows sqrt(penalty) I, fitted to two thirds of the texts."""
    from rlhf_lab.probes import Run, attach

    trainer, (tokens, _) = make_trainer(base_lr=3e-3), truth.reviews(60, seed=3)
    attach(trainer, ValueLens(ridge=0.1, prefixes=0), eval_tokens=tokens)
    trainer.train()
    record = Run(trainer.run.path).records("value_lens")[-1]
    acts = capture_activations(trainer.policy, tokens, record["sites"])
    values, defined = (x.double().numpy() for x in truth.values(tokens))
    for site, pos in ((0, 9), (2, 12), (4, 24)):
        assert defined[:, pos].all() and values[:, pos].std() > 0.01
        x, y = acts[record["sites"][site]][:, pos].double().numpy(), values[:, pos]
        x, y = x - x[:40].mean(0), y - y[:40].mean()
        penalty = 0.1 * (x[:40] ** 2).sum() / 64
        rows = np.vstack([x[:40], np.sqrt(penalty) * np.eye(64)])
        slope = np.linalg.lstsq(rows, np.append(y[:40], np.zeros(64)), rcond=None)[0]
        r2 = 1 - ((y[40:] - x[40:] @ slope) ** 2).sum() / ((y[40:] - y[40:].mean()) ** 2).sum()
        assert record["r2"][site][pos] == pytest.approx(r2, abs=2e-3)


@pytest.mark.slow
def test_returns_can_be_the_target_where_no_truth_is_known(make_trainer):
    from rlhf_lab.probes import Run, attach

    trainer = make_trainer()
    attach(trainer, ValueLens(text="rollout", every=1))
    trainer.train()
    run = Run(trainer.run.path)
    assert run.phases("value_lens") == [0, 1] and run.records("value_lens")[0]["slots"] == ["all"]
    assert all(check.ok for check in run.checks())


@pytest.mark.slow
@pytest.mark.parametrize("text", ["eval", "rollout"])
def test_with_a_separate_critic_the_lens_looks_at_the_critic(make_trainer, text, reviews):
    """At its last layer stands its own value, and the policy's states would give another one."""
    from rlhf_lab.probes import Run, attach

    trainer = make_trainer(value_head="separate", total_phases=3, gen_len=26)
    lens = ValueLens(text=text, every=1)
    attach(trainer, lens, eval_tokens=reviews[0])
    trainer.train()
    run = Run(trainer.run.path)
    assert all(check.ok for check in run.checks())
    if text == "eval":
        policy, shown = trainer.policy, reviews[0][:4]
        last = run.tensors("value_lens", 3)["lens"][-1]
        assert torch.allclose(last, policy(shown)[1].detach(), atol=1e-5)
        of_the_policy = capture_activations(policy, shown, RESIDUAL_SITES)
        others = value_lens(policy, torch.stack(list(of_the_policy.values())))[-1]
        assert (last - others).abs().max() > 1e-3


@pytest.mark.slow
def test_a_record_says_what_each_figure_is_against(finished):
    """The policy's value beside the grammar's, behind the second connector of held-out texts."""
    first, last = finished.records("value_lens")[0], finished.records("value_lens")[-1]
    assert first["r2_against"] == "V of the grammar" and first["ridge"] in PENALTIES
    assert first["correlation_against"] == "V of the policy"
    assert first["slots"][first["prefix_pos"]] == "CONN 2" and len(first["prefix_rows"]) == 16
    assert min(first["prefix_rows"]) == 2 * 96 // 3
    estimates = ["head", *(f"raw {site}" for site in first["sites"])]
    estimates += [*(f"tuned {site}" for site in first["sites"][:-1]), "grammar"]
    assert last["estimates"] == estimates
    tensors = finished.tensors("value_lens", first["phase"])
    away = tensors["v_policy"] - tensors["estimates"][:, -1]
    assert (away.abs() / tensors["v_policy_se"].clamp(min=0.05)).max() < 4
    assert first["correlation"][-1] > 0.8  # before learning, the policy is nearly the grammar


@pytest.mark.slow
def test_policy_value_is_estimated_with_a_given_reward(elsewhere):
    """Prompts of any model, with a prefix that ends where the caller says."""
    from rlhf_lab.probes import Run, attach

    tokens = torch.randint(5, 20, (9, 6), generator=torch.Generator().manual_seed(0))
    count = lambda texts: torch.tensor([float(text.count("w1")) for text in texts])
    lens = ValueLens(prefixes=5, continuations=4, prefix_end=2, reward=count, every=1)
    attach(elsewhere, lens, eval_tokens=tokens)
    elsewhere.train()
    run = Run(elsewhere.run.path)
    assert run.phases("value_lens") == [0, 1, 2] and all(check.ok for check in run.checks())
    record = run.records("value_lens")[-1]
    assert record["prefix_rows"] == [6, 7, 8] and record["prefix_pos"] == 2
    assert "grammar" not in record["estimates"] and "r2" not in record


@pytest.mark.slow
def test_nothing_is_continued_without_prefixes_or_a_reward(make_trainer, reviews):
    from rlhf_lab.probes import Run, attach

    trainer = make_trainer()
    lens = ValueLens(prefixes=0, ridge=0.1, every=1)
    attach(trainer, lens, eval_tokens=reviews[0])
    trainer.train()
    run = Run(trainer.run.path)
    record = run.records("value_lens")[-1]
    assert "correlation" not in record and record["ridge"] == record["tuned_ridge"] == 0.1
    assert "ridge_errors" not in run.tensors("value_lens", 2)
    assert all(check.ok for check in run.checks())


@pytest.mark.slow
@pytest.mark.parametrize("pos", [28, -1, 40, -40])
def test_a_prefix_that_leaves_nothing_to_write_is_refused(make_trainer, reviews, pos):
    from rlhf_lab.probes import attach

    trainer = make_trainer()
    attach(trainer, ValueLens(prefix_end=pos, every=1), eval_tokens=reviews[0])
    with pytest.warns(UserWarning, match=f"prefix_end={pos} .* choose from 0 to 27"):
        trainer.train()


def test_another_text_is_refused():
    with pytest.raises(ConfigError, match="'dreams'"):
        ValueLens(text="dreams")


@pytest.mark.parametrize("given", [{"prefixes": -1}, {"continuations": 1}])
def test_too_few_continuations_are_refused(given):
    with pytest.raises(ConfigError, match="has no standard error"):
        ValueLens(**given)
