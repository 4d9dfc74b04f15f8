"""Activation and path patching: ends that are known, and shares that are counted another way."""

import copy

import pytest
import torch

from rlhf_lab.diffing import PatchPlace, Side, part_places, patch_activations, patch_path
from rlhf_lab.diffing.patching import patch_hook
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import load_model
from rlhf_lab.models.hooked_transformer import HookPoint
from tests.diffing.faults_compare import PATCHING_FAULTS
from tests.probes.planting import planted, told_by
from tests.tiny_families import random_tokens, tiny_of

WORDS = (5, 9)
POS = -3
LAST = PatchPlace("blocks.1.hook_resid_post")


def difference(logits):
    return (logits[:, POS, WORDS[0]] - logits[:, POS, WORDS[1]]).double()


@pytest.fixture
def shared_head(base, make_tuned):
    """A tuned model whose final norm and unembedding are the base's."""
    return make_tuned(base, lambda name: not name.startswith(("ln_final", "unembed")))


def test_a_patch_with_the_same_model_and_text_changes_nothing(base, reviews):
    side = Side(base, reviews)
    found = patch_activations(side, side, part_places(base), POS, WORDS)
    assert torch.equal(found.patched, found.start.expand_as(found.patched))
    assert all(interval.value is None for interval in found.fractions().values())


def test_the_last_residual_with_a_shared_head_is_all_of_it(base, shared_head, reviews):
    base_side, tuned_side = Side(base, reviews), Side(shared_head, reviews)
    for receiver, donor in ((base_side, tuned_side), (tuned_side, base_side)):
        found = patch_activations(receiver, donor, {"last": LAST}, POS, WORDS)
        torch.testing.assert_close(found.patched[0], found.end)
        assert found.fractions()["last"].value.item() == pytest.approx(1)
        torch.testing.assert_close(found.start, difference(receiver.model(reviews)))
    at_pos = LAST._replace(positions=(POS,))
    elsewhere = LAST._replace(positions=(POS - 1, POS + 1))
    found = patch_activations(
        base_side, tuned_side, {"there": at_pos, "not": elsewhere}, POS, WORDS
    )
    torch.testing.assert_close(found.patched[0], found.end)
    assert torch.equal(found.patched[1], found.start)


def test_a_site_is_patched_as_a_hook_written_by_hand_does(base, tuned, reviews):
    """One head's z, at two positions."""
    place = PatchPlace("blocks.0.attn.hook_z", 2, (4, -5))
    sides = Side(base, reviews), Side(tuned, reviews)
    found = patch_activations(*sides, {"z": place}, POS, WORDS)
    _, cache = tuned.run_with_cache(reviews)

    def put(z, hook):
        z[:, 4, 2] = cache[hook.name][:, 4, 2]
        z[:, -5, 2] = cache[hook.name][:, -5, 2]
        return z

    by_hand = base.run_with_hooks(reviews, fwd_hooks=[(place.site, put)])
    torch.testing.assert_close(found.patched[0], difference(by_hand), atol=1e-5, rtol=0)
    assert (found.patched[0] - found.start).abs().max() > 1e-3


def test_what_a_head_writes_is_patched_with_the_matrix_that_writes_it(base, make_tuned, reviews):
    """Only W_O of one head is tuned: its z is the same, and what it writes is not."""
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.blocks[1].attn.W_O[3] *= 1.7
    sides = Side(base, reviews), Side(tuned, reviews)
    places = {"z": PatchPlace("blocks.1.attn.hook_z", 3)} | part_places(base)
    found = patch_activations(*sides, places, POS, WORDS)
    moved = (found.patched - found.start).abs().amax(1)
    charged = {name for name, size in zip(found.names, moved, strict=True) if size > 1e-5}
    # block 1's MLP reads what the head writes
    assert charged == {"L1H3", "L1 mlp"}
    torch.testing.assert_close(
        found.patched[found.names.index("L1H3")], found.end, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("head", [None, 1])
def test_a_pattern_is_patched_by_its_query(base, tuned, reviews, head):
    place = PatchPlace("blocks.1.attn.hook_pattern", head, (POS,))
    found = patch_activations(
        Side(base, reviews), Side(tuned, reviews), {"pattern": place}, POS, WORDS
    )
    _, cache = tuned.run_with_cache(reviews)
    heads = slice(None) if head is None else head

    def put(pattern, hook):
        pattern[:, heads, POS] = cache[hook.name][:, heads, POS]
        return pattern

    by_hand = base.run_with_hooks(reviews, fwd_hooks=[(place.site, put)])
    torch.testing.assert_close(found.patched[0], difference(by_hand), atol=1e-5, rtol=0)
    assert (found.patched[0] - found.start).abs().max() > 1e-4


def test_padding_on_the_left_changes_nothing(base, tuned, reviews):
    places = part_places(base, (POS, POS - 4)) | {"all": PatchPlace("blocks.0.hook_mlp_out")}
    alone = [
        patch_activations(Side(base, row), Side(tuned, row), places, POS, WORDS)
        for row in (reviews[:1], reviews[1:2, 3:])
    ]
    padded = reviews[:2].clone()
    padded[1, :3] = 0
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[1, :3] = False
    found = patch_activations(
        Side(base, padded, mask), Side(tuned, padded, mask), places, POS, WORDS
    )
    expected = torch.cat([row.patched for row in alone], 1)
    torch.testing.assert_close(found.patched, expected, atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="padding in some rows"):
        patch_activations(Side(base, padded, mask), Side(tuned, padded, mask), places, 1, WORDS)


def test_more_rows_than_run_at_once_are_the_same_row_by_row(base, tuned, reviews):
    many = reviews.repeat(6, 1)[:70]
    places = {"mlp": PatchPlace("blocks.0.hook_mlp_out")}
    found = patch_activations(Side(base, many), Side(tuned, many), places, POS, WORDS)
    few = patch_activations(Side(base, reviews), Side(tuned, reviews), places, POS, WORDS)
    torch.testing.assert_close(found.patched[0, 60:], few.patched[0, :10], atol=1e-5, rtol=0)


def test_the_direct_path_of_a_last_part_is_all_of_its_effect(base, tuned, reviews):
    sides = Side(base, reviews), Side(tuned, reviews)
    sender = PatchPlace("blocks.1.hook_mlp_out")
    whole = patch_activations(*sides, {"mlp": sender}, POS, WORDS)
    direct = patch_path(*sides, sender, [LAST], POS, WORDS)
    torch.testing.assert_close(direct.patched[0], whole.patched[0], atol=1e-5, rtol=0)


def test_paths_of_an_earlier_part_lead_through_what_reads_it_alone(base, tuned, reviews):
    sides = Side(base, reviews), Side(tuned, reviews)
    sender = PatchPlace("blocks.0.hook_mlp_out")
    everything = [
        LAST,
        PatchPlace("blocks.1.hook_attn_out"),
        PatchPlace("blocks.1.hook_mlp_out"),
    ]
    whole = patch_activations(*sides, {"mlp": sender}, POS, WORDS)
    free = patch_path(*sides, sender, everything, POS, WORDS)
    torch.testing.assert_close(free.patched[0], whole.patched[0], atol=1e-4, rtol=0)
    earlier = patch_path(*sides, sender, [PatchPlace("blocks.0.hook_attn_out", 1)], POS, WORDS)
    assert torch.equal(earlier.patched[0], earlier.start)
    through_one = patch_path(*sides, sender, [PatchPlace("blocks.1.hook_attn_out", 2)], POS, WORDS)
    assert 1e-4 < (through_one.patched[0] - through_one.start).abs().max()
    # the direct path by hand: what the MLP adds, added to the base's own last residual
    direct = patch_path(*sides, sender, [LAST], POS, WORDS)
    caches = [side.model.run_with_cache(reviews)[1] for side in sides]
    moved = caches[1][sender.site] - caches[0][sender.site]
    by_hand = base.unembed(base.ln_final(caches[0][LAST.site] + moved))
    torch.testing.assert_close(direct.patched[0], difference(by_hand), atol=1e-5, rtol=0)


def test_grouped_heads_are_patched_too(llama_tokenizer):
    base = load_model(tiny_of("LlamaForCausalLM"), llama_tokenizer)
    tuned, tokens = copy.deepcopy(base), random_tokens()
    with torch.no_grad():
        tuned.blocks[2].attn.W_O[1] *= 1.5
    places = part_places(base) | {"k": PatchPlace("blocks.2.attn.hook_k", 1)}
    found = patch_activations(Side(base, tokens), Side(tuned, tokens), places, POS, WORDS)
    torch.testing.assert_close(
        found.patched[found.names.index("L2H1")], found.end, atol=1e-5, rtol=0
    )
    assert torch.equal(found.patched[found.names.index("k")], found.start)
    with pytest.raises(ConfigError, match="has 2 heads"):
        wrong = {"k": PatchPlace("blocks.2.attn.hook_k", 3)}
        patch_activations(Side(base, tokens), Side(tuned, tokens), wrong, POS, WORDS)


def test_hooks_of_the_models_stay_as_they_are(base, tuned, reviews):
    patch_activations(Side(base, reviews), Side(tuned, reviews), part_places(base), POS, WORDS)
    assert not any(point.fwd_hooks for model in (base, tuned) for point in model.hook_dict.values())


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (PatchPlace("blocks.9.hook_mlp_out"), "does not have"),
        (PatchPlace("blocks.0.hook_mlp_out", 1), "has no heads apart"),
        (PatchPlace("blocks.0.attn.hook_z", 4), "has 4 heads"),
        (PatchPlace("blocks.0.attn.hook_z", None, (40,)), "outside texts"),
    ],
)
def test_places_that_are_not_there_are_refused(base, tuned, reviews, place, says):
    with pytest.raises(ConfigError, match=says):
        patch_activations(Side(base, reviews), Side(tuned, reviews), {"x": place}, POS, WORDS)


def test_texts_that_do_not_match_and_empty_paths_are_refused(base, reviews):
    with pytest.raises(ConfigError, match="match token by token"):
        patch_activations(Side(base, reviews), Side(base, reviews[:, 1:]), {}, POS, WORDS)
    with pytest.raises(ConfigError, match="through is empty"):
        patch_path(Side(base, reviews), Side(base, reviews), LAST, [], POS, WORDS)


def test_what_attention_gives_through_a_norm_has_no_heads_apart(llama_tokenizer):
    model = load_model(tiny_of("Olmo2ForCausalLM"), llama_tokenizer)
    with pytest.raises(ConfigError, match="cannot be told apart"):
        part_places(model)


def test_the_hook_leaves_what_it_is_given_as_it_was():
    given, source = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    chosen = torch.tensor([[True, False, True], [False, False, True]])
    hook = HookPoint()
    hook.name = "blocks.0.hook_resid_post"
    put = patch_hook(source, None, chosen)(given, hook)
    assert put.sum(-1).tolist() == [[4, 0, 4], [0, 0, 4]] and not given.any()


@pytest.mark.slow
@pytest.mark.parametrize("fault", PATCHING_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_told(fault, request, no_type_checks):
    with planted(fault):
        told_by(globals()[fault.run], request, head=1)
