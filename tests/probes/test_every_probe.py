"""Every probe at once: a run is left as it is, bit for bit, in each kind of run."""

import pytest
import torch

from rlhf_lab import probes
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import load_model
from rlhf_lab.probes import Probe, Run, Suite, attach
from tests.probes.looking import same_weights, sound, train_soundly
from tests.probes.test_eval_text import cut_reviews
from tests.tiny_families import tiny_of

OPTIONS = dict.fromkeys(("HackWatch", "KLByPosition", "LogitShift", "NeuronRank"), {"n": 6})
OPTIONS |= {"AttentionDrift": {"pos": -1}, "FrozenProbe": {"pos": 8}, "WordsMoved": {"n": 8}}
KINDS = [x for x in vars(probes).values() if isinstance(x, type) and issubclass(x, Probe)]
KINDS.remove(Probe)
RUNS = {
    "answers that stop": {"stop_tokens": "and", "gen_len": 26, "temperature": 0.8},
    "lora": {"lora_rank": 2},
    "separate critic": {"value_head": "separate"},
    "grpo": {"advantages": "grpo", "samples_per_prompt": 4, "reward_fn": "sentiment"},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the hooked modules run")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(x, marks=pytest.mark.nightly if x in ("lora", "grpo") else []) for x in RUNS],
)
def test_the_weights_are_the_same_bit_for_bit(make_trainer, reviews, kind):
    """With eval texts of unequal length; every check holds, and no probe is rejected."""
    plain, probed = (make_trainer(base_lr=1e-3, **RUNS[kind]) for _ in range(2))
    watch(probed, reviews)
    lengths = set()
    probed.on("after_score")(lambda ctx: lengths.update(ctx.rollout.samples.mask.sum(1).tolist()))
    plain.train()
    assert len(train_soundly(probed).probes()) == len(KINDS) == 14
    assert (len(lengths) > 1) == ("stop_tokens" in RUNS[kind])
    assert same_weights(probed, plain)
    assert all(p.grad is None or p.requires_grad for p in probed.policy.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the hooked modules run")
def test_answers_with_holes_in_their_masks_reach_every_probe(make_trainer, reviews):
    """Prompts and answers of unequal length, given by the caller, some of whose tokens count."""
    plain, probed = (make_trainer(base_lr=1e-3, stop_tokens="bye") for _ in range(2))
    watch(probed, reviews)
    rows = [row[: 12 + 2 * i].tolist() for i, row in enumerate(reviews[0][:8])]
    asked = [torch.tensor(row[: 3 + i % 3]) for i, row in enumerate(rows)]
    answers = [torch.tensor(row[3 + i % 3 :]) for i, row in enumerate(rows)]
    masks = [[int((t + i) % 4 != 1) for t in range(len(row))] for i, row in enumerate(answers)]
    assert any(0 in mask[: mask.index(1)] or 0 in mask[mask.index(1) : -1] for mask in masks)
    for trainer in (plain, probed):
        for phase in range(2):
            scores = [((i + phase) % 3) / 2 for i in range(8)]
            trainer.step(asked, answers, scores, masks)
        trainer.finish()
    run = Run(probed.run.path)
    assert run.notes() == [] and len(run.probes()) == len(KINDS)
    assert not [(c.probe, c.name, c.value) for c in run.checks() if not c.ok]
    assert same_weights(probed, plain)


def watch(trainer, reviews):
    """Attach all probes, with eval texts of unequal length."""
    tokens, mask = cut_reviews(reviews, "left")
    watching = [kind(every=2, **OPTIONS.get(kind.__name__, {})) for kind in KINDS]
    suite = Suite(*watching, eval_tokens=tokens, eval_mask=mask, labels=reviews[1])
    attach(trainer, suite)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapted", "padded", "grouped"])
def test_checks_hold_with_adapters_padding_and_grouped_heads(kind, trained_runs, no_type_checks):
    words = ("w1", "w2") if kind == "grouped" else ("loved", "hated")
    sound(trained_runs(kind), probes.NeuronRank(*words, pos=-3, n=16))
    record = sound(trained_runs(kind), probes.AttentionDrift(*words, text="rollout", n=16))
    assert record.tensors["own"].abs().max() > 1e-3


@pytest.mark.parametrize("kind", [probes.AttentionDrift, probes.NeuronRank, probes.WordsMoved])
def test_probes_of_components_reject_models_without_sums(kind, llama_tokenizer):
    model = load_model(tiny_of("Olmo2ForCausalLM"), llama_tokenizer)
    with pytest.raises(ConfigError, match=f"Remove {kind.name}, and look at the residual"):
        kind().check_model(model)
