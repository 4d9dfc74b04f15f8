"""Code that a user writes from memory: natural guesses are accepted, or named in an error."""

import pytest
import torch

from rlhf_lab.diffing import PatchPlace, Side, patch_activations, patch_path
from rlhf_lab.errors import RunError
from rlhf_lab.probes import ReelTruth, Run

pytestmark = pytest.mark.usefixtures("no_type_checks")


@pytest.fixture(scope="module")
def text():
    return ReelTruth().reviews(4)[0]


@pytest.mark.slow
def test_what_a_function_returned_is_found_or_said_to_be_lost(make_trainer):
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
    messages = {str(one.message) for one in caught}
    for name, kind in (("naked", "Tensor"), ("share", "float")):
        words = f"{name} returned a {kind}, which is not stored. Return a dict of it."
        assert [message for message in messages if name in message] == [words]
    run = Run(trainer.run)
    with pytest.raises(RunError, match=r"Use returned\('look'\) for the dicts of that function"):
        run.records("look")
    with pytest.raises(RunError, match="broken raised IndexError at after_score of phase 0 and is"):
        run.returned("broken")
    with pytest.raises(RunError, match="Available: best, last, phase_000000, phase_000001"):
        run.policy("first")
    with pytest.raises(RunError, match=r"another --out \(in Python, RLHFTrainer.resume or another"):
        type(trainer)(trainer.args, out=run.path).train()


def test_models_words_places_and_positions_have_shorter_forms(reel_policy, text):
    model, at = reel_policy.base_model, "blocks.0.hook_mlp_out"
    sides = Side(model, text), Side(model, text.roll(1, 0))
    of_policy = Side(reel_policy, text), Side(reel_policy, text.roll(1, 0))
    ids = model.to_single_token("loved"), model.to_single_token("hated")
    places = {"mlp": PatchPlace(at), "last": PatchPlace(at, None, (-1,))}
    long = patch_activations(*sides, places, -1, ids)
    words = ("loved", "hated")
    places = {"mlp": at, "last": PatchPlace(at, positions=-1)}
    short = patch_activations(*of_policy, places, -1, words)
    assert torch.equal(short.patched, long.patched) and not torch.equal(*short.patched)
    through = [PatchPlace("blocks.1.hook_mlp_out")]
    pairs = (sides, ids), (of_policy, words)
    paths = [patch_path(*x, PatchPlace(at), through, -1, each) for x, each in pairs]
    assert torch.equal(paths[0].patched, paths[1].patched)
