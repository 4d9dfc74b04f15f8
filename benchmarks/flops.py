"""Lower bound on the time of a phase: its FLOPs at the measured speed of this machine."""

from time import perf_counter

import torch

from benchmarks.work import Shape, Work
from benchmarks.worker import synchronize
from rlhf_lab.models.cpu_tuning import current_route, set_route, tune_cpu

MEASUREMENTS = 3


def phase_flops(work: Work) -> dict[str, int]:
    """Floating-point operations of a phase's matrix products, by what they are for.

    1. sampling: the prompt once, since all rows share it; then each row's tokens one at a time,
       with cached keys and values. The last token is never run.
    2. reference: one forward over the finished sequences.
    3. learning: per pass one forward, and a backward of twice its size.

    A product of [m, k] with [k, n] counts 2 m k n. Causal attention counts only what is looked at.
    Logits and values count only at the states before generated tokens.
    """
    shape, batch = work.size, work.batch_size
    prefix, seq = work.prefix_len, work.prefix_len + work.gen_len - 1
    readout = logit_flops(shape) + value_flops(shape)
    prompt = trunk_flops(shape, prefix)
    rest = trunk_flops(shape, seq) - prompt
    states = 1 + batch * (work.gen_len - 1)
    forward = trunk_flops(shape, seq) + work.gen_len * readout
    return {
        "sampling": prompt + batch * rest + states * readout,
        "reference": batch * (trunk_flops(shape, seq) + work.gen_len * logit_flops(shape)),
        "learning": 3 * work.passes * batch * forward,
    }


def trunk_flops(shape: Shape, n: int) -> int:
    """All blocks over the first n tokens of one sequence.

    Per block and token 24 d_model^2: queries, keys, values and output 8, the MLP 16. Attention from
    token t looks at t tokens, for scores and for the mix: 4 t d_model, 2 n (n + 1) d_model in all.
    """
    d = shape.d_model
    return shape.n_layers * (24 * d * d * n + 2 * n * (n + 1) * d)


def logit_flops(shape: Shape) -> int:
    """The unembedding of one state."""
    return 2 * shape.d_model * shape.d_vocab


def value_flops(shape: Shape) -> int:
    """The value head at one state: d_model to 4 d_model to 1."""
    return 8 * shape.d_model**2 + 8 * shape.d_model


def floor_seconds(work: Work) -> dict[str, float]:
    """What the arithmetic alone takes here: each part's operations over the measured rate.

    Sampling goes at the rate of products with `batch` rows, the rest at that of a minibatch's, all
    with as many threads as a contestant has, and by the route that this package takes.
    """
    flops = phase_flops(work)
    seq = work.prefix_len + work.gen_len - 1
    threads, route = torch.get_num_threads(), current_route()
    torch.set_num_threads(work.threads)
    if work.device == "cpu":
        tune_cpu(work.size.d_model)
    try:
        narrow = product_rate(work, work.batch_size)
        wide = product_rate(work, work.minibatch_size * seq)
    finally:
        torch.set_num_threads(threads)
        set_route(route)
    rates = {"sampling": narrow, "reference": wide, "learning": wide}
    return {part: flops[part] / rates[part] for part in flops}


@torch.no_grad()
def product_rate(work: Work, rows: int) -> float:
    """Operations per second of a forward's matrix products with this many rows, the best of 3.

    Every block has weights of its own, so that they come from where a model's come from.
    """
    shape, d = work.size, work.size.d_model
    dtype = torch.bfloat16 if work.precision == "bf16" else torch.float32
    block = ((d, 3 * d), (d, d), (d, 4 * d), (4 * d, d))
    sizes = [*(block * shape.n_layers), (d, shape.d_vocab)]
    place = {"device": work.device, "dtype": dtype}
    weights = [torch.randn(size, **place) for size in sizes]
    inputs = {k: torch.randn(rows, k, **place) for k in (d, 4 * d)}
    seconds = []
    for _ in range(1 + MEASUREMENTS):
        synchronize(torch.device(work.device))
        began = perf_counter()
        for weight in weights:
            inputs[weight.shape[0]] @ weight
        synchronize(torch.device(work.device))
        seconds.append(perf_counter() - began)
    return sum(2 * rows * k * n for k, n in sizes) / min(seconds[1:])
