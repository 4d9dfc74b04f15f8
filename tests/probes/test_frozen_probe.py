import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import has_hooks
from rlhf_lab.models.tokenization import single_token
from rlhf_lab.probes import FrozenProbe, ReelTruth, Run, Suite, attach
from rlhf_lab.probes.direction import cosine_interval, fit_direction
from rlhf_lab.probes.frozen_probe import halves_of
from rlhf_lab.probes.steering import continue_steered
from rlhf_lab.sampling import sample, sampling_noise
from rlhf_lab.sampling_spec import SamplingSpec
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.views import probe_html

TRUTH = ReelTruth()
VERDICT = TRUTH.grammar.slot("VERB") - 1
ARGS = {
    "preset": "reel",
    "reward_fn": "true_reward",
    "total_phases": 1,
    "batch_size": 16,
    "num_minibatches": 2,
    "warmup_steps": 0,
    "gen_len": 26,
    "base_lr": 3e-3,
}
LAST = "blocks.1.hook_resid_post"
GENERATOR = torch.Generator().manual_seed(0)


def record_of(path, probe=None, **overrides):
    """A short run with the probe: the run, and the attachment."""
    tokens, labels = TRUTH.reviews(96, seed=5)
    probe = probe or FrozenProbe(pos=VERDICT, steered=8, randoms=3, every=1)
    trainer = RLHFTrainer(RLHFArgs(**(ARGS | overrides)), out=path)
    attached = attach(trainer, Suite(probe, eval_tokens=tokens, labels=labels))
    trainer.train()
    return Run(path), attached, trainer


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record_of(tmp_path_factory.mktemp("frozen") / "run")


def test_the_cosine_is_that_of_the_differences_of_means():
    x, first = torch.randn(2, 3, 40, 5, generator=GENERATOR)
    labels = torch.rand(40, generator=GENERATOR) < 0.4
    found = cosine_interval(x, first, labels)
    axes = [fit_direction(acts, labels).direction for acts in (x, first)]
    assert found.value.tolist() == pytest.approx((axes[0] * axes[1]).sum(-1).tolist())
    assert found.n == 40 and bool((found.low < found.high).all())
    x[1] = 1.0  # where the token is always the same there is no axis
    assert cosine_interval(x, first, labels).low.isnan().tolist() == [False, True, False]
    same = cosine_interval(first, first, labels)
    assert same.low.tolist() == pytest.approx([1.0] * 3)


def test_each_half_has_both_classes_though_the_labels_alternate():
    labels = torch.arange(7) % 2 == 0
    halves = halves_of((labels, ~labels))
    assert [half.tolist() for half in halves] == [
        [True, True, False, False, True, True, False],
        [False, False, True, True, False, False, True],
    ]


def test_added_nothing_is_sampling(reel_policy):
    prefixes = TRUTH.reviews(4, seed=3)[0][:, :10]
    spec = SamplingSpec(6, temperature=0.9)
    noise = sampling_noise(4, 6, torch.Generator().manual_seed(2))
    nothing = torch.zeros(4, 64)
    found, surprise = continue_steered(
        reel_policy, prefixes, "blocks.0.hook_resid_post", nothing, spec, noise
    )
    drawn = sample(reel_policy, prefixes.tolist(), spec, torch.Generator().manual_seed(2))
    assert found.tolist() == drawn.tokens.tolist()
    assert surprise.tolist() == pytest.approx((-drawn.logprobs.sum(1)).tolist(), rel=1e-4)
    assert not has_hooks(reel_policy)


def test_rows_are_steered_by_vectors_of_their_own(reel_policy):
    prefixes = TRUTH.reviews(1, seed=3)[0][:, : VERDICT + 1].repeat(3, 1)
    spec, noise = SamplingSpec(1), torch.full((1, 3), 0.5)
    model = reel_policy.base_model
    love, hate = (single_token(model.tokenizer, word) for word in ("loved", "hated"))
    vector = 50 * (model.W_U[:, love] - model.W_U[:, hate]).detach()
    added = torch.stack([vector, -vector, 0 * vector])
    out, _ = continue_steered(reel_policy, prefixes, LAST, added, spec, noise)
    words = [model.tokenizer.decode(row[-1:]).strip() for row in out]
    assert words[:2] == ["loved", "hated"] and words[2] not in ("", "<eos>")


@pytest.mark.slow
def test_before_learning_both_readers_are_one_and_the_reader_steers(recorded):
    run, _, _ = recorded
    first, last = run.records("frozen_probe")
    assert first["gap"] == [0.0] * 3 and first["cosine"][1:] == [1.0, 1.0]
    assert first["shift"] == [0.0] * 3 and abs(last["shift"][2]) > 0.01
    assert first["slot"] == "I" and first["accuracy_frozen"][2] <= first["bayes_accuracy"][0] + 0.1
    true_reward = dict(zip(first["alphas"], first["true_reward"], strict=True))
    assert true_reward[1.0] > true_reward[0.0] > true_reward[-1.0]
    tensors = run.tensors("frozen_probe", 0)
    assert tensors["true_reward"].shape == (7, 8)
    assert all(check.ok for check in run.checks())


@pytest.mark.slow
def test_its_picture_shows_both_readers_and_how_many_sites_were_compared(recorded):
    page = probe_html(recorded[0], "frozen_probe")
    assert "the most accurate of 3 sites" in page and "counted on 32 others" in page
    assert "true_reward, steered; n = 8" in page


def test_what_it_cannot_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least one random direction"):
        FrozenProbe(randoms=0)
    with pytest.raises(ConfigError, match="sizes other than 0"):
        FrozenProbe(alphas=(0.0, 1.0))
    args = RLHFArgs(**(ARGS | {"reset_reference_every": 1, "total_phases": 3}))
    trainer = RLHFTrainer(args, out=tmp_path / "run")
    with pytest.raises(ConfigError, match="leave it None"):
        tokens, labels = TRUTH.reviews(4, seed=1)
        attach(trainer, FrozenProbe(), eval_tokens=tokens, labels=labels)


@pytest.mark.slow
def test_records_hold_on_a_model_without_truth(elsewhere):
    tokens = torch.randint(3, 20, (12, 8), generator=torch.Generator().manual_seed(0))
    probe, labels = FrozenProbe(every=1, pos=3), torch.arange(12) % 2 == 0
    attached = attach(elsewhere, Suite(probe, eval_tokens=tokens, labels=labels))
    elsewhere.train()
    run = Run(elsewhere.run.path)
    assert attached.notes == [] and len(run.records("frozen_probe")) == 3
    assert all(check.ok for check in run.checks())
