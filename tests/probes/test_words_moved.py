"""WordsMoved: injected changes of words, hand-computed parts, and sums that match fresh models."""

import copy

import pytest
import torch

from rlhf_lab.errors import RunError
from rlhf_lab.models import load_model
from rlhf_lab.probes import WordsMoved, attach, find_moved_words, parts_over_phases, shift_parts
from rlhf_lab.probes.moved_words import _listed
from rlhf_lab.probes.words_moved import spell_ids
from tests.probes.looking import Trained, sound, train_soundly, with_models
from tests.small_runs import DEVICE
from tests.transformer_lens_model import to_transformer_lens

pytestmark = pytest.mark.usefixtures("no_type_checks")


def make_won(*rows, noise=0.0, seed=0):
    """The same change in each group at each position, and noise that sums to 0 over words."""
    mean = torch.tensor(rows, dtype=torch.float64).expand(8, -1, -1)
    drawn = torch.randn(mean.shape, generator=torch.Generator().manual_seed(seed)).double()
    return mean + noise * (drawn - drawn.mean(-1, keepdim=True))


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_injected_contrasts_are_found_with_weights_and_mass(noise):
    """One pair of words at one position; two words against two at two others; nothing at a last."""
    rows = [0.2, -0.2, 0, 0, 0, 0], [0, 0, 0.3, 0.1, -0.3, -0.1], [0, 0, 0.06, 0.02, -0.06, -0.02]
    found = find_moved_words(make_won(*rows, [0.0] * 6, noise=noise))
    assert [x.positions for x in found] == [[1, 2], [0]]
    assert [x.mass.value.item() for x in found] == pytest.approx([0.48, 0.2], abs=0.02)
    group, pair = (x.weights.tolist() for x in found)
    assert group == pytest.approx([0, 0, 0.75, 0.25, -0.75, -0.25], abs=0.02)
    assert pair == pytest.approx([1, -1, 0, 0, 0, 0], abs=0.02)
    assert all(x.mass.low <= x.mass.value <= x.mass.high for x in found)


def test_noise_and_equal_models_have_no_contrast():
    assert find_moved_words(make_won([0.0] * 5)) == []
    found = [find_moved_words(make_won([0.0] * 40, noise=1e-3, seed=seed)) for seed in range(40)]
    assert sum(map(bool, found)) <= 6  # signs of the other groups make intervals a bit too narrow


def test_contrasts_are_ordered_by_the_lower_end():
    """The larger change has 0.6 and 0.2 in turn (0.40 +- 0.18), the other one 0.3 in all groups."""
    won = torch.zeros(8, 2, 4, dtype=torch.float64)
    won[::2, 0, 0], won[1::2, 0, 0], won[:, 1, 2] = 0.6, 0.2, 0.3
    won[:, :, 1::2] = -won[:, :, ::2]
    found = find_moved_words(won)
    assert [x.positions for x in found] == [[1], [0]]
    assert found[1].mass.value.item() == pytest.approx(0.4)
    assert found[1].mass.low.item() == pytest.approx(0.4 - 2.3646 * 0.2138 / 8**0.5, abs=1e-3)


def test_parts_match_hand_computed():
    """Two components in two dimensions, one group, one position, and words with weights 1, -1.

    q0 = (2, 0) - (0, 1) = (2, -1) and q1 = (3, 0) - (0, 1) = (3, -1): the components add 2 and -3,
    the unembedding <(4, 5), (1, 0)> and (0.5 - 0) - (0.1 - 0).
    """
    tensor = lambda *x: torch.tensor(x).float()
    tensors = {
        "moved": tensor([[[1.0, 0.0]]], [[[0.0, 3.0]]]),
        "stream": tensor([[4.0, 5.0]]),
        "columns": tensor([[2.0, 0.0], [0.0, 1.0]], [[3.0, 0.0], [0.0, 1.0]]),
        "constants": tensor([0.1, 0.0], [0.5, 0.0]),
    }
    found = shift_parts(tensors, torch.tensor([1.0, -1.0]).double())
    assert found.flatten().tolist() == pytest.approx([2, -3, 4.4])


@torch.no_grad()
def logit_shift(run: Trained, n: int, states: slice):
    """Shift of the logits of every word in fresh forward passes, and of their probabilities."""
    rows = run.ctx.rollout.samples.tokens[:n]
    models = run.ctx.reference, run.ctx.policy.base_model
    logits = [model(rows)[:, states].cpu().double() for model in models]
    probs = [(x / run.trainer.args.temperature).softmax(-1) for x in logits]
    return logits[1] - logits[0], probs[1] - probs[0]


@pytest.mark.slow
def test_parts_sum_to_the_shift_of_fresh_models(trained_runs):
    run = trained_runs("adapted")
    prefix = run.ctx.rollout.samples.prefix_len
    record = sound(run, WordsMoved(n=16, text="rollout"))
    stored, ids = record.tensors, record.values["ids"]
    kept = stored["won"].shape[1]
    shift, won = logit_shift(run, 16, slice(prefix - 1, prefix - 1 + kept))
    expected = [x[..., ids].unflatten(0, (8, 2)).mean(1).float() for x in (shift, won)]
    torch.testing.assert_close(stored["measured"], expected[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(stored["won"], expected[1], atol=1e-5, rtol=0)
    assert expected[0].abs().max() > 0.05
    parts = shift_parts(stored, torch.eye(len(ids)).double()).sum(0)
    torch.testing.assert_close(parts.mean(0).float(), expected[0].mean(0), atol=1e-3, rtol=0)
    assert record.values["slots"][0] == run.truth.slot_names(40)[prefix]
    assert record.values["n"] == 16 and stored["moved"].dtype == torch.float16


@pytest.mark.slow
@torch.no_grad()
def test_parts_match_transformer_lens(trained_runs):
    """Its decompose_resid and logit_attrs, which take gains as folded into the unembedding."""
    run, base = trained_runs("adapted"), load_model("reel-nano", device=DEVICE)
    base.ln_final.w.fill_(1.0)
    tuned, generator = copy.deepcopy(base), torch.Generator().manual_seed(0)
    for weight in tuned.blocks.parameters():
        weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=generator).to(DEVICE)
    record = WordsMoved(n=8, text="rollout").observe(with_models(run, base, tuned))
    ids = [record.values["words"].index(word) for word in ("was", "wasn't")]
    weights = torch.zeros(len(record.values["ids"])).double()
    weights[ids[0]], weights[ids[1]] = 1, -1
    parts = shift_parts(record.tensors, weights).mean(1)
    samples, expected = run.ctx.rollout.samples, []
    states = slice(samples.prefix_len - 1, samples.prefix_len - 1 + parts.shape[1])
    for model in (base, tuned):
        _, cache = to_transformer_lens(model).run_with_cache(samples.tokens[:8])
        stack, labels = cache.decompose_resid(return_labels=True)
        tokens = (record.values["ids"][i] for i in ids)
        expected.append(cache.logit_attrs(stack, *tokens)[:, :, states].mean(1))
    rows = dict(zip(record.values["components"], parts, strict=True))
    for label, row in zip(labels, expected[1] - expected[0], strict=True):
        layer, _, kind = label.partition("_")
        names = [label] if label.endswith("embed") else [f"L{layer} mlp"]
        if kind == "attn_out":
            names = [name for name in rows if name.startswith((f"L{layer}H", f"L{layer} b_O"))]
        found = sum(rows[name] for name in names)
        torch.testing.assert_close(found.float(), row.cpu(), atol=1e-3, rtol=0)
    assert parts[-1].abs().max() == 0 and parts.abs().max() > 0.2


def test_listed_words_have_nine_tenths_of_their_side():
    weights = torch.tensor([0.45, -1.0, 0.5, 0.05])
    assert _listed(1, weights, list("abcd")) == [("c", 0.5), ("a", 0.45)]


def test_tokens_with_one_text_are_distinguished():
    names = spell_ids(load_model("reel-nano"), [5, 7, 5])
    assert names == [". (token 5)", "it", ". (token 5)"]


@pytest.mark.slow
def test_texts_with_padding_and_other_architectures_are_pooled(trained_runs):
    """Means over all states of the texts of each group, and heads merged into layers."""
    run = trained_runs("grouped")
    record = sound(run, WordsMoved(n=8, text="rollout"))
    assert record.values["slots"] == ["all states"] and record.tensors["won"].shape[:2] == (8, 1)
    samples = run.ctx.rollout.samples
    shift, _ = logit_shift(run, 8, slice(samples.prefix_len - 1, -1))
    mask = samples.mask[:8, :, None].cpu().double()
    mean = ((shift * mask).sum(1) / mask.sum(1))[:, record.values["ids"]]
    torch.testing.assert_close(record.tensors["measured"][:, 0].double(), mean, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_run_splits_any_contrast_in_every_phase(make_trainer, reviews):
    trainer, tokens = make_trainer(base_lr=3e-3), reviews[0]
    attach(trainer, WordsMoved(n=8), eval_tokens=tokens, record="every")
    run = train_soundly(trainer)
    assert run.phases("words_moved") == [0, 1, 2]
    assert run.records("words_moved")[0]["contrasts"] == []
    words = {"was": 1.0, "wasn't": -1.0}
    found = parts_over_phases(run, words, "COP 1")
    column = run.records("words_moved")[0]["slots"].index("COP 1") + len(trainer.prompt) - 1
    model = trainer.policy.base_model
    ids = [model.to_single_token(w) for w in words]
    with torch.no_grad():
        now, before = (m(tokens[:8])[:, column, ids] for m in (model, trainer.reference))
    shift = (now - before).mean(0)
    assert found[0]["shift"].value == 0
    assert found[-1]["shift"].value.item() == pytest.approx((shift[0] - shift[1]).item(), abs=1e-3)
    for line in found:
        torch.testing.assert_close(
            sum(x.value for x in line["parts"].values()), line["shift"].value
        )
    first = run.records("words_moved")[-1]["contrasts"][0]
    whole = parts_over_phases(run)[-1]["shift"].value.item()
    assert whole == pytest.approx(first["shift"], rel=0.3)  # of the listed words only
    with pytest.raises(RunError, match="lacks a word of .*'nothing'"):
        parts_over_phases(run, {"nothing": 1.0})
