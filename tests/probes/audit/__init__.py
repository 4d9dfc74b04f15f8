"""Audit of probe records: recompute stored numbers by an independent path, in tests only.

`install` adds `bind(seen, record)` to every probe class and appends the checks that `bind` returns
to the record of each attached probe.
"""

from dataclasses import replace

import pytest

from rlhf_lab import probes
from rlhf_lab.probes.attachment import Attachment
from rlhf_lab.probes.probe import Probe
from rlhf_lab.probes.text_rows import text_rows
from tests.probes.audit.component_transplant import bind_component_transplant
from tests.probes.audit.direction import bind_direction
from tests.probes.audit.frozen_probe import bind_frozen_probe
from tests.probes.audit.grad_terms import bind_grad_terms
from tests.probes.audit.kl_by_position import bind_kl_by_position
from tests.probes.audit.logit_shift import bind_logit_shift
from tests.probes.audit.run_health import bind_run_health
from tests.probes.audit.step_influence import bind_step_influence
from tests.probes.audit.step_ledger import bind_step_ledger
from tests.probes.audit.text_heatmap import bind_text_heatmap
from tests.probes.audit.value_attribution import bind_value_attribution
from tests.probes.audit.value_lens import bind_value_lens
from tests.probes.audit.weight_delta import bind_weight_delta


def audit_value_lens(probe, seen, record):
    reward = seen.truth.reward if probe.reward is None and seen.truth else probe.reward
    return bind_value_lens(seen, record, probe._states(seen), probe.text == "eval", reward)


def audit_weight_delta(probe, seen, record):
    ids = None
    if probe.words is not None:
        encode = seen.ctx.reference.tokenizer.encode
        ids = tuple(encode(word, add_special_tokens=False)[0] for word in probe.words)
    return bind_weight_delta(seen, record, ids)


def _rows(probe, seen):
    return text_rows(seen, probe.text, probe.n)


AUDITS = {
    probes.ComponentTransplant: lambda p, s, r: bind_component_transplant(s, r),
    probes.Direction: lambda p, s, r: bind_direction(s, r, p.method),
    probes.FrozenProbe: lambda p, s, r: bind_frozen_probe(s, r),
    probes.GradTerms: lambda p, s, r: bind_grad_terms(s, r),
    probes.KLByPosition: lambda p, s, r: bind_kl_by_position(s, r, p.n),
    probes.LogitShift: lambda p, s, r: bind_logit_shift(s, r, (p.word, p.other), p.pos),
    probes.RunHealth: lambda p, s, r: bind_run_health(s, r),
    probes.StepInfluence: lambda p, s, r: bind_step_influence(s, r, p.target_of(s)),
    probes.StepLedger: lambda p, s, r: bind_step_ledger(s, r),
    probes.TextHeatmap: lambda p, s, r: bind_text_heatmap(s, r),
    probes.ValueAttribution: lambda p, s, r: bind_value_attribution(s, r),
    probes.ValueLens: audit_value_lens,
    probes.WeightDelta: audit_weight_delta,
}


def install(patch: pytest.MonkeyPatch) -> None:
    """Audit the records of all attached probes before they are stored, until `patch` is undone."""
    patch.setattr(Probe, "bind", lambda self, seen, record: [], raising=False)
    for kind, audit in AUDITS.items():
        patch.setattr(kind, "bind", audit, raising=False)
    plain = Attachment._observe

    def audited(self, probe, seen):
        record = plain(self, probe, seen)
        return replace(record, checks=[*record.checks, *probe.bind(seen, record)])

    patch.setattr(Attachment, "_observe", audited)
