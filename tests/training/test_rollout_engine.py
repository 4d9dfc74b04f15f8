"""Rollout engines, with a test double that runs transformers."""

from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.organism.bundled import weights_dir
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.objective import Objective, surrogate_per_token
from rlhf_lab.training.rollout import summarize
from rlhf_lab.training.rollout_engine import EngineOutput
from tests.training.recorded_runs import make_minibatch

SMALL = {"preset": "reel", "batch_size": 4, "num_minibatches": 2, "gen_len": 6, "total_phases": 2}
SMALL |= {"warmup_steps": 0, "base_lr": 3e-3, "top_k": None}
PROMPTS = [[1, 4, 5], [1, 4], [1], [1, 4, 5, 6]]


class Double:
    """Samples with transformers from loaded weights; `heat` is added to the temperature."""

    def __init__(self, heat=0.0):
        self.model = AutoModelForCausalLM.from_pretrained(weights_dir("reel-nano"))
        self.model.config.tie_word_embeddings = False
        head = self.model.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        self.loads, self.seeds, self.heat = 0, [], heat

    def load(self, weights):
        self.loads += 1
        state = {name: tensor.detach().clone() for name, tensor in weights}
        assert state.keys() == dict(self.model.named_parameters()).keys()
        self.model.load_state_dict(state)

    @torch.no_grad()
    def write(self, prompts, spec, seed):
        self.seeds.append(seed)
        generator = torch.Generator().manual_seed(seed)
        output = EngineOutput([], [])
        for prompt in prompts:
            tokens, logprobs = [], []
            while len(tokens) < spec.gen_len and not set(tokens) & set(spec.stop_tokens):
                logits = self.model(torch.tensor([prompt + tokens])).logits[0, -1]
                scores = (logits / (spec.temperature + self.heat)).log_softmax(-1)
                tokens.append(torch.multinomial(scores.exp(), 1, generator=generator).item())
                logprobs.append(scores[tokens[-1]].item())
            output.tokens.append(tokens)
            output.logprobs.append(logprobs)
        return output


def trainer_with(engine, **settings):
    return RLHFTrainer(RLHFArgs(**(SMALL | settings)), rollout_engine=engine)


def expected_logprobs(engine, samples, temperature):
    """Return the log-probability of each token by transformers."""
    with torch.no_grad():
        logits = engine.model(samples.tokens).logits[:, samples.prefix_len - 1 : -1] / temperature
    generated = samples.tokens[:, samples.prefix_len :, None]
    return logits.log_softmax(-1).gather(-1, generated)[..., 0].masked_fill(~samples.mask, 0)


@pytest.mark.slow
def test_engine_samples_with_the_weights_of_each_phase(tmp_path):
    """Loaded once per phase. The policy's log-probs match those of transformers."""
    engine, phases = Double(), []
    args = RLHFArgs(**SMALL | {"temperature": 0.8})
    trainer = RLHFTrainer(args, out=tmp_path / "run", rollout_engine=engine)

    @trainer.on("after_score")
    def note(ctx):
        expected = expected_logprobs(engine, ctx.samples, 0.8)
        torch.testing.assert_close(ctx.samples.logprobs, expected, atol=2e-5, rtol=0)
        phases.append(engine.loads)

    first, second = trainer.train()
    assert phases == [1, 2] and engine.loads == 3  # the evaluation
    assert len(set(engine.seeds)) == len(engine.seeds) == 2 + 4
    assert first.engine_kl_per_token == pytest.approx(0, abs=1e-8)
    assert first.effective_sample_fraction == pytest.approx(1, abs=1e-6)
    assert abs(second.ratio_first_minibatch - 1) < 1e-5
    assert trainer.run.read_info()["custom_components"] == ["rollout_engine"]


@pytest.mark.slow
def test_greedy_responses_come_from_the_policy():
    """An engine without support cannot sample greedily, as ReMax requires."""
    engine = Double()
    trainer = trainer_with(engine, advantages="remax", normalize_reward=False)
    trainer.rollout_phase()
    assert len(engine.seeds) == 1
    greedy = trainer.sample_greedily([[1, 4]])
    best = engine.model(greedy.tokens).logits[:, greedy.prefix_len - 1 : -1].argmax(-1)
    assert torch.equal(greedy.tokens[:, greedy.prefix_len :], best)


@pytest.mark.slow
def test_responses_end_at_a_stop_after_prompts_of_unequal_length():
    """Tokens after the stop 5 are dropped; padding changes no log-probability."""
    engine = Double()
    trainer = trainer_with(engine, stop_token_ids="5")
    rows = [[7, 8, 5], [9] * 6, [5, 9], (7, 5)]  # any sequences
    logprobs = [(-1.0,) * len(row) for row in rows]
    engine.write = lambda prompts, spec, seed: EngineOutput(rows, logprobs)
    samples = trainer.sample(PROMPTS, torch.Generator())
    assert samples.mask.sum(1).tolist() == [3, 6, 1, 2] and samples.prompts() == PROMPTS
    assert torch.equal(samples.engine_logprobs, -samples.mask.float())
    for i, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True)):
        n = samples.mask[i].sum()
        with torch.no_grad():
            logits, values = trainer.policy(torch.tensor([[*prompt, *row[:n]]]))
        logprobs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)[range(n), row[:n]]
        values = values[0, len(prompt) - 1 : -1]
        for found, expected in ((samples.logprobs, logprobs), (samples.values, values)):
            torch.testing.assert_close(found[i, :n], expected, atol=1e-5, rtol=0)
            assert not found[i, n:].any()


@pytest.mark.slow
def test_mismatch_with_the_policy_is_reported():
    rollout = trainer_with(Double(heat=3.0), stop_token_ids="28").rollout_phase()
    samples, report = rollout.samples, summarize(rollout)
    assert not samples.mask.all()
    ratio = (samples.logprobs - samples.engine_logprobs)[samples.mask].double().exp()
    assert report.engine_kl_per_token == pytest.approx((ratio - 1 - ratio.log()).mean().item())
    fraction = ratio.sum().square() / ratio.square().sum() / len(ratio)
    assert report.effective_sample_fraction == pytest.approx(fraction.item())
    assert fraction < 0.95 and (ratio > 2).any()


@pytest.mark.parametrize(
    ("correction", "weights"), [("truncated", [0.5, 2.0, 2.0]), ("masked", [0.5, 2.0, 0.0])]
)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("policy_loss", ["ppo", "cispo"])
def test_surrogate_gradient_has_importance_weights(correction, weights, normalize, policy_loss):
    """Three tokens of ratios 0.5, 2 and 3: at the old policy, d/dlogp of the mean is w A / 3."""
    old = torch.tensor([[-1.0, -2.0, -3.0]])
    advantages = torch.tensor([[1.0, -2.0, 4.0]])
    engine_logprobs = old - torch.tensor([[0.5, 2.0, 3.0]]).log()
    minibatch = make_minibatch(old, advantages, engine_logprobs=engine_logprobs)
    args = RLHFArgs(
        preset="reel",
        importance_correction=correction,
        normalize_advantages=normalize,
        policy_loss=policy_loss,
    )
    logprobs = old.clone().requires_grad_()
    objective = Objective(args).surrogate(logprobs, minibatch)
    objective.backward()
    if normalize:
        advantages = (advantages - 1.0) / advantages.std()
    torch.testing.assert_close(logprobs.grad, torch.tensor([weights]) * advantages / 3)
    parts = surrogate_per_token(logprobs.detach(), minibatch, args)
    assert parts.sum().item() == pytest.approx(objective.item())


@pytest.mark.slow
@pytest.mark.typed
def test_hooks_and_unfit_engines_are_reported():
    with pytest.raises(ConfigError, match="importance_correction='masked' requires a rollout_eng"):
        trainer_with(None, importance_correction="masked")
    with pytest.raises(ConfigError, match="top_k and top_p cannot be combined"):
        trainer_with(Double(), top_p=0.9)
    engine = Double()
    trainer = trainer_with(engine, importance_correction="masked")
    trainer.policy.base_model.add_hook("blocks.0.hook_resid_post", lambda x, hook: x)
    with pytest.warns(UserWarning, match="hooks do not run in rollout_engine"):
        trainer.sample([[1, 4]], torch.Generator())
    for rows, logprobs in (
        ([[7]], [[-1.0]]),
        ([[7], []], [[-1.0], []]),
        ([[7], [72]], [[-1.0], [-1.0]]),
        ([[7], [8]], None),
        ([[7], [8]], [[0.1], [-1.0]]),
        ([[1, 4, 7], [1, 4]], [[-1.0] * 3, [-1.0] * 2]),
        ([[7], [8] * 7], [[-1.0], [-1.0] * 7]),
        ([[7], [8]], [[-1.0], [-1.0, -1.0]]),
    ):
        engine.write = Mock(return_value=EngineOutput(rows, logprobs))
        with pytest.raises(RunError, match="2 responses of 1 to 6 token ids below 72, with"):
            trainer.sample([[1, 4]] * 2, torch.Generator())
