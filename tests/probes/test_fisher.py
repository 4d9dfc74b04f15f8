"""Fisher: KLs of models that are moved by a block's name."""

import pytest
import torch

from rlhf_lab.diffing.groups import coarse_groups, restrict
from rlhf_lab.functional import kl_per_token
from rlhf_lab.models import effective_weights, merged_copy
from rlhf_lab.probes import Fisher
from rlhf_lab.probes.text_rows import text_rows
from rlhf_lab.views.probe_pictures import probe_html
from tests.probes.looking import Trained, row_alone, sound

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_type_checks")]


def probe_of(kind: str) -> Fisher:
    return Fisher(n=6, text="rollout" if kind == "padded" else "eval")


@torch.no_grad()
def check(kind: str, run: Trained) -> None:
    """Compare KLs of two texts with those of a moved copy, and forms with second differences."""
    probe = probe_of(kind)
    record = sound(run, probe)
    values, stored = record.values, record.tensors
    first, *_, last = values["ratio"]
    assert abs(first - 1) < abs(last - 1)
    models, rows = (
        (run.ctx.reference, run.ctx.policy.base_model),
        text_rows(run.seen(), probe.text, 6),
    )
    base, moved = (merged_copy(models[0]).to(torch.float64, print_details=False) for _ in "12")
    before, after = ({n: w.double() for n, w in effective_weights(m).items()} for m in models)
    whole = {name: after[name] - before[name] for name in before}

    def kl(change: dict[str, torch.Tensor], share: float) -> torch.Tensor:
        for name, weight in moved.named_parameters():
            weight.copy_(before[name] + share * change.get(name, 0.0))
        found = []
        for tokens, states in (row_alone(rows, row) for row in (0, 1)):
            logs = (model(tokens)[0].log_softmax(-1) for model in (moved, base))
            found.append(kl_per_token(*logs)[states].sum())
        return torch.stack(found).float()

    groups = coarse_groups(models[0])
    for name, quad, exact in zip(values["groups"], stored["quad"], stored["kl"], strict=True):
        change = restrict(whole, groups, name)
        torch.testing.assert_close(exact[:2], kl(change, 1.0), atol=1e-7, rtol=1e-3)
        size = 1e-3 / max(1.0, quad.mean().item() ** 0.5)
        second = (kl(change, size) + kl(change, -size)) / 2 / size**2
        torch.testing.assert_close(quad[:2], second, atol=1e-6, rtol=0.02)
    for share, found in zip(values["a"], stored["kl_at"], strict=True):
        torch.testing.assert_close(found[:2], kl(whole, share), atol=1e-9, rtol=1e-3)


@pytest.mark.parametrize("kind", ["adapted", "padded", "grouped"])
def test_kls_are_those_of_moved_copies(kind, trained_runs):
    check(kind, trained_runs(kind))


def test_a_run_with_it_ends_with_the_same_weights_and_is_drawn(run_with_and_without):
    run = run_with_and_without(Fisher(every=1), reviews=6, total_phases=1, warmup_steps=0)
    assert run.records("fisher")[0]["ratio"] == [None] * 5
    assert probe_html(run, "fisher").count("<figure") == 2
