"""The card of a saved policy: facts of the run, YAML that the hub reads, programs that run."""

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.repocard import metadata_load

from rlhf_lab.errors import RunError
from rlhf_lab.models import export_policy
from rlhf_lab.training import RLHFTrainer
from rlhf_lab.training.checkpoint import read_notes
from rlhf_lab.training.model_card import write_run_card, write_tuning_card
from rlhf_lab.training.restore import checkpoint_name, load_policy


def card(directory: Path) -> str:
    return (directory / "README.md").read_text(encoding="utf-8")


def figures(directory: Path) -> dict[str, dict[str, str]]:
    """The table of figures, by row and column."""
    lines = [line for line in card(directory).split("## Figures")[1].splitlines() if "|" in line]
    (head, _, *rows) = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def load_as_the_card_says(directory: Path, monkeypatch, **given: Any) -> dict[str, Any]:
    """Run the card's program in the card's directory."""
    (program,) = re.findall(r"```python\n(.*?)```", card(directory), flags=re.DOTALL)
    monkeypatch.chdir(directory)
    defined = dict(given)
    exec(compile(program, "card", "exec"), defined)
    return defined


@pytest.fixture(scope="module")
def finished(reel_args, tmp_path_factory) -> RLHFTrainer:
    args = reel_args(total_phases=3, seed=7, base_lr=1e-3)
    trainer = RLHFTrainer(args, out=tmp_path_factory.mktemp("card") / "demo")
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def exported(finished, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "policy"
    policy, args = load_policy(finished.run.path)
    export_policy(policy, args.base_model, out)
    write_run_card(finished.run, out)
    return out


@pytest.mark.slow
def test_the_front_matter_is_what_the_hub_reads(finished, exported):
    """The bundled base model is on no hub, so that it is not named there."""
    for directory, library in ((finished.run.path, "rlhf_lab"), (exported, "transformers")):
        assert metadata_load(directory / "README.md") == {
            "library_name": library,
            "pipeline_tag": "text-generation",
            "license": "mit",
            "tags": ["rlhf", "reinforcement-learning", "rlhf_lab", "ppo"],
        }


@pytest.mark.slow
def test_the_figures_are_those_of_the_metrics_file_and_the_evaluation(finished):
    lines, final = finished.run.read("metrics.jsonl"), finished.run.read_info()["final"]
    found = figures(finished.run.path)
    rows = {
        "mean reward": "mean_reward",
        "KL from the base model, nats per sequence": "kl_per_sequence",
    }
    for row, name in rows.items():
        expected = {"phase 0": lines[0], "phase 2": lines[2], "after training": final}
        assert found[row] == {when: f"{line[name]:.4g}" for when, line in expected.items()}
    entropy = found["entropy, nats per token"]
    assert entropy["after training"] == "–" and float(entropy["phase 2"]) > 0


def test_it_says_what_was_trained_on_what_reward_with_which_settings(finished):
    text = card(finished.run.path)
    assert text.split("---\n")[2].strip().startswith("# demo")
    for said in (
        "A policy after 3 learning phases",
        "`reel-nano`, which comes with rlhf_lab",
        "the probability of class `pos` by the classifier `reel-sentiment`",
        "3 phases of 8 sequences, with seed 7",
        "| advantages | `gae` |",
        "| kl_coef | 0.3 |",
        "| kl_controller | `fixed` |",
        "| device | `cpu` |",
        "| parts_handed_in | `none` |",
    ):
        assert said in text


def test_the_program_of_a_runs_card_gives_the_policy_that_came_out(finished, monkeypatch):
    found = load_as_the_card_says(finished.run.path, monkeypatch)
    expected = dict(finished.policy.named_parameters())
    for name, parameter in found["policy"].named_parameters():
        assert torch.equal(parameter, expected[name])
    assert found["args"] == finished.args


def test_the_program_of_an_exports_card_gives_the_policy_and_its_tokenizer(
    finished, exported, monkeypatch
):
    found = load_as_the_card_says(exported, monkeypatch)
    tokens = found["tokenizer"]("this movie was", return_tensors="pt").input_ids
    with torch.no_grad():
        ours = finished.policy(tokens)[0].log_softmax(-1)
        theirs = found["model"](tokens).logits.log_softmax(-1)
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)


def test_an_exports_figures_are_those_of_the_checkpoint_that_was_exported(finished, tmp_path):
    """After 2 learning phases, the third batch was written; "after training" is not of these."""
    write_run_card(finished.run, tmp_path, checkpoint_name(2))
    found = figures(tmp_path)["mean reward"]
    assert found.keys() == {"phase 0", "phase 2"}
    assert found["phase 2"] == f"{finished.run.read('metrics.jsonl')[2]['mean_reward']:.4g}"
    assert "A policy after 2 learning phases" in card(tmp_path)
    with pytest.raises(RunError, match="no checkpoint"):
        write_run_card(finished.run, tmp_path, "phase_000099")


def test_the_notes_of_a_checkpoint_are_read_without_its_tensors(finished):
    notes = read_notes(finished.run.checkpoints / "last.safetensors")
    assert notes["phase"] == 3 and notes["best"] == finished.recorder.best


@pytest.mark.slow
def test_the_card_is_there_from_the_first_save_on(make_trainer):
    trainer = make_trainer(total_phases=4, save_every=2)
    cards = []
    trainer.on("checkpoint")(
        lambda ctx: cards.append(card(ctx.run.path)) if ctx.checkpoint.stem == "last" else None
    )
    for _ in range(2):
        trainer.run_phase()
    assert "No phase has ended yet." in cards[0]
    assert figures(trainer.run.path)["mean reward"].keys() == {"phase 0", "phase 1"}


@pytest.mark.slow
def test_a_policy_of_the_callers_own_is_named_and_loaded_into(make_trainer, monkeypatch):
    policy = make_trainer().policy
    trainer = make_trainer(parts={"policy": policy, "reward_fn": lambda texts: [0.5] * len(texts)})
    trainer.train()
    text = card(trainer.run.path)
    assert "from a model that was handed in, paid by a function that was handed in" in text
    assert metadata_load(trainer.run.path / "README.md")["license"] == "unknown"
    fresh = make_trainer().policy
    load_as_the_card_says(trainer.run.path, monkeypatch, policy=fresh)
    trained = dict(trainer.policy.named_parameters())
    assert all(torch.equal(p, trained[name]) for name, p in fresh.named_parameters())


@pytest.mark.slow
def test_scores_that_were_handed_in_are_no_reward_of_the_arguments(make_trainer):
    trainer = make_trainer(total_phases=1, warmup_steps=0)
    trainer.step(["this movie"] * 8, ["was good"] * 8, [float(i) for i in range(8)])
    trainer.recorder.writer.wait()
    text = card(trainer.run.path)
    assert "paid by scores that were handed in" in text and "classifier" not in text


@pytest.fixture
def card_of(finished, tmp_path, reel_args):
    """The card of a run with other arguments, written from a copy of its notes."""

    def write(**changes: Any) -> Path:
        run = dataclasses.replace(reel_args(), **changes)
        info = finished.run.read_info() | {"args": run.to_dict()}
        copy = type(finished.run)(tmp_path)
        copy.write_info(info)
        copy.checkpoints.mkdir()
        shutil.copy(finished.run.checkpoints / "last.safetensors", copy.checkpoints)
        write_run_card(copy)
        return tmp_path

    return write


def test_a_base_model_of_the_hub_is_named_and_its_license_is_not_made_up(card_of):
    found = metadata_load(card_of(base_model="gpt2-small") / "README.md")
    assert (found["base_model"], found["license"]) == ("gpt2", "unknown")


def test_a_directory_is_named_without_its_place(card_of, tmp_path):
    place = tmp_path / "secret" / "home"
    (place / "my-model").mkdir(parents=True)
    directory = card_of(
        base_model=str(place / "my-model"),
        reward_fn="learned",
        reward_model=str(place / "my-reward"),
        prompts=str(place / "prompts.txt"),
    )
    text = card(directory)
    assert "secret" not in text and "base_model" not in metadata_load(directory / "README.md")
    assert "`my-model`" in text and "the reward model `my-reward`" in text
    assert "| prompts | `prompts.txt` |" in text and "Look at the base model's page" in text


def test_a_prefix_with_a_bar_stays_in_its_cell(card_of):
    text = card(card_of(prefix="a|b"))
    assert r"| prefix | `a\|b` |" in text


@pytest.mark.slow
def test_a_readme_of_the_users_own_stays_as_it_is(reel_args, tmp_path):
    """In a run's directory that was not empty, and beside a tuned model."""
    (tmp_path / "README.md").write_text("my notes on rlhf_lab")
    RLHFTrainer(reel_args(total_phases=1, warmup_steps=0), out=tmp_path).train()
    notes = {"method": "sft", "base_model": "reel-nano", "texts": "reel"}
    write_tuning_card(tmp_path, notes, ["loss 2.0 -> 1.0"])
    assert card(tmp_path) == "my notes on rlhf_lab"
    assert (tmp_path / "checkpoints" / "last.safetensors").exists()
