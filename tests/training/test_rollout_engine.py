"""Rollout engines, with a test double that runs transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.organism.bundled import weights_dir
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.objective import Objective, surrogate_per_token
from rlhf_lab.training.replay import ReplayMinibatch
from rlhf_lab.training.rollout import summarize
from rlhf_lab.training.rollout_engine import EngineOutput

SMALL = {
    "preset": "reel",
    "batch_size": 4,
    "num_minibatches": 2,
    "gen_len": 6,
    "total_phases": 2,
    "warmup_steps": 0,
    "base_lr": 3e-3,
    "top_k": None,
}


class Double:
    """Samples with transformers, from loaded weights, at a temperature that is `heat` too high."""

    def __init__(self, heat=0.0):
        self.model = AutoModelForCausalLM.from_pretrained(weights_dir("reel-nano"))
        self.model.config.tie_word_embeddings = False
        head = self.model.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        self.loads, self.seeds, self.heat = 0, [], heat

    def load(self, weights):
        self.loads += 1
        there = dict(self.model.named_parameters())
        given = {name: tensor.detach().clone() for name, tensor in weights}
        assert given.keys() == there.keys()
        self.model.load_state_dict(given)

    @torch.no_grad()
    def write(self, prompts, spec, seed):
        self.seeds.append(seed)
        generator = torch.Generator().manual_seed(seed)
        written, kept, logprobs = [], [], []
        for prompt in prompts:
            text, left, known = list(prompt), [], []
            while len(text) < len(prompt) + spec.gen_len:
                logits = self.model(torch.tensor([text])).logits[0, -1] / (
                    spec.temperature + self.heat
                )
                ids = logits.topk(spec.top_k).indices if spec.top_k else torch.arange(len(logits))
                drawn = torch.multinomial(logits[ids].softmax(-1), 1, generator=generator)
                known.append(logits[ids].log_softmax(-1)[drawn].item())
                text.append(int(ids[drawn]))
                left.append(ids.tolist())
                if text[-1] in spec.stop_tokens:
                    break
            written.append(text[len(prompt) :])
            kept.append(left)
            logprobs.append(known)
        return EngineOutput(written, logprobs, kept if spec.top_k else None)


class Truncating(Double):
    returns_support = True


def trainer_with(engine, **settings):
    return RLHFTrainer(RLHFArgs(**(SMALL | settings)), rollout_engine=engine)


def expected_logprobs(engine, samples, temperature, top_k=None):
    """The log-probability of each token by transformers, over the k likeliest if there is a k."""
    with torch.no_grad():
        logits = engine.model(samples.tokens).logits[:, samples.prefix_len - 1 : -1] / temperature
    if top_k:
        least = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    written = samples.tokens[:, samples.prefix_len :, None]
    return logits.log_softmax(-1).gather(-1, written)[..., 0].masked_fill(~samples.mask, 0)


@pytest.mark.slow
def test_engine_samples_with_the_weights_of_each_phase():
    """Loaded once per phase; what it wrote has the log-probability that transformers gives it."""
    engine = Double()
    trainer = trainer_with(engine, temperature=0.8)
    weights = []
    for phase in (0, 1):
        rollout = trainer.rollout_phase()
        assert engine.loads == phase + 1
        trainer.rollout_phase()
        assert engine.loads == phase + 1, "weights that did not change are not loaded again"
        expected = expected_logprobs(engine, rollout.samples, 0.8)
        torch.testing.assert_close(rollout.samples.logprobs, expected, atol=2e-5, rtol=0)
        weights.append(engine.model.lm_head.weight.sum().item())
        trainer.learning_phase(rollout)
        trainer.phase += 1
    assert weights[0] != weights[1] and len(set(engine.seeds)) == 2


@pytest.mark.slow
def test_greedy_responses_of_remax_are_the_policys():
    """They are the likeliest tokens, which the engine, asked with a seed, does not write."""
    engine = Double()
    trainer = trainer_with(engine, advantages="remax", normalize_reward=False, total_phases=1)
    greedy = trainer.rewards.sample_greedily
    seen = []
    trainer.rewards.sample_greedily = lambda *given: seen.append(greedy(*given)) or seen[-1]
    trainer.run_phase()
    assert len(engine.seeds) == 1 and len(seen) == 1
    best = engine.model(seen[0].tokens).logits[:, seen[0].prefix_len - 1 : -1].argmax(-1)
    assert torch.equal(seen[0].tokens[:, seen[0].prefix_len :], best)


@pytest.mark.slow
def test_responses_may_stop_and_prompts_differ_in_length():
    engine = Double()
    stop = 5
    trainer = trainer_with(engine, stop_token_ids=str(stop))
    engine.write = lambda prompts, spec, seed: [[7, 8, stop], [9] * 6, [stop], [7, stop]]
    prompts = [[1, 4, 5], [1, 4], [1], [1, 4, 5, 6]]
    samples = trainer.sample(prompts, torch.Generator())
    assert samples.mask.sum(1).tolist() == [3, 6, 1, 2] and samples.prefix_len == 4
    assert samples.prompts() == prompts and not samples.logprobs[~samples.mask].any()
    alone = trainer.sample(prompts[:1] * 4, torch.Generator())
    torch.testing.assert_close(alone.logprobs[0], samples.logprobs[0], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_top_k_requires_the_support(tmp_path):
    with pytest.raises(ConfigError, match="top_k and top_p require"):
        trainer_with(Double(), top_k=3)
    engine = Truncating()
    samples = trainer_with(engine, top_k=3).rollout_phase().samples
    assert samples.support.kept.sum(-1).unique().tolist() == [3]
    expected = expected_logprobs(engine, samples, 1.0, top_k=3)
    torch.testing.assert_close(samples.logprobs, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(samples.engine_logprobs, expected, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_mismatch_is_reported_and_correction_changes_the_weights(copy_parameters):
    equal = trainer_with(Double()).run_phase()
    assert equal.engine_kl_per_token == pytest.approx(0, abs=1e-8)
    assert equal.effective_sample_fraction == pytest.approx(1, abs=1e-6)
    ends = {}
    for correction in ("none", "truncated", "masked"):
        trainer = trainer_with(Double(heat=3.0), importance_correction=correction)
        rollout = trainer.rollout_phase()
        samples, report = rollout.samples, summarize(rollout)
        ratio = (samples.logprobs - samples.engine_logprobs)[samples.mask].double().exp()
        assert report.engine_kl_per_token == pytest.approx((ratio - 1 - ratio.log()).mean().item())
        fraction = ratio.sum().square() / ratio.square().sum() / len(ratio)
        assert report.effective_sample_fraction == pytest.approx(fraction.item())
        assert fraction < 0.95
        trainer.learning_phase(rollout)
        ends[correction] = copy_parameters(trainer.policy)["base_model.unembed.W_U"]
    assert (ratio > 2).any(), "otherwise both corrections are equal"
    assert not torch.equal(ends["none"], ends["truncated"])
    assert not torch.equal(ends["truncated"], ends["masked"])


@pytest.mark.parametrize(
    ("correction", "weights"), [("truncated", [0.5, 2.0, 2.0]), ("masked", [0.5, 2.0, 0.0])]
)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("policy_loss", ["ppo", "cispo", "policy_gradient"])
def test_surrogate_gradient_has_importance_weights(correction, weights, normalize, policy_loss):
    """Three tokens of ratios 0.5, 2 and 3: at the old policy, d/dlogp of the mean is w A / 3."""
    old = torch.tensor([[-1.0, -2.0, -3.0]])
    advantages = torch.tensor([[1.0, -2.0, 4.0]])
    zeros = torch.zeros(1, 3)
    minibatch = ReplayMinibatch(
        tokens=torch.zeros(1, 4, dtype=torch.long),
        attention_mask=torch.ones(1, 4, dtype=torch.bool),
        mask=torch.ones(1, 3, dtype=torch.bool),
        logprobs=old,
        values=zeros,
        advantages=advantages,
        returns=zeros,
        ref_residuals=torch.zeros(1, 3, 2),
        support=None,
        engine_logprobs=old - torch.tensor([[0.5, 2.0, 3.0]]).log(),
    )
    args = RLHFArgs(
        preset="reel",
        importance_correction=correction,
        normalize_advantages=normalize,
        policy_loss=policy_loss,
    )
    logprobs = old.clone().requires_grad_()
    Objective(args).surrogate(logprobs, minibatch).backward()
    if normalize:
        advantages = (advantages - 1.0) / advantages.std()
    torch.testing.assert_close(logprobs.grad, torch.tensor([weights]) * advantages / 3)
    parts = surrogate_per_token(logprobs.detach(), minibatch, args)
    assert parts.sum().item() == pytest.approx(
        Objective(args).surrogate(logprobs.detach(), minibatch).item()
    )


def test_importance_correction_requires_engine_logprobs():
    args = RLHFArgs(**SMALL, importance_correction="masked")
    with pytest.raises(ConfigError, match="requires a rollout_engine"):
        RLHFTrainer(args)
    engine = Double()
    trainer = RLHFTrainer(args, rollout_engine=engine)
    engine.write = lambda prompts, spec, seed: [[7]] * len(prompts)
    with pytest.raises(RunError, match="requires the engine's log-probs"):
        trainer.sample([[1, 4]], torch.Generator())
    engine.write = lambda prompts, spec, seed: EngineOutput([[7, 8]], [[-1.0]])
    with pytest.raises(RunError, match=r"\[1\] log-probs for \[2\] tokens"):
        trainer.sample([[1, 4]], torch.Generator())


@pytest.mark.slow
def test_resumed_run_requires_its_engine(tmp_path):
    args = RLHFArgs(**(SMALL | {"total_phases": 1, "gen_len": 2}))
    trainer = RLHFTrainer(args, out=tmp_path / "run", rollout_engine=Double())
    assert len(trainer.train()) == 1
    assert trainer.run.read_info()["custom_components"] == ["rollout_engine"]
    with pytest.raises(RunError, match="rollout_engine"):
        RLHFTrainer.resume(tmp_path / "run")


@pytest.mark.slow
def test_hooks_and_invalid_responses_are_reported():
    with pytest.raises(ConfigError, match="must have methods load and write"):
        trainer_with(object())
    engine = Double()
    trainer = trainer_with(engine)
    trainer.policy.base_model.add_hook("blocks.0.hook_resid_post", lambda x, hook: x)
    with pytest.warns(UserWarning, match="hooks do not run in rollout_engine"):
        trainer.sample([[1, 4]], torch.Generator())
    for responses in [((7,), (7,)), ((7,), (), (7,)), ((7,), (7,), (7,) * 7), ((7,), (7,), (72,))]:
        engine.write = lambda prompts, spec, seed, rows=responses: list(map(list, rows))
        with pytest.raises(RunError, match="3 responses of 1 to gen_len=6 token ids below 72"):
            trainer.sample([[1, 4]] * 3, torch.Generator())
