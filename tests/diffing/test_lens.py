"""The logit lens by hand, and at the last residual, where it is the model."""

import torch

from rlhf_lab.course.exercises.toys import toy_transformer
from rlhf_lab.diffing import logit_lens
from rlhf_lab.models import TransformerWithValueHead


def test_the_lens_of_the_last_residual_is_what_the_model_says(base, reviews):
    logits, cache = base.run_with_cache(reviews)
    found = logit_lens(TransformerWithValueHead(base), cache["blocks.1.hook_resid_post"])
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
