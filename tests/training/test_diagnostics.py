"""Learning that is dead, exploded or not finite, and settings without effect: warned or raised."""

import dataclasses
import itertools
import json
import math
import warnings
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW

from rlhf_lab import functional as F
from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.rewards import load_policy_and_critic
from rlhf_lab.training import ObjectiveTerms, RLHFTrainer
from rlhf_lab.training.phase_stats import PhaseStats, diagnose_batch
from rlhf_lab.training.report import RolloutStats
from rlhf_lab.views import write_report
from tests.small_runs import DEVICE
from tests.training.recorded_runs import make_minibatch


def equal(texts: list[str]) -> list[float]:
    return [0.5] * len(texts)


def strict(text: str) -> dict:
    """Read JSON; raise KeyError at NaN or Infinity."""
    return json.loads(text, parse_constant={}.__getitem__)


NUMBERS = dict(mean_reward=0.5, reward_std=0.1, kl_per_token=0.1, kl_per_sequence=0.6)
NUMBERS |= dict(entropy_per_token=1.0, response_length=6.0, explained_variance=0.0)
HEALTHY = RolloutStats(**NUMBERS, true_reward=None)
FULL = SimpleNamespace(mask=torch.ones(2, 6), tokens=torch.tensor([[0, 5], [0, 6]]))
ROLLOUT = {"texts": ["a", "b"], "rewards": torch.tensor([0.0, 1.0]), "compared": True}


@pytest.mark.usefixtures("no_type_checks")  # the batch is a stand-in
def test_signs_of_a_batch_match_hand_computed(reel_args):
    for sign, words, stats, rollout in (
        (None, None, {"uninformative_group_fraction": 0.9, "kl_per_token": 2.0}, {}),
        (None, None, {"uninformative_group_fraction": 1.0}, {"compared": False}),
        (None, None, {"reward_std": 0.0}, {"texts": ["a"]}),
        ("reward_spread", "nothing is learned", {"reward_std": 0.0}, {}),
        ("reward_spread", "scale them down", {"reward_std": math.inf}, {}),
        ("reward_spread", "penalize_no_eos", {}, {"rewards": torch.ones(2)}),
        ("alike", "all 2 responses are the same text", {}, {"texts": ["a", "a"]}),
        ("entropy", "hardly explores", {"entropy_per_token": 0.9e-3}, {}),
        ("groups", "teaches nothing", {"uninformative_group_fraction": 1.0}, {}),
        ("kl", "is far from it", {"kl_per_token": 2.1}, {}),
    ):
        batch = SimpleNamespace(**ROLLOUT | rollout)
        found = diagnose_batch(dataclasses.replace(HEALTHY, **stats), batch, reel_args())
        assert found.keys() == ({sign} - {None}) and (words is None or words in found[sign])
    still = reel_args(base_lr=0.0, head_lr=0.0)
    assert diagnose_batch(HEALTHY, SimpleNamespace(**ROLLOUT), still).keys() == {"rates"}
    whole = SimpleNamespace(**ROLLOUT, samples=FULL)
    unended = reel_args(stop_at_eos=False, stop_token_ids="3")
    assert "end-of-sequence token is not" in diagnose_batch(HEALTHY, whole, unended)["unended"]
    assert not diagnose_batch(HEALTHY, whole, reel_args(stop_tokens="."))
    whole.samples.tokens = torch.tensor([[0, 5], [1, 5]])  # all end at the last place
    assert not diagnose_batch(HEALTHY, whole, unended)
    ended = dataclasses.replace(HEALTHY, response_length=5.5)
    assert not diagnose_batch(ended, whole, unended)
    equal_rewards = dataclasses.replace(HEALTHY, reward_std=0.0), SimpleNamespace(**ROLLOUT)
    assert not diagnose_batch(*equal_rewards, reel_args(reward_fn="zero"))  # learns by the KL
    as_reference = dataclasses.replace(HEALTHY, kl_per_token=0.0), SimpleNamespace(**ROLLOUT)
    assert diagnose_batch(*as_reference, reel_args(), phase=4).keys() == {"unmoved"}
    assert not diagnose_batch(*as_reference, reel_args(base_lr=0.0), phase=4)  # the head only
    warming_up = reel_args(warmup_steps=5, total_phases=9)
    assert not diagnose_batch(*as_reference, warming_up, phase=5)


@pytest.mark.slow
def test_sign_is_reported_once_in_report_and_run_json(make_trainer):
    """The spread of rewards of 1e-40 is 0 in single precision."""
    reward_fn = lambda texts: [1e-40, 0.0] * (len(texts) // 2)
    trainer, words = make_trainer({"reward_fn": reward_fn}), "nothing is learned"
    trainer.train()
    info = strict((trainer.run.path / "run.json").read_text())
    assert words in info["diagnostics"]["reward_spread"]["text"]
    for line in (trainer.run.path / "metrics.jsonl").read_text().splitlines():
        strict(line)
    assert write_report(trainer.run.path).read_text().count(words) == 1


@pytest.mark.slow
def test_resumed_run_keeps_earlier_diagnostics_only(make_trainer):
    first = make_trainer({"reward_fn": equal})
    for _ in first:
        first.request_stop()
    info = first.run.read_info()
    diagnostics = info["diagnostics"]
    assert diagnostics["reward_spread"]["phase"] == 0
    lost = {"kl": {"phase": 1, "text": "of a phase that was killed"}}
    first.run.write_info(info | {"diagnostics": diagnostics | lost})
    second = RLHFTrainer.resume(first.run.path, reward_fn=equal)
    second.train()
    assert second.run.read_info()["diagnostics"] == diagnostics


@torch.no_grad()
def test_error_names_the_cause_of_nan(make_trainer):
    trainer = make_trainer()
    rollout = trainer.rollout_phase()
    rollout.kl.fill_(math.nan)
    with pytest.raises(RunError, match="kl_per_sequence is nan in phase 0. Lower the learning"):
        trainer.evaluate([rollout])
    for role in ("reference", "policy"):
        for weight in getattr(trainer, role).parameters():
            weight.fill_(math.nan)
        with pytest.raises(RunError, match=f"the {role}'s weight .* contains nan or inf in phase"):
            trainer.evaluate()


@pytest.mark.slow
def test_last_step_that_explodes_raises_when_sampling(make_trainer):
    single = {"num_minibatches": 1, "batches_per_learning_phase": 1, "top_k": 5}
    with pytest.raises(RunError, match="log-probs of samples are not finite in phase 1. Lower"):
        make_trainer(base_lr=1e30, total_phases=1, warmup_steps=0, **single).train()


EMPTY = torch.zeros(2, 2)


def judged(args, log_ratios: list[list[float]], mask: Tensor | None = None) -> str:
    """Return the verdict on log-probabilities that have moved by `log_ratios`."""
    mask = torch.ones(2, 2, dtype=torch.bool) if mask is None else mask
    minibatch = make_minibatch(EMPTY, EMPTY, mask=mask)
    terms = ObjectiveTerms(*[torch.tensor(0.0)] * 5, torch.tensor(log_ratios), EMPTY)
    return PhaseStats(SimpleNamespace(args=args)).judge(terms, minibatch)


def test_verdicts_match_hand_computed(reel_args):
    """k3 of KL(old || new), ratio r: r - 1 - log r; at log r = 0.5: 0.14872 = 1.5 * 0.09915.

    Ratios 1, 1, 1, 2 have a mean of 1.25. Masked tokens do not count.
    """
    moved, outlier = [[0.5, 0.5]] * 2, [[0.0, 0.0], [0.0, math.log(2.0)]]
    assert judged(reel_args(target_kl=0.0991), moved) == "stop"
    assert judged(reel_args(target_kl=0.0992), moved) == "step"
    assert judged(reel_args(ratio_threshold=1.24), outlier) == "skip"
    assert judged(reel_args(ratio_threshold=1.26), outlier) == "step"
    mask = torch.tensor([[True, True], [True, False]])
    infinite = [[0.0, 0.0], [0.0, math.inf]]
    limits = {"ratio_threshold": 1.01, "target_kl": 0.01}
    assert judged(reel_args(**limits), infinite, mask) == "step"
    assert judged(reel_args(), infinite) == "step"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "steps", "counts"),
    [({"ratio_threshold": 10.0}, [0, 1, 3], (1, 0)), ({"target_kl": 1.0}, [0, 1], (0, 2))],
    ids=["skip", "stop"],
)
def test_exploding_minibatch_is_counted_and_keeps_all_finite(make_trainer, limit, steps, counts):
    """The log-probs of the third of 4 are 50 too high; after a stop, two are unused."""
    calls, seen = itertools.count(), []
    logprobs = lambda *inputs: F.get_logprobs(*inputs) + (50.0 if next(calls) == 2 else 0.0)
    trainer = make_trainer({"logprobs": logprobs}, kl_coef=0.1, **limit)
    trainer.on("after_step")(lambda ctx: seen.append(ctx.step))
    stats = trainer.learning_phase(trainer.rollout_phase())
    assert (stats.skipped_minibatches, stats.unused_minibatches) == counts and seen == steps
    assert all(math.isfinite(value) for value in dataclasses.asdict(stats).values())
    assert all(p.isfinite().all() for p in trainer.policy.parameters())


def test_adapters_get_a_higher_learning_rate():
    for preset, rate in (("reel", 1e-3), ("smol", 3e-4)):
        assert RLHFArgs(preset=preset).base_lr < rate
        for adapters in ({"lora_rank": 4}, {"adapter_path": "some/adapter"}):
            assert RLHFArgs(preset=preset, **adapters).base_lr == rate
            assert RLHFArgs(preset=preset, **adapters, base_lr=2e-5).base_lr == 2e-5


@pytest.mark.slow
def test_parts_and_settings_without_effect_warn(make_trainer, reel_args):
    policy = load_policy_and_critic(reel_args(), torch.device("cpu"))
    no_head = {"policy": policy, "optimizer": AdamW(policy.base_model.parameters(), lr=1e-4)}
    texts = {"prompts": ["this movie"]}
    for parts, fields, words in (
        ({"policy": deepcopy(policy).bfloat16()}, {}, "weights are in torch.bfloat16.*too small"),
        ({"advantages": F.compute_gae}, {"advantages": "reinforce"}, "advantages='reinforce' is"),
        (no_head, {}, "no parameter of policy.value_head"),
        (texts, {"prefix": "the film"}, "prefix='the film' is ignored, since prompts= is set"),
        ({"reward_fn": lambda x: [0.0] * len(x)}, {"reward_fn": "length"}, "reward_fn='length' is"),
    ):
        with pytest.warns(UserWarning, match=words):
            make_trainer(parts, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_trainer(no_head, vf_coef=0.0)
        make_trainer({"policy": policy, "optimizer": AdamW(policy.parameters(), lr=1e-4)} | texts)


def test_prompt_with_tokens_beyond_the_model_raises(make_trainer, reel_args):
    policy = load_policy_and_critic(reel_args(), torch.device("cpu"))
    policy.base_model.tokenizer.add_tokens(["popcornish"])
    with pytest.raises(ConfigError, match="unknown token .*Use the model's tokenizer"):
        make_trainer({"policy": policy, "prompts": ["this movie popcornish"]})


@pytest.mark.slow
def test_autocast_raises_and_a_detached_policy_warns_once(make_trainer):
    trainer = make_trainer()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        with pytest.raises(ConfigError, match="Train outside of it, with precision='bf16'"):
            trainer.train()
    trainer.intervene("blocks.1.hook_resid_pre", lambda x, where: x.detach())
    with pytest.warns(UserWarning, match="trained weights get no gradient, such as base_model"):
        trainer.run_phase()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.run_phase()
        make_trainer(value_head="separate").run_phase()
