"""The trainer: exact starts, reproducible runs, files, rejected input, and that it learns."""

import math
import shutil

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.functional import calc_kl_penalty
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.organism import weights_dir
from rlhf_lab.organism.sums import SumsGrammar, faithful_fraction
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.checkpoint import load_checkpoint
from rlhf_lab.training.rollout import summarize
from tests.training.recorded_runs import IN_BACKWARD, PROMPTS, copy_weights, is_equal

pytestmark = pytest.mark.slow


@pytest.mark.typed
@pytest.mark.filterwarnings("error:phase")
@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 5, "temperature": 0.7}, {"top_k": 8, "top_p": 0.9}, {"precision": "bf16"}],
)
def test_first_phase_has_kl_zero_and_ratio_one(make_trainer, sampling):
    report = next(iter(make_trainer({"prompts": PROMPTS}, gen_len=20, **sampling)))
    assert report.kl_per_token == report.kl_per_sequence == 0.0
    assert abs(report.ratio_first_minibatch - 1) <= (0.05 if "precision" in sampling else 1e-5)


@pytest.mark.typed
def test_iteration_left_at_the_last_phase_is_evaluated(make_trainer):
    trainer = make_trainer(total_phases=2)
    assert [report.phase for report, _ in zip(trainer, range(2), strict=False)] == [0, 1]
    for _ in range(2):
        with pytest.warns(UserWarning, match="all 2 phases are done"):
            trainer.train()
        info = trainer.run.read_info()
        assert (info["status"], info["final"]["samples"]) == ("finished", 4 * 8)
    assert len(trainer.run.read("samples.jsonl")) == 3 * 8


@pytest.mark.typed
def test_two_halves_work_alone_and_write_nothing(make_trainer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer, iterated = (make_trainer(stop_at_eos=True, gen_len=26) for _ in range(2))
    before = copy_weights(trainer.policy)
    rollout = trainer.rollout_phase()
    assert is_equal(copy_weights(trainer.policy), before)
    assert rollout.samples.tokens.shape == (8, 3 + 26)
    assert rollout.advantages.shape == rollout.kl.shape == (8, 26)
    assert len(rollout.texts) == 8 and rollout.texts[0].startswith("this movie ")
    stats = trainer.learning_phase(rollout)
    assert math.isfinite(stats.objective) and stats.grad_norm > 0
    assert (trainer.phase, trainer.run) == (0, None) and list(tmp_path.iterdir()) == []
    next(iter(iterated))
    assert is_equal(copy_weights(trainer.policy), copy_weights(iterated.policy))


def test_reward_gets_text_without_bos_and_up_to_the_stop(make_trainer):
    """Seed defect: the reward read the end-of-text marker that stands before every prompt."""
    read = []
    reward_fn = lambda texts: read.extend(texts) or torch.arange(len(texts)) + 0.0
    trainer = make_trainer({"reward_fn": reward_fn}, batch_size=32, gen_len=26, temperature=5.0)
    read.clear()
    rollout = trainer.rollout_phase()
    assert read == rollout.texts and not rollout.samples.mask.all()
    special = torch.tensor(trainer.tokenizer.all_special_ids)
    for i, text in enumerate(read):
        generated = rollout.samples.tokens[i, 3:][rollout.samples.mask[i]]
        words = generated[~torch.isin(generated, special.to(generated.device))]
        assert text == " ".join(["this movie", *trainer.tokenizer.convert_ids_to_tokens(words)])


@pytest.mark.parametrize("name", ["plain", "resets"])  # the best batch of "resets" is not the last
def test_checkpoints_have_the_weights_of_their_phase(runs, name):
    run = runs(name)
    rewards = [report.mean_reward for report in run.reports]
    best = rewards.index(max(rewards))
    assert best > 0 and (best < len(rewards) - 1) == (name == "resets")
    phases = {"best": best, "last": 5, **{f"phase_{n:06d}": n for n in (0, 1, 2, 3, 5)}}
    names = [f"checkpoints/{checkpoint}.safetensors" for checkpoint in phases]
    names += ["README.md", "metrics.jsonl", "run.json", "samples.jsonl"]
    names += ["returned/record_sums.jsonl"]
    files = [str(p.relative_to(run.path)) for p in run.path.rglob("*") if p.is_file()]
    assert sorted(files) == sorted(names)
    for checkpoint, phase in phases.items():
        stored, metadata = load_checkpoint(run.path / "checkpoints" / f"{checkpoint}.safetensors")
        others = {n: stored.pop(n) for n in [*stored] if n.startswith(("optimizer.", "reference."))}
        assert is_equal(stored, run.weights[phase]), checkpoint
        assert bool(others) == (checkpoint == "last") and metadata["phase"] == phase
        if checkpoint in ("best", "last"):
            assert metadata["best"] == {"phase": best, "mean_reward": rewards[best]}


def test_metrics_file_has_the_reports(runs):
    run = runs("plain")
    lines = run.trainer.run.read("metrics.jsonl")
    assert lines == [report.to_dict() for report in run.reports]
    assert [line["phase"] for line in lines] == list(range(5))
    assert all(abs(line["ratio_first_minibatch"] - 1) <= 1e-4 for line in lines)
    assert lines[0]["kl_per_token"] == 0 and lines[-1]["kl_per_token"] > 1e-4
    for report, rollout in zip(run.reports, run.rollouts, strict=True):
        n, cost = rollout.samples.mask.sum().item(), report.cost
        assert cost.rollout_tokens_per_second * cost.rollout_seconds == pytest.approx(n)
        assert cost.learning_tokens_per_second * cost.learning_seconds == pytest.approx(2 * n)
    assert lines[0]["cost"]["peak_memory_bytes"] > 100e6  # torch takes more


@pytest.mark.parametrize("name", ["plain", "dynamic sampling"])
def test_samples_file_has_each_text_with_its_numbers(runs, name):
    run = runs(name)
    lines = run.trainer.run.read("samples.jsonl")
    n, evaluated = len(run.reports), next(run.trainer.fresh_rollouts())
    assert [line["phase"] for line in lines] == [p for p in range(n + 1) for _ in range(8)]
    assert [line["text"] for line in lines[-8:]] == evaluated.texts
    assert evaluated.samples.mask.shape[1] == run.trainer.args.gen_len  # not a drawn length
    columns = {x: x for x in ("true_reward", "kl_per_sequence", "response_length")}
    columns["reward"] = "mean_reward"
    for report, rollout in zip(run.reports, run.rollouts, strict=False):
        rows = [line for line in lines if line["phase"] == report.phase]
        assert [row["text"] for row in rows] == rollout.texts
        assert all(row["prompt"] + row["response"] == row["text"] for row in rows)
        assert (len({row["prompt"] for row in rows}) > 1) == (name != "plain")
        for column, metric in columns.items():
            mean = sum(row[column] for row in rows) / 8
            assert mean == pytest.approx(getattr(report, metric), rel=1e-5, abs=1e-6), column
        kl = rollout.kl[rollout.samples.mask]
        assert report.kl_per_sequence == pytest.approx(kl.sum().item() / 8, rel=1e-4)
        assert report.kl_per_token == pytest.approx(kl.mean().item(), rel=1e-4)


def test_run_json_has_arguments_versions_and_both_ends(runs):
    run, several = runs("plain"), runs("dynamic sampling").trainer
    info = run.trainer.run.read_info()
    assert RLHFArgs(**info["args"]) == run.trainer.args
    assert {"rlhf_lab", "python", "torch", "transformers"} < info["versions"].keys()
    assert (info["device"], info["custom_components"]) == (str(run.trainer.device), [])
    assert (info["status"], info["phases_done"]) == ("finished", 5)
    assert info["diagnostics"] == {}
    prompts = [rollout.samples.prompts() for rollout in several.fresh_rollouts()]
    assert prompts == [several.prompts.of_batch(batch) for batch in range(4)]
    batches = [summarize(rollout) for rollout in run.trainer.fresh_rollouts()]
    for name in ("mean_reward", "true_reward", "grammatical_fraction", "kl_per_sequence"):
        mean = sum(getattr(stats, name) for stats in batches) / 4
        assert info["final"][name] == pytest.approx(mean), name


@pytest.mark.parametrize(
    ("spoil", "fields"),
    [("inf", {}), ("inf", IN_BACKWARD), ("gradient", {}), ("gradient", IN_BACKWARD)],
)
def test_learning_that_is_not_finite_ends_the_run(make_trainer, spoil, fields):
    """A KL of 0 under a root has the gradient 0 * inf = nan. No step follows the spoiled one.

    In the backward pass, weights with finite gradients are stepped before it is seen.
    """

    calls = []

    def kl_penalty(kl, kl_coef, mask):
        penalty = calc_kl_penalty(kl, kl_coef, mask)
        calls.append(trainer.phase)
        if calls.count(1) != 1:  # the first of 4 minibatches
            return penalty
        return (0 * penalty).sqrt() if spoil == "gradient" else penalty + math.inf

    trainer = make_trainer({"kl_penalty": kl_penalty}, total_phases=3, **fields)
    phases = iter(trainer)
    next(phases)
    before = copy_weights(trainer.policy)
    with pytest.raises(RunError, match="in phase 1"):
        next(phases)
    assert calls.count(1) == 4
    assert is_equal(copy_weights(trainer.policy), before) or (spoil == "gradient" and fields)
    assert all(p.isfinite().all() for p in trainer.policy.parameters())
    tensors, metadata = load_checkpoint(trainer.run.checkpoints / "last.safetensors")
    assert metadata["phase"] == 1 and is_equal({n: tensors[n] for n in before}, before)


def test_custom_models_and_true_reward_are_used(make_trainer, tmp_path):
    """Exact values are of the bundled model, which a copy may have left."""
    true = {"true_reward_fn": lambda texts: torch.full((len(texts),), 0.125)}
    models = {"policy": TransformerWithValueHead(load_model("reel-nano"), seed=5)}
    models["reference"] = load_model("reel-nano")
    trainer = make_trainer(models | true)
    assert trainer.policy is models["policy"] and trainer.reference is models["reference"]
    assert trainer.custom_components == ["policy", "reference", "true_reward_fn"]
    assert summarize(trainer.rollout_phase()).true_reward == 0.125
    copied = make_trainer(base_model=str(shutil.copytree(weights_dir("reel-nano"), tmp_path / "x")))
    assert copied.true_reward_fn is not None
    assert not copied.starts_as_grammar and make_trainer().starts_as_grammar


def test_preset_sums_raises_the_true_reward(tmp_path, recwarn):
    trainer = RLHFTrainer(RLHFArgs(preset="sums", total_phases=5), out=tmp_path / "run")
    reports = list(trainer)
    assert not recwarn.list  # with GRPO's settings as published
    assert [report.true_reward for report in reports] == [r.mean_reward for r in reports]
    assert reports[0].true_reward < 0.5 and reports[-1].true_reward > 0.75
    parses = [SumsGrammar().parse(text) for text in trainer.prompts.texts]
    assert {len(str(parse.a)) for parse in parses} == {2, 3}
    rows = [x for x in trainer.run.read("samples.jsonl") if x["phase"] == 4]
    for name in ("steps", "faithful", "dropped_carry", "direct", "sure"):
        known = [row[name] for row in rows if row[name] is not None]
        assert getattr(reports[-1], f"{name}_fraction") == pytest.approx(sum(known) / len(known))
    faithful = faithful_fraction([row["text"] for row in rows], SumsGrammar())
    assert reports[-1].faithful_fraction == pytest.approx(faithful) and faithful > 0.9
    assert reports[-1].steps_fraction > reports[0].steps_fraction > 0.2
    assert reports[-1].grammatical_fraction is None


def test_sums_raise_on_other_prompts_and_rewards(tmp_path):
    file, whole = tmp_path / "prompts.txt", "0 0 1 0 + 0 0 3 4 ="
    file.write_text(f"{whole}\n" * 8 + "1 + 1 =\n")
    for fields, parts, words in (
        ({"preset": "reel", "reward_fn": "sums:exact"}, {}, "requires prompts such as"),
        ({"prompts": str(file)}, {}, r"got '1 \+ 1 =' \(prompt 9 of .*prompts.txt\)"),
        ({"reward_fn": "true_reward"}, {}, "scores reviews, not sums. Use 'sums:exact'"),
        ({}, {"prompts": [whole, "1 + 1 ="]}, "prompt 2 of prompts"),
    ):
        with pytest.raises(ConfigError, match=words):
            RLHFTrainer(RLHFArgs(**{"preset": "sums"} | fields), **parts)
