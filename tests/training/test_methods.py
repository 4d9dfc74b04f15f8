"""Each `method` against a plain loop of its paper's algorithm, and warnings about deviations.

The loops use the models' logits and nothing else of the package. test_objective.py has PPO's terms.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from rlhf_lab.__main__ import parse
from rlhf_lab.config import RLHFArgs
from rlhf_lab.config.methods import PAPER_METHODS, MethodName, method_warning
from rlhf_lab.errors import ConfigError
from rlhf_lab.training import RLHFTrainer
from tests.training.recorded_runs import reward_by_text

BATCH, GEN_LEN, BETA = 16, 10, 0.3
SETTINGS = {"num_minibatches": 4, "temperature": 2.0, "stop_tokens": "was"}
SETTINGS |= {"gen_len": GEN_LEN, "batch_size": BATCH}


def softmax_logprobs(logits: Tensor) -> Tensor:
    scaled = logits.double() / SETTINGS["temperature"]
    return scaled - scaled.exp().sum(-1, keepdim=True).log()


@dataclass
class Batch:
    """A batch of responses, as nested lists and differentiable tensors of double precision."""

    trainer: RLHFTrainer
    tokens: Tensor
    mask: list[list[bool]]
    prefix_len: int
    rewards: list[float]
    old: Tensor = None
    ref: Tensor = None
    greedy: float = 0.0  # reward of the greedy response

    def lengths(self) -> list[int]:
        return [sum(row) for row in self.mask]

    def all_logprobs(self, model: Any, rows: list[int]) -> Tensor:
        """Return log-probs of the whole vocabulary before each generated token."""
        out = model(self.tokens[rows])
        logits = out[0] if isinstance(out, tuple) else out
        return softmax_logprobs(logits[:, self.prefix_len - 1 : -1])

    def logprobs(self, model: Any, rows: list[int]) -> Tensor:
        """Return log-probs of sampled tokens."""
        sampled = self.tokens[rows][:, self.prefix_len :, None]
        return self.all_logprobs(model, rows).gather(-1, sampled)[..., 0]

    def groups(self) -> list[list[int]]:
        return [list(range(start, start + 4)) for start in range(0, BATCH, 4)]

    def group(self, i: int) -> list[int]:
        return next(group for group in self.groups() if i in group)


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def deviation(numbers: list[float]) -> float:
    center = mean(numbers)
    return math.sqrt(sum((x - center) ** 2 for x in numbers) / (len(numbers) - 1))


def group_score(b: Batch, i: int) -> float:
    """Return (r_i - mean) / std of GRPO."""
    rewards = [b.rewards[j] for j in b.group(i)]
    return (b.rewards[i] - mean(rewards)) / (deviation(rewards) + 1e-4)


def penalized_reward(b: Batch, i: int) -> float:
    """Return r_i - beta log(pi_old(y) / pi_ref(y)), the reward with the KL of the response."""
    kl = sum(float(b.old[i, t] - b.ref[i, t]) for t in range(b.lengths()[i]))
    return b.rewards[i] - BETA * kl


def clipped(ratio: Tensor, advantage: float, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def ratios(b: Batch, i: int, lp: Tensor) -> list[Tensor]:
    return [(lp[t] - b.old[i, t]).exp() for t in range(b.lengths()[i])]


def grpo(b: Batch, i: int, lp: Tensor) -> Tensor:
    """1 / |o| sum_t [min(...) - beta k3]   (Shao et al. 2024, equations 3 and 4)"""
    total = 0.0
    for t, ratio in enumerate(ratios(b, i, lp)):
        log_ref = b.ref[i, t] - lp[t]
        total += clipped(ratio, group_score(b, i)) - BETA * (log_ref.exp() - log_ref - 1)
    return total / b.lengths()[i]


def dr_grpo(b: Batch, i: int, lp: Tensor) -> Tensor:
    """sum_t min(...) with A = r - mean, over a constant length   (Liu et al. 2025, figure 1)"""
    advantage = b.rewards[i] - mean([b.rewards[j] for j in b.group(i)])
    return sum(clipped(ratio, advantage) for ratio in ratios(b, i, lp)) / GEN_LEN


def rloo(b: Batch, i: int, lp: Tensor) -> Tensor:
    """(R_i - mean of the others) log pi(y_i)   (Ahmadian et al. 2024, section 3.3)"""
    baseline = mean([penalized_reward(b, j) for j in b.group(i) if j != i])
    return (penalized_reward(b, i) - baseline) * lp[: b.lengths()[i]].sum() / GEN_LEN


def opo(b: Batch, i: int, lp: Tensor) -> Tensor:
    """(r_i - sum l r / sum l) log pi(y_i)   (Hao et al. 2025, equation 9)"""
    group, lengths = b.group(i), b.lengths()
    baseline = sum(lengths[j] * b.rewards[j] for j in group) / sum(lengths[j] for j in group)
    return (b.rewards[i] - baseline) * lp[: lengths[i]].sum() / GEN_LEN


def remax(b: Batch, i: int, lp: Tensor) -> Tensor:
    """sum_t (G_t - r(greedy)) log pi(y_t)   (Li et al. 2023, algorithm 1, with KL per token)"""
    total, to_go = 0.0, b.rewards[i] - b.greedy
    for t in reversed(range(b.lengths()[i])):
        to_go -= BETA * float(b.old[i, t] - b.ref[i, t])
        total += to_go * lp[t]
    return total / GEN_LEN


def greedy_reward(trainer: RLHFTrainer, tokens: Tensor) -> float:
    """Return the reward of the most likely response to the prompt `tokens`."""
    stops = trainer.sampling_spec.stops(trainer.tokenizer)
    for _ in range(GEN_LEN):
        token = trainer.policy(tokens)[0][:, -1:].argmax(-1)
        tokens = torch.cat([tokens, token], dim=1)
        if token.item() in stops:
            break
    text = trainer.tokenizer.decode(tokens[0], skip_special_tokens=True)
    return float(reward_by_text([text]))


def reinforce_plus_plus(b: Batch, i: int, lp: Tensor) -> Tensor:
    """Sum of min(...), G_t whitened over all tokens of the batch   (Hu 2025, section 3)"""
    to_go = {}
    for j in range(BATCH):
        left = b.rewards[j]
        for t in reversed(range(b.lengths()[j])):
            left -= BETA * float(b.old[j, t] - b.ref[j, t])
            to_go[j, t] = left
    center, spread = mean(list(to_go.values())), deviation(list(to_go.values()))
    each = enumerate(ratios(b, i, lp))
    return sum(clipped(ratio, (to_go[i, t] - center) / spread) for t, ratio in each)


def dapo(b: Batch, i: int, lp: Tensor) -> Tensor:
    """Sum of min(...) with clip-higher   (Yu et al. 2025, equation 8)"""
    return sum(clipped(ratio, group_score(b, i), high=0.28) for ratio in ratios(b, i, lp))


def gspo(b: Batch, i: int, lp: Tensor) -> Tensor:
    """min(s A, clip(s) A), s the geometric mean of the ratios   (Zheng et al. 2025, equation 5)"""
    n = b.lengths()[i]
    ratio = ((lp[:n].sum() - b.old[i, :n].sum()) / n).exp()
    return clipped(ratio, group_score(b, i), low=3e-4, high=4e-4)


def cispo(b: Batch, i: int, lp: Tensor) -> Tensor:
    """Sum of sg(min(r, 1 + e)) A log pi   (MiniMax 2025, equations 4 and 5)"""
    each = enumerate(ratios(b, i, lp))
    return sum(min(float(ratio), 6.0) * group_score(b, i) * lp[t] for t, ratio in each)


def gkd(b: Batch, i: int, lp: Tensor) -> Tensor:
    """Sum of min(...), A = r, minus KL(student || teacher)   (Agarwal et al. 2023, section 3.1)"""
    student, teacher = (b.all_logprobs(m, [i])[0] for m in (b.trainer.policy, b.trainer.reference))
    total = 0.0
    for t, ratio in enumerate(ratios(b, i, lp)):
        kl = sum(p.exp() * (p - q) for p, q in zip(student[t], teacher[t].detach(), strict=True))
        total += clipped(ratio, b.rewards[i]) - BETA * kl
    return total


PER_RESPONSE = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "remax": remax, "opo": opo}
PER_RESPONSE |= {"gspo": gspo}
PER_TOKEN = {"reinforce++": reinforce_plus_plus, "dapo": dapo, "cispo": cispo}
PER_TOKEN |= {"gkd": gkd}


def plain_objective(name: str, b: Batch, rows: list[int]) -> Tensor:
    """Return the objective of a minibatch, to be maximized."""
    logprobs = b.logprobs(b.trainer.policy, rows)
    function = (PER_RESPONSE | PER_TOKEN)[name]
    total = sum(function(b, i, lp) for i, lp in zip(rows, logprobs, strict=True))
    tokens = sum(b.lengths()[i] for i in rows)
    return total / (tokens if name in PER_TOKEN else len(rows))


def first_gradients(
    make_trainer: Callable[..., RLHFTrainer], noise: float, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of the first step, by the trainer and by the plain loop.

    The weights change after sampling, so that ratios are not 1 and clips bind.
    """
    trainer = make_trainer({"reward_fn": reward_by_text}, **(SETTINGS | settings))
    name, found, expected = trainer.args.method, {}, {}
    move(trainer.policy, noise)  # away from the reference, so that the KL is not 0
    rollout = trainer.rollout_phase()
    samples = rollout.samples
    assert len({tuple(row) for row in samples.tokens.tolist()}) == BATCH
    assert not samples.mask.all()
    inputs = samples.tokens, samples.mask.tolist(), samples.prefix_len
    b = Batch(trainer, *inputs, rollout.raw_rewards.tolist())
    with torch.no_grad():
        everything = list(range(BATCH))
        b.old = b.logprobs(trainer.policy, everything)
        b.ref = b.logprobs(trainer.reference, everything)
        b.greedy = greedy_reward(trainer, b.tokens[:1, : b.prefix_len])
    move(trainer.policy, noise)

    @trainer.on("before_minibatch")
    def run_loop(ctx):
        if ctx.step:
            return
        indices = [samples.tokens.tolist().index(row) for row in ctx.minibatch.tokens.tolist()]
        named = dict(trainer.policy.named_parameters())
        with torch.enable_grad():
            objective = plain_objective(name, b, indices)
            gradients = torch.autograd.grad(objective, list(named.values()), allow_unused=True)
        expected.update(zip(named, gradients, strict=True))

    @trainer.on("after_backward")
    def copy_gradients(ctx):
        if not ctx.step:
            found.update((k, p.grad) for k, p in ctx.policy.named_parameters())
            found.update({k: g if g is None else g.clone() for k, g in found.items()})

    trainer.learning_phase(rollout)
    return found, expected


def move(policy: nn.Module, noise: float) -> None:
    """Add noise to all weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p += noise * p.std().nan_to_num(0.1) * torch.randn(p.shape, generator=generator).to(p)


NO_KL = ("dr_grpo", "opo", "dapo", "gspo", "cispo")
ALONE = ("reinforce++", "remax", "gkd")  # compare no responses
CASES = {name: {} for name in get_args(MethodName) if name != "ppo"}
CASES |= {f"{name} in parts": {"micro_batch_size": 2} for name in ("grpo", "gkd")}
for name in ("gkd", "gkd in parts"):
    CASES[name] = CASES[name] | {"reference_model": "reel-nano-b"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_first_step_matches_a_plain_loop_of_the_paper(make_trainer, case):
    name = case.split()[0]
    settings = {"method": name, "samples_per_prompt": 1 if name in ALONE else 4} | CASES[case]
    settings |= {} if name in NO_KL else {"kl_coef": BETA}
    found, expected = first_gradients(make_trainer, 0.05, **settings)
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
    ({"method": "dapo", "dynamic_sampling": None}, "method='dapo'", "dynamic_sampling"),
    ({"method": "dapo", "kl_coef": 0.1}, "method='dapo'", "kl_coef"),
    ({"method": "gspo", "clip_coef": 0.2}, "method='gspo'", "clip_coef"),
    ({"method": "grpo", "clip_coef_high": 0.28, "dual_clip": 3.0, "whiten_rewards": True},
     "method='grpo'", "clip_coef_high dual_clip whiten_rewards"),
    ({"advantages": "grpo"}, "advantages='grpo'", "vf_coef normalize_reward "
     "normalize_advantages loss_aggregation kl_estimator"),
    ({"policy_loss": "cispo", "advantages": "grpo", "vf_coef": 0.0, "normalize_reward": False},
     "policy_loss='cispo'", "normalize_advantages clip_coef_high kl_coef"),
    # numbers of the same order of magnitude, all settings of a method, and no method's name
    ({"method": "gspo", "clip_coef": 1e-3, "samples_per_prompt": 2}, None, ""),
    (PAPER_METHODS["dapo"], None, ""),
    ({"advantages": "one_step", "policy_loss": "policy_gradient"}, None, ""),
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
