"""The logit lens by hand, and at the last residual, where it is the model."""

import torch

from rlhf_lab.course.exercises.toys import toy_transformer
from rlhf_lab.diffing import lens_divergence, logit_lens


def test_the_lens_of_the_last_residual_is_what_the_model_says(base, reviews):
    logits, cache = base.run_with_cache(reviews)
    found = logit_lens(base, cache["blocks.1.hook_resid_post"])
    torch.testing.assert_close(found, logits.log_softmax(-1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_lens_by_hand():
    """The norm makes 1 and -1 of entries 3 and -3 by turns; gain and bias make 2 and 0 of the first
    two, and of the others 0.

    W_U writes the first entry to word 0, the second to word 1, to which b_U gives log 2: beside 1
    for each of the nine other words, word 0 has e^2 = 7.389056, and word 1 has 2.
    """
    model = toy_transformer()
    model.ln_final.w.copy_(torch.tensor([2.0, 1, 0, 0, 0, 0, 0, 0]))
    model.ln_final.b.copy_(torch.tensor([0.0, 1, 0, 0, 0, 0, 0, 0]))
    for weight in (model.unembed.W_U, model.unembed.b_U):
        weight.zero_()
    model.unembed.W_U[0, 0] = model.unembed.W_U[1, 1] = 1.0
    model.unembed.b_U[1] = 0.6931472
    found = logit_lens(model, torch.tensor([3.0, -3.0]).repeat(4)).exp()
    expected = torch.tensor([7.389056, 2.0] + [1.0] * 9) / 18.389056
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_residuals_of_any_shape_are_read_one_by_one(base):
    residual = torch.randn(2, 3, 4, 64, generator=torch.Generator().manual_seed(0))
    found = logit_lens(base, residual)
    assert found.shape == (2, 3, 4, base.cfg.d_vocab)
    torch.testing.assert_close(logit_lens(base, residual[1, 2, 3]), found[1, 2, 3])


@torch.no_grad()
def test_divergence_by_hand():
    """Both models are all zeros, but for their b_U: one gives word 0 ten times the weight of the
    other ten, the other gives each of the eleven the same: 1/2 log(11/2) + 10/20 log(11/20).
    """
    models = [toy_transformer(), toy_transformer()]
    for model in models:
        for weight in model.parameters():
            weight.zero_()
    models[0].unembed.b_U[0] = 2.3025851
    states = torch.tensor([[True, False, True]])
    found = lens_divergence(*models, torch.randn(2, 1, 3, 8), torch.randn(2, 1, 3, 8), states)
    expected = torch.tensor([[[0.5534566, 0.0, 0.5534566]]] * 2)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
