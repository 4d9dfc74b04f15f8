"""Crosscoder: one sparse dictionary for two models by BatchTopK, and measures of its latents."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rlhf_lab.diffing.activation_store import ActivationStore
from rlhf_lab.errors import ConfigError
from rlhf_lab.supervised import fit

DEAD_AFTER = 60  # batches without a firing
AUX_WEIGHT, LEARNING_RATE = 1 / 32, 5e-3
RIDGE = 1e-3  # of the whitening, in units of the mean variance
ROWS = 4096  # tokens that are encoded at once


class Crosscoder(nn.Module):
    """Latents that read the activations of several models, with a decoder for each model.

    Each model's activations are divided by their rms (`scale`). Latents with a score
    f (|d_base| + |d_tuned|) above the threshold are kept; see `fit_crosscoder`.

    f = relu(sum_m x_m W_enc_m + b_enc);  x_hat_m = b_dec_m + f W_dec_m
    (Lindsey et al. 2024; BatchTopK: Bussmann et al. 2024, arXiv 2412.06410, and Minder et al. 2025,
    arXiv 2504.02922)
    """

    def __init__(self, scale: Float[Tensor, " model"], d_model: int, latents: int) -> None:
        super().__init__()
        n = len(scale)
        self.W_enc = nn.Parameter(torch.zeros(n, d_model, latents))
        self.b_enc = nn.Parameter(torch.zeros(latents))
        self.W_dec = nn.Parameter(torch.zeros(latents, n, d_model))
        self.b_dec = nn.Parameter(torch.zeros(n, d_model))
        self.register_buffer("scale", scale.float())
        self.register_buffer("threshold", torch.zeros(()))

    def normalized(self, x: Float[Tensor, "n model d_model"]) -> Float[Tensor, "n model d_model"]:
        """Return activations in units of each model's rms."""
        return x.float() / self.scale[:, None]

    def norms(self) -> Float[Tensor, "latent model"]:
        """Return the length of each decoder, which is 0 for a model that lacks the latent."""
        return self.W_dec.norm(dim=-1)

    def encode(self, x: Float[Tensor, "n model d_model"]) -> Float[Tensor, "n latent"]:
        """Return the latents of the models' activations, each token separately."""
        read = (self.normalized(x) - self.b_dec).flatten(1) @ self.W_enc.flatten(0, 1)
        f = (read + self.b_enc).relu()
        return f * (f * self.norms().sum(1) > self.threshold)

    def decode(self, f: Float[Tensor, "n latent"]) -> Float[Tensor, "n model d_model"]:
        """Return activations in the models' own units."""
        return (torch.einsum("nl,lmd->nmd", f, self.W_dec) + self.b_dec) * self.scale[:, None]


def fit_crosscoder(
    store: ActivationStore,
    latents: int,
    k: int,
    steps: int,
    seed: int,
    batch_size: int = 1024,
    show_progress: bool = True,
) -> Crosscoder:
    """Fit a crosscoder to a store of two models at one site.

    1. Start with random decoders, equal in both models and to the encoders. Encoders are learned in
       whitened coordinates, where a small difference of the models is as large as the common part.
    2. In each step, draw tokens, keep the k n largest scores, and minimize the squared error in
       units of the variance. Latents that have not fired for 60 batches are fitted to the remaining
       error (auxiliary loss; Gao et al. 2024, arXiv 2406.04093).

    Raises:
        ConfigError: If the store is empty, or all activations of a model are 0.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = store.activations
    scale = rows.double().square().mean((0, 2)).sqrt()
    if not (scale > 0).all():
        raise ConfigError(f"No tokens, or only zeros of {store.models[int(scale.argmin())]!r}.")
    coder = Crosscoder(scale, rows.shape[-1], latents)
    whiten, variance = _initialize(coder, rows, generator)
    idle, kept = torch.zeros(latents), []

    def batch_loss() -> Float[Tensor, ""]:
        x = coder.normalized(rows[torch.randint(len(rows), (batch_size,), generator=generator)])
        read = (x - coder.b_dec).flatten(1) @ whiten @ coder.W_enc.flatten(0, 1)
        f = (read + coder.b_enc).relu()
        score = (f * coder.norms().sum(1)).detach()
        least = score.flatten().topk(k * len(x)).values[-1]
        fired = f * (score >= least.clamp(min=1e-12))
        kept.append(least)
        idle.add_(1).masked_fill_((fired > 0).any(0), 0)
        left = x - torch.einsum("nl,lmd->nmd", fired, coder.W_dec) - coder.b_dec
        loss, dead = left.square().sum((1, 2)).mean() / variance, idle >= DEAD_AFTER
        if dead.any():
            best, rest = f[:, dead].topk(min(2 * k, int(dead.sum()))), left.detach()
            out = torch.einsum("nl,nlmd->nmd", best.values, coder.W_dec[dead][best.indices])
            unexplained = (out - rest).square().sum() / rest.square().sum().clamp(min=1e-12)
            loss = loss + AUX_WEIGHT * unexplained
        return loss

    fit(coder, batch_loss, steps, LEARNING_RATE, "crosscoder", show_progress)
    coder.W_enc.data = (whiten @ coder.W_enc.data.flatten(0, 1)).view_as(coder.W_enc)
    coder.threshold.copy_(torch.stack(kept[-max(1, steps // 5) :]).mean())
    return coder.requires_grad_(False)


@torch.no_grad()
def _initialize(
    coder: Crosscoder, rows: Float[Tensor, "n model d_model"], generator: torch.Generator
) -> tuple[Float[Tensor, "both both"], float]:
    x = coder.normalized(rows)
    coder.b_dec.copy_(x.mean(0))
    centered = (x - coder.b_dec).flatten(1).double()
    values, vectors = torch.linalg.eigh(centered.T @ centered / len(x))
    mean = values.mean().clamp(min=1e-12)
    directions = torch.randn(coder.W_dec.shape[0], 1, x.shape[-1], generator=generator)
    coder.W_dec.copy_(directions.div(directions.norm(dim=-1, keepdim=True)).expand_as(coder.W_dec))
    coder.W_enc.copy_(coder.W_dec.permute(1, 2, 0) / len(coder.scale))
    scaled = vectors * (mean / (values.clamp(min=0) + RIDGE * mean)).sqrt()
    return (scaled @ vectors.T).float(), float(values.sum())


@torch.no_grad()
def latent_scaling(coder: Crosscoder, store: ActivationStore) -> Float[Tensor, "latent model"]:
    """Measure the presence of each latent in each model, along its decoder of the second model.

    A model's error plus the latent's own output is regressed on the latent's output in the *second*
    model. Latents of both models without a decoder in the first get close betas.

    beta_m = sum_t f_t <d_tuned, eps_tm + f_t d_m> / (sum_t f_t^2 |d_tuned|^2)
    (Minder et al. 2025, arXiv 2504.02922, section 3)
    """
    left = torch.zeros(len(coder.b_enc), len(coder.scale), dtype=torch.float64)
    squares = torch.zeros(len(coder.b_enc), dtype=torch.float64)
    tuned = coder.W_dec[:, 1].double()
    for rows in store.activations.split(ROWS):
        f = coder.encode(rows)
        error = (coder.normalized(rows) - coder.decode(f) / coder.scale[:, None]).double()
        left += torch.einsum("nl,nmd,ld->lm", f.double(), error, tuned)
        squares += f.double().square().sum(0)
    left += squares[:, None] * torch.einsum("lmd,ld->lm", coder.W_dec.double(), tuned)
    sizes = (squares * tuned.square().sum(1))[:, None]
    return torch.where(sizes > 0, left / sizes, 0.0).float()
