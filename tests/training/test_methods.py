"""Each `method` against its paper's formula in float64, and warnings about deviations.

The formulas use the models' logits and nothing else of the package. test_objective.py has PPO's.
"""

import re
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from rlhf_lab.__main__ import parse
from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.presets import PAPER_METHODS, MethodName, method_warning
from rlhf_lab.errors import ConfigError
from rlhf_lab.training import RLHFTrainer, Rollout
from tests.training.recorded_runs import move_weights, reward_by_text

BATCH, GEN_LEN, BETA, TEMPERATURE = 16, 10, 0.3, 2.0
SETTINGS = {"num_minibatches": 4, "temperature": TEMPERATURE, "stop_tokens": "was"}
SETTINGS |= {"gen_len": GEN_LEN, "batch_size": BATCH}


class Paper:
    """The objectives of papers for a batch of 16 responses, 4 to each prompt.

    All tensors are over responses, or responses and tokens.
    """

    def __init__(self, trainer: RLHFTrainer, rollout: Rollout) -> None:
        samples, self.trainer = rollout.samples, trainer
        self.tokens, self.prefix_len, self.mask = samples.tokens, samples.prefix_len, samples.mask
        self.lengths, self.rewards = self.mask.sum(1), rollout.raw_rewards.double()
        with torch.no_grad():
            self.old, self.ref = map(self.logprobs, (trainer.policy, trainer.reference))
            self.greedy = self.greedy_reward()
        self.kl = (self.old - self.ref) * self.mask  # k1 of the policy that sampled

    def all_logprobs(self, model: Any) -> Tensor:
        """Return log-probs of the whole vocabulary before each generated token."""
        out = model(self.tokens)
        logits = out[0] if isinstance(out, tuple) else out
        return (logits[:, self.prefix_len - 1 : -1].double() / TEMPERATURE).log_softmax(-1)

    def logprobs(self, model: Any) -> Tensor:
        return self.all_logprobs(model).gather(-1, self.tokens[:, self.prefix_len :, None])[..., 0]

    def greedy_reward(self) -> float:
        """Return the reward of the most likely response."""
        tokens, stops = self.tokens[:1, : self.prefix_len], self.trainer.sampling_spec
        for _ in range(GEN_LEN):
            token = self.trainer.policy(tokens)[0][:, -1:].argmax(-1)
            tokens = torch.cat([tokens, token], dim=1)
            if token.item() in stops.stops(self.trainer.tokenizer):
                break
        return float(reward_by_text([self.trainer.tokenizer.decode(tokens[0, 1:])]))

    def scores(self) -> Tensor:
        """(r_i - mean) / std   (Shao et al. 2024, GRPO, section 4.1.2)"""
        groups = self.rewards.reshape(4, 4)
        deviations = groups.std(1, keepdim=True) + 1e-4
        return ((groups - groups.mean(1, keepdim=True)) / deviations).reshape(BATCH, 1)

    def to_go(self) -> Tensor:
        """Return the reward minus the KL from each token on."""
        return self.rewards[:, None] - BETA * self.kl.flip(1).cumsum(1).flip(1)

    def advantages(self, name: str) -> Tensor:
        groups, lengths = self.rewards.reshape(4, 4), self.lengths.reshape(4, 4)
        if name == "dr_grpo":  # r - mean   (Liu et al. 2025, figure 1)
            return (groups - groups.mean(1, keepdim=True)).reshape(BATCH, 1)
        if name == "rloo":  # R_i - mean of the others   (Ahmadian et al. 2024, section 3.3)
            penalized = self.to_go()[:, 0].reshape(4, 4)
            others = (penalized.sum(1, keepdim=True) - penalized) / 3
            return (penalized - others).reshape(BATCH, 1)
        if name == "opo":  # r_i - sum l r / sum l   (Hao et al. 2025, equation 9)
            baselines = (lengths * groups).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)
            return (groups - baselines).reshape(BATCH, 1)
        if name == "remax":  # G_t - r(greedy)   (Li et al. 2023, algorithm 1, with KL per token)
            return self.to_go() - self.greedy
        if name == "reinforce++":  # G_t whitened over all tokens   (Hu 2025, section 3)
            real = self.to_go()[self.mask]
            return (self.to_go() - real.mean()) / real.std()
        return self.rewards[:, None] if name == "gkd" else self.scores()

    def objective(self, name: str, rows: list[int]) -> Tensor:
        """Return the objective of a minibatch, to be maximized."""
        logprobs, advantages = self.logprobs(self.trainer.policy), self.advantages(name)
        ratios = (logprobs - self.old).exp()

        def clip(ratio: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
            return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)

        if name in ("rloo", "opo", "remax"):  # A log pi of the whole response
            each = advantages * logprobs
        elif name == "dapo":  # clip-higher   (Yu et al. 2025, equation 8)
            each = clip(ratios, high=0.28)
        elif name == "cispo":  # sg(min(r, 1 + e)) A log pi   (MiniMax 2025, equations 4 and 5)
            each = ratios.detach().clamp(max=6.0) * advantages * logprobs
        elif name == "gspo":  # geometric mean of the ratios   (Zheng et al. 2025, equation 5)
            logs = ((logprobs - self.old) * self.mask).sum(1, keepdim=True)
            each = clip((logs / self.lengths[:, None]).exp(), 3e-4, 4e-4).expand(self.mask.shape)
        else:
            each = clip(ratios)
        if name == "grpo":  # min(...) - beta k3   (Shao et al. 2024, equations 3 and 4)
            each = each - BETA * ((self.ref - logprobs).exp() - (self.ref - logprobs) - 1)
        if name == "gkd":  # - KL(student || teacher)   (Agarwal et al. 2023, section 3.1)
            student = self.all_logprobs(self.trainer.policy)
            teacher = self.all_logprobs(self.trainer.reference).detach()
            each = each - BETA * (student.exp() * (student - teacher)).sum(-1)
        sums = (each * self.mask).sum(1)[rows]
        if name in ("grpo", "gspo"):  # mean of each response
            return (sums / self.lengths[rows]).mean()
        if name in ("dr_grpo", "rloo", "opo", "remax"):  # over a constant length
            return sums.mean() / GEN_LEN
        return sums.sum() / self.lengths[rows].sum()  # over all tokens


def first_gradients(make_trainer: Any, **settings: Any) -> tuple[dict[str, Tensor], ...]:
    """Return the gradients of the first step, by the trainer and by the paper's formula.

    The weights change before and after sampling, so that the KL is not 0 and clips bind.
    """
    trainer = make_trainer({"reward_fn": reward_by_text}, **(SETTINGS | settings))
    found, expected = {}, {}
    move_weights(trainer.policy)
    rollout = trainer.rollout_phase()
    rows_of = {tuple(row): i for i, row in enumerate(rollout.samples.tokens.tolist())}
    assert len(rows_of) == BATCH and not rollout.samples.mask.all()
    paper = Paper(trainer, rollout)
    move_weights(trainer.policy)

    @trainer.on("before_minibatch")
    def differentiate(ctx):
        if ctx.step == 0:
            rows = [rows_of[tuple(row)] for row in ctx.minibatch.tokens.tolist()]
            named = dict(trainer.policy.named_parameters())
            with torch.enable_grad():
                objective = paper.objective(trainer.args.method, rows)
                gradients = torch.autograd.grad(objective, [*named.values()], allow_unused=True)
            expected.update(zip(named, gradients, strict=True))

    @trainer.on("after_backward")
    def copy_gradients(ctx):
        if ctx.step == 0:
            named = ctx.policy.named_parameters()
            found.update((k, None if p.grad is None else p.grad.clone()) for k, p in named)

    trainer.learning_phase(rollout)
    return found, expected


NO_KL = ("dr_grpo", "opo", "dapo", "gspo", "cispo")
ALONE = ("reinforce++", "remax", "gkd")  # compare no responses
CASES = {name: {} for name in get_args(MethodName) if name != "ppo"}
CASES |= {f"{name} in parts": {"micro_batch_size": 2} for name in ("grpo", "gkd")}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_first_step_matches_the_formula_of_the_paper(make_trainer, case):
    name = case.split()[0]
    settings = {"method": name, "samples_per_prompt": 1 if name in ALONE else 4} | CASES[case]
    settings |= {} if name in NO_KL else {"kl_coef": BETA}
    settings |= {"reference_model": "reel-nano-b"} if name == "gkd" else {}
    found, expected = first_gradients(make_trainer, **settings)
    assert found.keys() == expected.keys() and len(found) > 20
    largest = max(g.abs().max() for g in expected.values() if g is not None)
    for key, gradient in expected.items():
        gradient = torch.zeros_like(found[key]) if gradient is None else gradient
        got = torch.zeros_like(gradient) if found[key] is None else found[key]
        torch.testing.assert_close(got, gradient, atol=2e-5 * largest, rtol=1e-3, msg=key)


def test_settings_come_from_given_fields_then_method_then_preset():
    args = RLHFArgs(preset="reel", method="rloo", kl_coef=0.1)
    assert (args.kl_coef, args.kl_in, args.advantages, args.gen_len) == (0.1, "reward", "rloo", 26)
    assert RLHFArgs(preset="reel", method="opo").num_minibatches == 1
    ppo, preset = RLHFArgs(preset="reel", method="ppo"), RLHFArgs(preset="reel")
    assert ppo.to_dict() == preset.to_dict() | {"method": "ppo"}
    with pytest.raises(ConfigError, match="method='gpro' is unknown. Choose one of: 'ppo', 'grpo'"):
        RLHFArgs(method="gpro")
    parsed = parse(["train", "--method", "grpo", "--samples-per-prompt", "4"]).keywords["args"]
    assert parsed == RLHFArgs(preset="reel", method="grpo", samples_per_prompt=4)


WARNINGS = [  # settings, the method's field, and the fields that the warning lists
    ({"method": "grpo", "loss_aggregation": "token_mean"}, "method='grpo'", "loss_aggregation"),
    ({"method": "grpo", "clip_coef_high": 0.28, "dual_clip": 3.0, "whiten_rewards": True},
     "method='grpo'", "clip_coef_high dual_clip whiten_rewards"),
    ({"advantages": "grpo"}, "advantages='grpo'", "vf_coef normalize_reward "
     "normalize_advantages loss_aggregation kl_estimator"),
    ({"policy_loss": "cispo", "advantages": "grpo", "vf_coef": 0.0, "normalize_reward": False},
     "policy_loss='cispo'", "normalize_advantages clip_coef_high kl_coef"),
    ({"method": "gspo", "clip_coef": 4e-3, "clip_coef_high": 3e-5}, "method='gspo'",
     "clip_coef clip_coef_high"),
    ({"method": "dapo", "dynamic_sampling": None}, "method='dapo'", "dynamic_sampling"),
    # numbers of the same order of magnitude, all settings of a method, and no method's name
    ({"method": "gspo", "clip_coef": 1e-3, "samples_per_prompt": 2}, None, ""),
    (PAPER_METHODS["dapo"], None, ""),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "field", "listed"), WARNINGS)
def test_one_warning_lists_the_settings_that_are_not_the_paper_s(settings, field, listed):
    message = method_warning(RLHFArgs(preset="reel", **({"samples_per_prompt": 4} | settings)))
    if field is None:
        assert message is None
        return
    assert message.startswith(f"{field} runs with other settings than its paper's: ")
    assert set(re.findall(r"(\w+)=[^=]* \(there ", message)) == set(listed.split())


def test_trainer_warns_once_about_the_method(make_trainer):
    with pytest.warns(UserWarning, match="method='grpo'.*'token_mean'") as caught:
        make_trainer(method="grpo", loss_aggregation="token_mean", samples_per_prompt=2)
    assert len(caught) == 1
