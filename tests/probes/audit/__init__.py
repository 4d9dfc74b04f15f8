"""Audit of probe records: recompute stored numbers by an independent path, in tests only.

`install` adds `bind(seen, record)` to every probe class and appends the checks that `bind` returns
to the record of each attached probe.
"""

from dataclasses import replace

import pytest

from rlhf_lab import probes
from rlhf_lab.probes.attachment import Attachment
from rlhf_lab.probes.probe import Probe
from tests.probes.audit.kl_by_position import bind_kl_by_position
from tests.probes.audit.logit_shift import bind_logit_shift
from tests.probes.audit.run_health import bind_run_health
from tests.probes.audit.text_heatmap import bind_text_heatmap

AUDITS = {
    probes.KLByPosition: lambda p, s, r: bind_kl_by_position(s, r, p.n),
    probes.LogitShift: lambda p, s, r: bind_logit_shift(s, r, (p.word, p.other), p.pos),
    probes.RunHealth: lambda p, s, r: bind_run_health(s, r),
    probes.TextHeatmap: lambda p, s, r: bind_text_heatmap(s, r),
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
