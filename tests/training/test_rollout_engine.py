"""Responses that an engine of one's own writes, with a test double that runs transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.organism.bundled import weights_dir
from rlhf_lab.training import RLHFTrainer

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
    """Writes with transformers alone, token by token, from the weights that it was given."""

    def __init__(self, **wrong):
        self.model = AutoModelForCausalLM.from_pretrained(weights_dir("reel-nano"))
        self.model.config.tie_word_embeddings = False
        head = self.model.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        self.loads, self.seeds, self.wrong = 0, [], wrong

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
        written, kept = [], []
        for prompt in prompts:
            text, left = list(prompt), []
            while len(text) < len(prompt) + spec.gen_len:
                logits = self.model(torch.tensor([text])).logits[0, -1] / spec.temperature
                ids = logits.topk(spec.top_k).indices if spec.top_k else torch.arange(len(logits))
                drawn = torch.multinomial(logits[ids].softmax(-1), 1, generator=generator)
                text.append(int(ids[drawn]))
                left.append(ids.tolist())
                if text[-1] in spec.stop_tokens:
                    break
            written.append(text[len(prompt) :])
            kept.append(left)
        return (written, kept) if spec.top_k else written


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
def test_the_engine_writes_with_the_weights_of_each_phase():
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
def test_the_greedy_answers_of_remax_are_the_policys_own():
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
def test_top_k_needs_an_engine_that_tells_what_it_left(tmp_path):
    with pytest.raises(
        ConfigError, match="top_k=3 and top_p=None leave tokens that rollout_engine"
    ):
        trainer_with(Double(), top_k=3)
    engine = Truncating()
    trainer = trainer_with(engine, top_k=3)
    samples = trainer.rollout_phase().samples
    assert samples.support.kept.sum(-1).unique().tolist() == [3]
    expected = expected_logprobs(engine, samples, 1.0, top_k=3)
    torch.testing.assert_close(samples.logprobs, expected, atol=2e-5, rtol=0)
    engine.write = lambda prompts, spec, seed: ([[7] * 6] * 4, [[[8, 9, 10]] * 6] * 4)
    with pytest.raises(RunError, match="that is not among those that it says truncation left"):
        trainer.sample([[1, 4]] * 4, torch.Generator())


@pytest.mark.slow
def test_a_run_ends_and_needs_its_engine_to_go_on(tmp_path):
    args = RLHFArgs(**(SMALL | {"total_phases": 1, "gen_len": 2}))
    trainer = RLHFTrainer(args, out=tmp_path / "run", rollout_engine=Double())
    reports = trainer.train()
    assert len(reports) == 1 and trainer.run.read_info()["own_parts"] == ["rollout_engine"]
    with pytest.raises(RunError, match="rollout_engine"):
        RLHFTrainer.resume(tmp_path / "run")


@pytest.mark.slow
def test_hooks_which_an_engine_does_not_run_are_warned_of_once():
    trainer = trainer_with(Double())
    trainer.policy.base_model.add_hook("blocks.0.hook_resid_post", lambda x, hook: x)
    with pytest.warns(UserWarning, match="hooks, which do not run in rollout_engine") as said:
        for _ in range(2):
            trainer.sample([[1, 4]], torch.Generator())
    assert sum("rollout_engine" in str(warning.message) for warning in said) == 1


@pytest.mark.slow
def test_what_is_no_engine_or_no_response_is_refused():
    with pytest.raises(ConfigError, match="has no method load"):
        trainer_with(object())
    engine = Double()
    trainer = trainer_with(engine)
    for written, said in {
        ((7,), (7,)): "wrote 2 responses to 3 prompts",
        ((7,), (), (7,)): "wrote 0 tokens to prompt 1, and a response has 1 to gen_len=6",
        ((7,), (7,), (7,) * 7): "wrote 7 tokens to prompt 2",
        ((7,), (7,), (10**6,)): "to prompt 2 that is none of the 72",
    }.items():
        engine.write = lambda prompts, spec, seed, written=written: list(map(list, written))
        with pytest.raises(RunError, match=said):
            trainer.sample([[1, 4]] * 3, torch.Generator())
