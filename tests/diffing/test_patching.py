"""Activation and path patching: hooks by hand, and known ends."""

import copy
import functools

import pytest
import torch

from rlhf_lab.diffing import (
    PatchPlace,
    Side,
    part_places,
    patch_activations,
    patch_hook,
    patch_path,
)
from rlhf_lab.errors import ConfigError
from rlhf_lab.models import TransformerWithValueHead, load_model
from rlhf_lab.models.hooked_transformer import HookPoint
from tests.tiny_families import random_tokens, tiny_of
from tests.transformer_lens_model import to_transformer_lens

WORDS, POS = (5, 9), -3
LAST = PatchPlace("blocks.1.hook_resid_post")
close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=0)


def difference(logits):
    return (logits[:, POS, WORDS[0]] - logits[:, POS, WORDS[1]]).double()


@pytest.fixture
def sides(base, tuned, reviews):
    return Side(base, reviews), Side(tuned, reviews)


def test_a_patch_with_itself_changes_nothing(base, reviews):
    side = Side(base, reviews)
    found = patch_activations(side, side, part_places(base), POS, WORDS)
    assert torch.equal(found.patched, found.start.expand_as(found.patched))
    assert patch_activations(side, side, {}, POS, WORDS).fractions() == {}
    assert all(interval.value is None for interval in found.fractions().values())
    assert not any(point.fwd_hooks for point in base.hook_dict.values())


def test_the_last_residual_brings_all_with_one_unembedding(base, make_tuned, reviews):
    tuned = make_tuned(base, lambda name: not name.startswith(("ln_final", "unembed")))
    sides = Side(base, reviews), Side(tuned, reviews)
    elsewhere = {"here": LAST._replace(positions=POS), "not": LAST._replace(positions=(0, POS + 1))}
    for receiver, donor in (sides, sides[::-1]):
        found = patch_activations(receiver, donor, {"last": LAST.site} | elsewhere, POS, WORDS)
        torch.testing.assert_close(found.patched[:2], found.end.expand(2, -1))
        assert torch.equal(found.patched[2], found.start)
        assert found.fractions()["last"].value.item() == pytest.approx(1)
        torch.testing.assert_close(found.start, difference(receiver.model(reviews)))


@pytest.mark.parametrize("head", [None, 1])
@pytest.mark.parametrize(("site", "axis"), [("attn.hook_z", 1), ("attn.hook_pattern", 2)])
def test_positions_and_heads_match_a_hook_by_hand(sides, reviews, site, axis, head):
    place = PatchPlace(f"blocks.0.{site}", head, (4, POS))
    found = patch_activations(*sides, {"one": place}, POS, WORDS)
    _, cache = sides[1].model.run_with_cache(reviews)

    def put(x, hook):
        for pos in (4, POS):
            index = [slice(None)] * 4
            index[axis], index[3 - axis] = pos, slice(None) if head is None else head
            x[tuple(index)] = cache[hook.name][tuple(index)]
        return x

    by_hand = sides[0].model.run_with_hooks(reviews, fwd_hooks=[(place.site, put)])
    close(found.patched[0], difference(by_hand))
    assert (found.patched[0] - found.start).abs().max() > 1e-4


def test_patches_match_transformer_lens(base, tuned, reviews):
    from transformer_lens import patching

    tokens, theirs = reviews[:3, :8], to_transformer_lens(base)
    _, cache = to_transformer_lens(tuned).run_with_cache(tokens)
    for patch, site, field in (
        (patching.get_act_patch_attn_head_out_all_pos, "attn.hook_z", "head"),
        (patching.get_act_patch_mlp_out, "hook_mlp_out", "positions"),
    ):
        expected = patch(theirs, tokens, cache, lambda logits: difference(logits).mean())
        rows = torch.cartesian_prod(*map(torch.arange, expected.shape)).tolist()
        places = {f"{at} {i}": PatchPlace(f"blocks.{at}.{site}", **{field: i}) for at, i in rows}
        found = patch_activations(Side(base, tokens), Side(tuned, tokens), places, POS, WORDS)
        close(found.patched.mean(1), expected.flatten().double(), atol=1e-4)


def test_the_output_of_a_head_includes_its_matrix(base, reviews):
    """Only W_O of one head is tuned: its z is the same, and its output is not."""
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.blocks[1].attn.W_O[3] *= 1.7
    places = {"z": PatchPlace("blocks.1.attn.hook_z", 3)} | part_places(base)
    found = patch_activations(Side(base, reviews), Side(tuned, reviews), places, POS, WORDS)
    rows = dict(zip(found.names, found.patched, strict=True))
    moved = {name for name, row in rows.items() if (row - found.start).abs().max() > 1e-5}
    assert moved == {"L1H3", "L1 mlp"}  # block 1's MLP reads the head
    close(rows["L1H3"], found.end)


def test_patch_hook_leaves_its_input_unchanged():
    x, hook = torch.zeros(1, 2, 3), HookPoint()
    hook.name = "hook_embed"
    assert patch_hook(torch.ones(1, 2, 3))(x, hook).all() and not x.any()


def test_padding_and_chunks_change_nothing(base, tuned, reviews, no_type_checks):
    places = part_places(base, (POS, POS - 4)) | {"all": "blocks.0.hook_mlp_out"}
    each = [
        patch_activations(Side(base, row), Side(tuned, row), places, POS, WORDS)
        for row in (reviews[:1], reviews[1:2, 3:])
    ]
    padded = reviews[:2].repeat(35, 1)  # more rows than run at once
    padded[1::2, :3] = 0
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[1::2, :3] = False
    sides = Side(base, padded, mask), Side(tuned, padded, mask)
    found = patch_activations(*sides, places, POS, WORDS)
    close(found.patched, torch.cat([row.patched for row in each], 1).repeat(1, 35))
    with pytest.raises(ConfigError, match="padding in some rows"):
        patch_activations(*sides, places, 1, WORDS)


def test_grouped_heads_are_patched(llama_tokenizer):
    base = load_model(tiny_of("LlamaForCausalLM"), llama_tokenizer)
    tuned, tokens = copy.deepcopy(base), random_tokens()
    with torch.no_grad():
        tuned.blocks[2].attn.W_O[1] *= 1.5
    places = {"o": part_places(base)["L2H1"], "k": PatchPlace("blocks.2.attn.hook_k", 1)}
    found = patch_activations(Side(base, tokens), Side(tuned, tokens), places, POS, WORDS)
    close(found.patched, torch.stack([found.end, found.start]))


def test_direct_paths_add_the_change_to_the_last_residual(sides, reviews):
    caches = [side.model.run_with_cache(reviews)[1] for side in sides]
    for layer in (0, 1):
        sender = PatchPlace(f"blocks.{layer}.hook_mlp_out")
        direct = patch_path(*sides, sender, [LAST], POS, WORDS)
        moved = caches[1][sender.site] - caches[0][sender.site]
        base = sides[0].model
        by_hand = base.unembed(base.ln_final(caches[0][LAST.site] + moved))
        close(direct.patched[0], difference(by_hand))
        close(direct.end, difference(sides[1].model(reviews)))


def test_paths_lead_through_later_components_only(sides):
    sender = PatchPlace("blocks.0.hook_mlp_out")
    everything = [LAST, *(PatchPlace(f"blocks.1.hook_{x}_out") for x in ("attn", "mlp"))]
    whole = patch_activations(*sides, {"mlp": sender}, POS, WORDS)
    free = patch_path(*sides, sender, everything, POS, WORDS)
    torch.testing.assert_close(free.patched[0], whole.patched[0], atol=1e-4, rtol=0)
    for layer, least in ((0, 0.0), (1, 1e-4)):
        head = PatchPlace(f"blocks.{layer}.hook_attn_out", 2)
        found = patch_path(*sides, sender, [head], POS, WORDS)
        moved = (found.patched[0] - found.start).abs().max()
        assert moved > least if layer else moved == 0


def test_models_words_and_places_have_shorter_forms(sides):
    policies = [TransformerWithValueHead(side.model) for side in sides]
    of_policy = [Side(x, side.tokens) for x, side in zip(policies, sides, strict=True)]
    at = "blocks.0.hook_mlp_out"
    ids = [sides[0].model.to_single_token(x) for x in ("loved", "hated")]
    places = {"mlp": PatchPlace(at), "last": PatchPlace(at, None, (-1,))}
    long = patch_activations(*sides, places, -1, tuple(ids))
    places = {"mlp": at, "last": PatchPlace(at, positions=-1)}
    short = patch_activations(*of_policy, places, -1, ("loved", "hated"))
    assert torch.equal(short.patched, long.patched) and not torch.equal(*short.patched)


def test_patching_raises_on_invalid_places_and_texts(sides, base, reviews, llama_tokenizer):
    for place, error in (
        (PatchPlace("blocks.9.hook_mlp_out"), "does not have"),
        (PatchPlace("blocks.0.hook_mlp_out", 1), "has no heads"),
        (PatchPlace("blocks.0.attn.hook_z", 4), "from 0 to 3"),
    ):
        with pytest.raises(ConfigError, match=error):
            patch_activations(*sides, {"x": place}, POS, WORDS)
    with pytest.raises(ConfigError, match="match token by token"):
        patch_activations(sides[0], Side(base, reviews[:, 1:]), {}, POS, WORDS)
    with pytest.raises(ConfigError, match="through is empty"):
        patch_path(*sides, LAST, [], POS, WORDS)
    with pytest.raises(ConfigError, match="do not add up"):
        part_places(load_model(tiny_of("Olmo2ForCausalLM"), llama_tokenizer))
