"""Test of StepInfluence on Reel: rows of samples next to whole steps that are redone without them.

`python -m benchmarks.step_influence --seeds 1 2 3` prints tables by seed and step.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.sheet import Sheet
from rlhf_lab.cli_runner import run_program
from rlhf_lab.config import RLHFArgs
from rlhf_lab.probes import ReelTruth, Run, StepInfluence, attach
from rlhf_lab.probes.probe import Observation, Record
from rlhf_lab.probes.step_influence import ByWeight, adam_step, inner
from rlhf_lab.probes.step_ledger import make_shares
from rlhf_lab.training import RLHFTrainer

STEPS = ((0, "first"), (3, "last"), (10, "first"))
LENGTHS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


class StepRedone(StepInfluence):
    """StepInfluence of one phase, with each sample's effect on the whole step next to its rows."""

    def __init__(self, phase: int, step: str, pos: int) -> None:
        super().__init__(pos=pos, step=step, every=1, name=f"phase_{phase}_{step}")
        self.phase = phase

    def prepare(self, seen: Observation) -> object:
        """Prepare nothing in other phases, which then have no record."""
        return super().prepare(seen) if seen.ctx.phase == self.phase else None

    def observe(self, seen: Observation) -> Record:
        """Redo the step also without each sample, and at other lengths."""
        record, before, target = super().observe(seen), seen.prepared, self.target_of(seen)
        ctx, limit = seen.ctx, seen.args.max_grad_norm
        shares = make_shares(ctx.policy, ctx.reference, ctx.minibatch, seen.args, ctx.kl_coef)
        whole = adam_step(*before, limit)

        def moved(step: ByWeight, length: float = 1.0) -> float:
            at = {n: x.double() + length * step[n] for n, x in before.params.items()}
            with torch.no_grad():
                return target(at).item()

        end, without, plain = moved(whole.delta), [], []
        slope = _slopes(lambda w: target({n: x.double() for n, x in w.items()}), before.params)
        for row in range(len(ctx.minibatch.mask)):
            slopes = _slopes(lambda w, row=row: shares(w)[:, row].sum(), before.params)
            less = {n: g - slopes[n] for n, g in before.grads.items()}
            redone = adam_step(*before._replace(grads=less), limit)
            without.append(end - moved(redone.delta))
            plain.append(inner(slope, slopes))
        start, linear = record.values["f_before"], record.values["linear"]
        changes = [moved(whole.delta, length) - start for length in LENGTHS]
        beyond = [
            (change - length * linear) / change
            for change, length in zip(changes, LENGTHS, strict=True)
        ]
        tensors = {"without": torch.tensor(without), "plain": torch.tensor(plain)}
        return replace(
            record, values=record.values | {"beyond": beyond}, tensors=record.tensors | tensors
        )


def _slopes(function: Callable[[ByWeight], Tensor], params: ByWeight) -> dict[str, Tensor]:
    leaves = {n: x.clone().requires_grad_() for n, x in params.items()}
    with torch.enable_grad():
        found = torch.autograd.grad(function(leaves), list(leaves.values()), allow_unused=True)
    named = zip(leaves.items(), found, strict=True)
    return {n: torch.zeros_like(x) if slope is None else slope for (n, x), slope in named}


def correlation(
    found: Float[Tensor, " sample"], truth: Float[Tensor, " sample"]
) -> tuple[float, float]:
    """Return Pearson's correlation, and the slope of the effects by the estimates."""
    x, y = (v.double() - v.double().mean() for v in (found, truth))
    return (x @ y / (x.norm() * y.norm())).item(), (x @ y / (x @ x)).item()


def table_rows(run: Run, seed: int) -> tuple[list[list[str]], list[list[str]]]:
    """Return a row of each of the two tables for every step."""
    agreement, remainders = [], []
    for phase, step in STEPS:
        name = f"phase_{phase}_{step}"
        (record,), found = run.records(name), run.tensors(name, phase)
        where = [str(seed), f"phase {phase}, step {record['step']}"]
        estimates = found["rows"].sum((0, 2)), found["counterfactual"], found["plain"]
        rows, redone, plain = (correlation(x, found["without"]) for x in estimates)
        sums = [found[part].sum().item() for part in ("rows", "momentum", "decay")]
        cells = [f"{r:.4f}, {slope:.2f}" for r, slope in (rows, redone)] + [f"{plain[0]:.3f}"]
        parts = " / ".join(f"{x:+.5f}" if abs(x) > 1e-5 else f"{x:+.0e}" for x in sums)
        agreement.append([*where, *cells, parts])
        remainders.append([*where, *(f"{100 * x:+.2f}" for x in record["beyond"])])
    return agreement, remainders


def measure(seeds: tuple[int, ...] = (1, 2, 3)) -> int:
    """Train a run per seed and print tables by seed and step."""
    truth, tables, failed = ReelTruth(), ([], []), 0
    tokens, _ = truth.reviews(64, seed=5)
    pos = truth.grammar.slot("VERB") - 1
    for seed in seeds:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            trainer = RLHFTrainer(RLHFArgs(preset="reel", seed=seed), out=f"{directory}/run")
            probes = [StepRedone(phase, step, pos) for phase, step in STEPS]
            attach(trainer, *probes, eval_tokens=tokens)
            for report in trainer:
                if report.phase == STEPS[-1][0]:
                    break
            run = Run(trainer.run.path)
            failed += sum(not check.ok for check in run.checks())
            for table, lines in zip(tables, table_rows(run, seed), strict=True):
                table.extend(lines)
    columns = ("rows: correlation, slope", "counterfactual", "plain", "tokens / momentum / decay")
    for head, body in zip((columns, [f"x {x:g}" for x in LENGTHS]), tables, strict=True):
        print(Sheet(["seed", "step", *head], body, texts=6).markdown())
    print(f"{failed} checks failed")
    return 0


if __name__ == "__main__":
    sys.exit(run_program(measure, "python -m benchmarks.step_influence"))
