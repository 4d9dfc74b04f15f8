"""On-policy distillation: a run whose reference is a teacher; test_methods.py has its gradient."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError
from rlhf_lab.functional import kl_per_token, log_probs
from rlhf_lab.models import load_model
from rlhf_lab.probes import WeightDelta, attach, attach_default_suite
from rlhf_lab.training import RLHFTrainer
from tests.probes.looking import train_soundly
from tests.small_runs import DEVICE

SMALL = dict(preset="reel", device=DEVICE, total_phases=2, batch_size=8, num_minibatches=2)
SMALL |= dict(method="gkd", warmup_steps=0, gen_len=6, prefix="this movie")


@pytest.fixture
def distill(tmp_path):
    """Makes trainers with method gkd."""
    made = []

    def make(teacher="reel-nano-b", reference=None, **settings):
        made.append(tmp_path / f"run{len(made)}")
        args = RLHFArgs(**SMALL | {"reference_model": teacher} | settings)
        return RLHFTrainer(args, out=made[-1], reference=reference)

    return make


def with_constant_logits(model, first=0.0):
    """Make the logits of all states equal: 0, except for token 0."""
    with torch.no_grad():
        model.unembed.W_U.zero_()
        model.unembed.b_U.zero_()[0] = first
    return model


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 1), (1, 2), (4, 2)])
def test_kl_matches_hand_computed(distill, size):
    """The student is uniform over 72 tokens, and the teacher gives token 0 ten times the weight.

    KL = log(81 / 72) - log(10) / 72 = 0.0858 nats per token.
    """
    batch, gen_len = size
    settings = dict(batch_size=batch, num_minibatches=1, gen_len=gen_len)
    teacher = with_constant_logits(load_model("reel-nano"), math.log(10))
    trainer = distill(None, teacher, **settings)
    with_constant_logits(trainer.policy.base_model)
    report = trainer.run_phase()
    kl = math.log(81 / 72) - math.log(10) / 72
    assert report.kl_per_token == pytest.approx(kl, abs=1e-6)
    assert report.kl_per_sequence == pytest.approx(gen_len * kl, abs=1e-6)
    assert report.objective == pytest.approx(-kl, abs=1e-6)
    assert trainer.policy.base_model.unembed.b_U[0] > 0  # toward the teacher


@pytest.mark.slow
def test_tokens_after_the_end_do_not_count(distill):
    ending = dict(temperature=2.0, gen_len=10, stop_tokens="was")
    trainer, found = distill(**ending), []
    rollout = trainer.rollout_phase()
    assert not rollout.samples.mask.all()
    for token in (5, 6):
        rollout.samples.tokens[:, rollout.samples.prefix_len :][~rollout.samples.mask] = token
        learned = distill(**ending).learning_phase(rollout)
        found.append((learned.kl_penalty, learned.grad_norm))
    assert found[0] == pytest.approx(found[1], rel=1e-5) and found[0][0] > 0


def test_log_ratio_of_sampled_tokens_can_be_the_advantage(distill):
    with pytest.warns(UserWarning, match="method='gkd' runs with other settings"):
        trainer = distill(kl_in="reward", kl_estimator="k1", gamma=0.0)
    rollout = trainer.rollout_phase()
    expected = rollout.ref_logprobs - rollout.samples.logprobs
    torch.testing.assert_close(rollout.advantages, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_teacher_may_have_another_architecture(distill, tmp_path):
    student, folder = load_model("reel-nano"), tmp_path / "teacher"
    config = GPT2Config(vocab_size=72, n_positions=40, n_embd=24, n_layer=3, n_head=3)
    teacher = GPT2LMHeadModel(config).eval()
    teacher.save_pretrained(folder)
    student.tokenizer.save_pretrained(folder)
    trainer = distill(str(folder))
    assert not any(weight.requires_grad for weight in trainer.reference.parameters())
    rollout = trainer.rollout_phase()
    tokens, states = rollout.samples.tokens.cpu(), slice(rollout.samples.prefix_len - 1, -1)
    with torch.no_grad():
        logits = student(tokens), teacher(tokens).logits
    expected = kl_per_token(*(log_probs(x[:, states].double()) for x in logits))
    torch.testing.assert_close(rollout.kl.double().cpu(), expected, atol=1e-5, rtol=1e-5)
    with pytest.warns(UserWarning, match="out words_moved and weight_delta: the reference has"):
        notes = attach_default_suite(trainer).notes
    by_hand = attach(trainer, WeightDelta(every=1))
    with pytest.warns(UserWarning, match="switched off: .*the reference has another architecture"):
        assert len(trainer.train()) == 2 and not notes and len(by_hand.notes) == 1


@pytest.mark.slow
def test_distillation_passes_the_checks_of_probes(distill, recwarn):
    """test_resume.py resumes a run with a teacher."""
    trainer = distill()
    attach_default_suite(trainer)
    train_soundly(trainer)
    assert not [x for x in recwarn if "nothing is learned" in str(x.message)]  # all rewards are 0


def test_unsuitable_teachers_are_rejected(distill):
    short, shuffled, bare = map(load_model, ("reel-nano-b", "reel-nano-b", "sums-nano"))
    short.cfg.n_ctx, bare.tokenizer = 8, None
    words = sorted(shuffled.tokenizer.get_vocab())
    shuffled.tokenizer.get_vocab = lambda: {word: i for i, word in enumerate(words)}
    other = "other tokens than the policy .vocabularies of {} and 72.*same tokenizer"
    reset = dict(reset_reference_every=1)
    for teacher, reference, fields, message in (
        (None, None, {}, "gkd' requires a teacher. Set reference_model"),
        ("sums-nano", None, {}, other.format(20)),
        (None, bare, {}, other.format(20)),
        (None, shuffled, {}, other.format(72)),
        (None, short, {}, "a prompt of 3 .*exceeds the reference's context"),
        ("reel-nano-b", None, reset, "reset_reference_every=1 discards the teacher"),
        ("reel-nano-b", None, reset | {"method": None}, "reset_reference_every=1 discards"),
        (None, short, reset, "reset_reference_every=1 discards"),
        ("reel-nano-b", short, {}, "reference_model='reel-nano-b' conflicts"),
    ):
        with pytest.raises(ConfigError, match=message):
            distill(teacher, reference, **fields)
    shuffled.tokenizer = None
    assert distill(None, shuffled).reference is shuffled  # only the sizes can be compared


def test_exact_optimum_is_of_runs_without_a_teacher(distill):
    trainers = distill(), distill(None, load_model("reel-nano-b")), distill(None, method=None)
    assert [trainer.starts_as_grammar for trainer in trainers] == [False, False, True]
