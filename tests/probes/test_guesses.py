"""Code that a user writes from memory: natural guesses are accepted, or named in an error."""

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.diffing import PatchPlace, Side, patch_activations, patch_path
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.probes import (
    Direction,
    FrozenProbe,
    LogitShift,
    NeuronRank,
    ReelTruth,
    Run,
    RunHealth,
    attach,
)
from rlhf_lab.training.capture import capture_activations

pytestmark = pytest.mark.usefixtures("no_type_checks")


@pytest.fixture(scope="module")
def text():
    return ReelTruth().reviews(4)[0]


@pytest.mark.slow
def test_what_a_function_returned_is_found_or_said_to_be_lost(make_trainer, text):
    trainer = make_trainer(total_phases=2)

    @trainer.on("after_phase")
    def look(ctx):
        return {"phases": ctx.phase}

    @trainer.on("after_score")
    def broken(ctx):
        return {"first": [][0]}

    @trainer.on("after_phase")
    def naked(ctx):
        return torch.ones(2)

    @trainer.on("after_phase")
    def share(ctx):
        return 0.5

    with pytest.warns(UserWarning) as caught:
        trainer.train()
    messages = [str(one.message) for one in caught if "naked" in str(one.message)]
    assert set(messages) == {"naked returned a Tensor, which is not stored. Return a dict of it."}
    messages = [str(one.message) for one in caught if "share" in str(one.message)]
    assert set(messages) == {"share returned a float, which is not stored. Return a dict of it."}
    run = Run(trainer.run)
    with pytest.raises(RunError, match=r"Use returned\('look'\) for the dicts of that function"):
        run.records("look")
    with pytest.raises(RunError, match="broken raised IndexError at after_score of phase 0 and is"):
        run.returned("broken")
    with pytest.raises(RunError, match="Available: best, last, phase_000000, phase_000001"):
        run.policy("first")
    with pytest.raises(RunError, match=r"another --out \(in Python, RLHFTrainer.resume or another"):
        type(trainer)(trainer.args, out=run.path).train()


@pytest.mark.parametrize(
    ("places", "words", "message"),
    [
        ({}, ("loved", "zzz"), "'zzz' is not one token"),
        ({}, "loved", "words='loved' are not different tokens"),
        ({}, (5,), r"words=\(5,\) are not different tokens"),
    ],
)
def test_places_and_words_of_another_kind_are_refused(reel_policy, text, places, words, message):
    side = Side(reel_policy.base_model, text)
    with pytest.raises(ConfigError, match=message):
        patch_activations(side, side, places, -1, words)


def test_words_places_and_positions_have_shorter_forms(reel_policy, text):
    model, at = reel_policy.base_model, "blocks.0.hook_mlp_out"
    sides = Side(model, text), Side(model, text.roll(1, 0))
    ids = model.to_single_token("loved"), model.to_single_token("hated")
    places = {"mlp": PatchPlace(at), "last": PatchPlace(at, None, (-1,))}
    long = patch_activations(*sides, places, -1, ids)
    words = ("loved", "hated")
    short = patch_activations(*sides, {"mlp": at, "last": PatchPlace(at, positions=-1)}, -1, words)
    assert torch.equal(short.patched, long.patched) and not torch.equal(*short.patched)
    through = [PatchPlace("blocks.1.hook_mlp_out")]
    paths = [patch_path(*sides, PatchPlace(at), through, -1, each) for each in (ids, words)]
    assert torch.equal(paths[0].patched, paths[1].patched)


def test_probes_are_attached_as_a_list_too(make_trainer, text):
    listed = attach(make_trainer(), [RunHealth(), LogitShift()], eval_tokens=text)
    assert list(listed.plan) == ["run_health", "logit_shift"]


@pytest.mark.parametrize(
    ("probe", "options", "message"),
    [
        (Direction(), {}, "direction_sentiment requires a label per sequence. Pass labels="),
        (FrozenProbe(), {}, "frozen_probe requires a label per sequence. Pass labels="),
        (LogitShift("loved", "zzz"), {}, "'zzz' is not one token"),
        (NeuronRank("zzz"), {}, "'zzz' is not one token"),
    ],
)
def test_missing_option_of_a_probe_raises_when_attached(
    make_trainer, text, probe, options, message
):
    with pytest.raises(ConfigError, match=message):
        attach(make_trainer(), probe, eval_tokens=text, **options)


def test_patterns_at_one_position_raise_when_registered(make_trainer):
    with pytest.raises(
        ConfigError, match=r"pos=None, and index the query, as in acts\[site\]\[:, "
    ):
        make_trainer().capture("blocks.*.attn.hook_pattern", pos=-1)


def test_one_name_of_a_site_is_as_good_as_a_list_of_it(reel_policy, text):
    at = "blocks.0.hook_mlp_out"
    found = [capture_activations(reel_policy, text, names)[at] for names in (at, [at])]
    assert torch.equal(*found)


def test_a_policy_stands_for_its_language_model(reel_policy, text):
    models = reel_policy, reel_policy.base_model
    place = {"mlp": PatchPlace("blocks.0.hook_mlp_out")}
    found = []
    for model in models:
        sides = Side(model, text), Side(model, text.roll(1, 0))
        found.append(patch_activations(*sides, place, -1, (5, 6)).patched)
        found.append(patch_path(*sides, place["mlp"], [place["mlp"]], -1, (5, 6)).patched)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize(("name", "meant"), [("phases", "total_phases"), ("horizon", "kl_horizon")])
def test_a_part_of_a_settings_name_is_enough_to_be_told_of_it(name, meant):
    with pytest.raises(ConfigError, match=f"has no field '{name}'. Use {meant}"):
        RLHFArgs(**{name: 3})
    with pytest.raises(ConfigError, match="has no field 'model'. Use base_model"):
        RLHFArgs(model="gpt2")
