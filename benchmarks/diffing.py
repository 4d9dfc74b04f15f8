"""Effects of components by seven methods of model diffing, over trained seeds, and their ranks.

The second part measures weight changes in the leading directions of their weights.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.sheet import Sheet
from rlhf_lab.cli_runner import run_program
from rlhf_lab.config import RLHFArgs
from rlhf_lab.console import print_line
from rlhf_lab.diffing import transplant
from rlhf_lab.diffing.effects import effects_of_parts, layer_groups
from rlhf_lab.diffing.groups import weights_of_both
from rlhf_lab.diffing.weights import as_matrix, leading_fraction
from rlhf_lab.functional import bootstrap_means
from rlhf_lab.models.hooked_model import HookedModel
from rlhf_lab.organism import true_reward
from rlhf_lab.probes import ReelTruth, Run
from rlhf_lab.training import RLHFTrainer

RESULTS = Path(__file__).parent / "results" / "diffing.jsonl"
PRINCIPAL = RESULTS.with_name("principal.jsonl")
WORDS, REVIEWS, EVAL_SEED, SAMPLES = ("loved", "hated"), 64, 5, 128
K, DRAWS = 8, 20


def measure(runs: Path, seeds: int = 5) -> int:
    """Train the preset reel with each seed, unless the run exists, and store both parts.

    Args:
        runs: directory of the runs.
        seeds: number of seeds.
    """
    torch.set_num_threads(1)
    effects, shares = [], []
    for seed in range(1, seeds + 1):
        path = runs / f"seed{seed}"
        if not (path / "run.json").is_file():
            RLHFTrainer(RLHFArgs(preset="reel", seed=seed), out=path).train()
        run = Run(path)
        base, tuned = run.policy(0).base_model, run.policy("last").base_model
        kl = run.metrics()[-1]["kl_per_sequence"]
        effects.append({"seed": seed, "kl_per_sequence": kl, **measure_effects(base, tuned)})
        shares.append({"seed": seed, "shares": principal_shares(base, tuned, seed)})
    for path, rows in ((RESULTS, effects), (PRINCIPAL, shares)):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return show()


def measure_effects(base: HookedModel, tuned: HookedModel) -> dict[str, Any]:
    """Measure the effect of each component, with intervals over reviews or samples."""
    truth = ReelTruth()
    tokens, pos = truth.reviews(REVIEWS, EVAL_SEED)[0], truth.grammar.slot("VERB") - 1
    ids = tuple(base.tokenizer.encode(word, add_special_tokens=False)[0] for word in WORDS)
    found = effects_of_parts(base, tuned, tokens, pos, ids)
    intervals = {name: bootstrap_means(rows.T) for name, rows in found.items()}
    moved = transplant(base, tuned, layer_groups(base), true_reward, SAMPLES, seed=1)
    intervals |= {
        "true reward, put in": moved.put_in(),
        "true reward, taken out": moved.taken_out(),
        "true reward, Shapley": moved.shapley(),
    }
    effects = {n: torch.stack([x.value, x.low, x.high], 1).tolist() for n, x in intervals.items()}
    return {
        "parts": moved.groups,
        "n": SAMPLES,
        "reviews": REVIEWS,
        "true_reward_gain": moved.gain.mean().item(),
        "effects": {n: [[round(x, 5) for x in row] for row in of] for n, of in effects.items()},
    }


def principal_shares(
    base: HookedModel, tuned: HookedModel, seed: int
) -> dict[str, dict[str, float]]:
    """Measure the fraction of each change in leading directions, by random changes, and the top."""
    before, after = weights_of_both(base, tuned)
    generator = torch.Generator().manual_seed(seed)
    noise = lambda x: torch.randn(x.shape, generator=generator, dtype=torch.float64)
    found = {}
    for name, weight in before.items():
        weight, other = (as_matrix(name, x).double() for x in (weight, after[name]))
        if min(weight.shape) > 1:
            draws = [leading_fraction(other - weight, noise(weight), K) for _ in range(DRAWS)]
            share = leading_fraction(other - weight, weight, K)
            found[name] = share, K**2 / weight.numel(), max(draws)
    others = _head_factors(tuned)
    for name, old in _head_factors(base).items():
        new, product, draws = others[name], old[0] @ old[1], []
        for _ in range(DRAWS):  # Gaussian changes of both factors, as large as those of training
            change = [x / x.norm() for x in map(noise, old)]
            a, b = (x + d * (y - x).norm() for x, y, d in zip(old, new, change, strict=True))
            draws.append(leading_fraction(a @ b - product, product, K))
        share = leading_fraction(new[0] @ new[1] - product, product, K)
        found[name] = share, sum(draws) / DRAWS, max(draws)
    keys = ("share", "chance", "high")  # words: ok
    return {n: {k: round(x, 5) for k, x in zip(keys, of, strict=True)} for n, of in found.items()}


def _head_factors(model: HookedModel) -> dict[str, list[Tensor]]:
    """Return W_V, W_O and W_Q, W_K' of each head, in float64."""
    found = {}
    for layer, attn in enumerate(block.attn for block in model.blocks):
        for kind, pair in (("OV", (attn.W_V, attn.W_O)), ("QK", (attn.W_Q, attn.W_K.mT))):
            for head, factors in enumerate(zip(*pair, strict=True)):
                found[f"L{layer}H{head} {kind}"] = [x.detach().double() for x in factors]
    return found


def show() -> int:
    """Print the tables of the stored results."""
    for sheet in tables():
        print_line(sheet.markdown())
    return 0


def tables() -> list[Sheet]:
    """Make the tables: effects, Kendall's tau between methods, and leading directions."""
    rows, principal = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in (RESULTS, PRINCIPAL)
    )
    found = _parts_table(rows), _tau_table(rows), principal_table([r["shares"] for r in principal])
    return [Sheet(head, body, texts=len(head)) for head, *body in found]


def _values(rows: list[dict], method: str) -> Float[Tensor, "seed part"]:
    return torch.tensor([[part[0] for part in row["effects"][method]] for row in rows])


def _parts_table(rows: list[dict]) -> list[list[str]]:
    """Show the effect of each component by each method, and the components that are first."""
    parts = [name.replace("read-out", "unembedding") for name in rows[0]["parts"]]
    lines = [["method", *parts, "first, in seeds"]]
    for method in rows[0]["effects"]:
        values = _values(rows, method)
        cells = zip(values.mean(0), values.amin(0), values.amax(0), strict=True)
        first = Counter(parts[i] for i in values.argmax(1).tolist()).most_common()
        line = [f"{mean:+.2f} ({low:+.2f} to {high:+.2f})" for mean, low, high in cells]
        lines.append([method, *line, ", ".join(f"{name} {n}" for name, n in first)])
    return lines


def _tau_table(rows: list[dict]) -> list[list[str]]:
    """Show Kendall's tau of each two methods over the components, as means over seeds."""
    methods = list(rows[0]["effects"])
    pairs = torch.combinations(torch.arange(len(rows[0]["parts"])))
    signs = [_values(rows, name)[:, pairs].diff().sign() for name in methods]
    lines = [["", *methods[1:]]]
    for i, first in enumerate(methods[:-1]):
        taus = [(signs[i] * other).mean() for other in signs[i + 1 :]]
        lines.append([first, *[""] * i, *(f"{tau:+.2f}" for tau in taus)])
    return lines


def principal_table(rows: list[dict[str, dict[str, float]]]) -> list[list[str]]:
    """Show the fraction of each matrix, and of heads' products by layer, next to random changes."""
    groups: dict[str, list[str]] = {name: [name] for name in rows[0] if " " not in name}
    for name in rows[0]:
        if " " in name:
            groups.setdefault(f"{name[:2]} heads, {name[-2:]}", []).append(name)
    lines = [["weight", "fraction", "random change", "above all draws"]]
    for label, group in groups.items():
        every = [row[name] for row in rows for name in group]
        share = torch.tensor([x["share"] for x in every])
        chance = torch.tensor([x["chance"] for x in every])  # words: ok
        above = sum(x["share"] > x["high"] for x in every)
        ends = f"{share.mean():.3f} ({share.amin():.3f} to {share.amax():.3f})"
        lines.append([label, ends, f"{chance.mean():.3f}", f"{above} of {len(every)}"])
    return lines


if __name__ == "__main__":
    commands = {"measure": measure, "show": show}
    sys.exit(run_program(commands, "python -m benchmarks.diffing"))
