"""What a user writes from memory: natural guesses are accepted, or told what to write instead."""

import pytest
import torch

from rlhf_lab.config import RLHFArgs
from rlhf_lab.diffing import PatchPlace, Side, patch_activations
from rlhf_lab.errors import ConfigError, RunError
from rlhf_lab.probes import ReelTruth, Run

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

    with pytest.warns(UserWarning) as caught:
        trainer.train()
    said = [str(one.message) for one in caught if "naked" in str(one.message)]
    assert said == [
        'naked returned a tensor, which is not stored; return a dict of it, such as {"naked": '
        "tensor}."
    ]
    run = Run(trainer.run.path)
    with pytest.raises(RunError, match=r"what that function returned is in returned\('look'\)"):
        run.records("look")
    with pytest.raises(RunError, match="broken raised IndexError at after_score of phase 0 and is"):
        run.returned("broken")
    with pytest.raises(RunError, match="there are best, last, those after 0, 1, 2 phases, by numb"):
        run.policy("first")
    with pytest.raises(RunError, match=r"another --out \(in Python, RLHFTrainer.resume or another"):
        type(trainer)(trainer.args, out=run.path).train()


def test_texts_in_place_of_tokens_are_refused_at_once(make_trainer):
    with pytest.raises(ConfigError, match=r"is a list; give a tensor of token ids \[batch seq\]"):
        make_trainer().capture("blocks.0.hook_resid_post", tokens=["this movie"])


@pytest.mark.parametrize(
    ("places", "words", "said"),
    [
        (PatchPlace("blocks.0.attn.hook_z", head=1), (5, 6), "places is a PatchPlace; give a dict"),
        ([PatchPlace("blocks.0.hook_mlp_out")], (5, 6), "places is a list; give a dict of names"),
        ({}, ("loved", "hated"), "are not two token ids; the tokenizer's encode gives them"),
        ({}, (5,), "are not two token ids"),
    ],
)
def test_places_and_words_of_another_kind_are_refused(reel_policy, text, places, words, said):
    side = Side(reel_policy.base_model, text)
    with pytest.raises(ConfigError, match=said):
        patch_activations(side, side, places, -1, words)


def test_a_policy_with_its_value_head_is_told_from_its_language_model(reel_policy, text):
    side = Side(reel_policy, text)
    place = {"mlp": PatchPlace("blocks.0.hook_mlp_out")}
    with pytest.raises(ConfigError, match=r"give its language model, policy\.base_model"):
        patch_activations(side, side, place, -1, (5, 6))


@pytest.mark.parametrize(("name", "meant"), [("phases", "total_phases"), ("horizon", "kl_horizon")])
def test_a_part_of_a_settings_name_is_enough_to_be_told_of_it(name, meant):
    with pytest.raises(ConfigError, match=f"has no field '{name}'; here it is {meant}"):
        RLHFArgs(**{name: 3})
    with pytest.raises(ConfigError, match="has no field 'model'; see `help"):
        RLHFArgs(model="gpt2")  # base_model or reward_model
