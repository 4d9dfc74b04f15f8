"""Checks that bind what a record stores to something computed another way, probe by probe."""

from rlhf_lab.probes.bindings.attention_drift import bind_attention_drift
from rlhf_lab.probes.bindings.direction import bind_direction
from rlhf_lab.probes.bindings.frozen_probe import bind_frozen_probe
from rlhf_lab.probes.bindings.hack_watch import bind_hack_watch
from rlhf_lab.probes.bindings.kl_attribution import bind_kl_attribution
from rlhf_lab.probes.bindings.kl_by_position import bind_kl_by_position
from rlhf_lab.probes.bindings.logit_shift import bind_logit_shift
from rlhf_lab.probes.bindings.neuron_rank import bind_neuron_rank
from rlhf_lab.probes.bindings.run_health import bind_run_health
from rlhf_lab.probes.bindings.step_ledger import bind_step_ledger
from rlhf_lab.probes.bindings.text_heatmap import bind_text_heatmap
from rlhf_lab.probes.bindings.value_attribution import bind_value_attribution
from rlhf_lab.probes.bindings.value_lens import bind_value_lens
from rlhf_lab.probes.bindings.weight_delta import bind_weight_delta

__all__ = [
    "bind_attention_drift",
    "bind_direction",
    "bind_frozen_probe",
    "bind_hack_watch",
    "bind_kl_attribution",
    "bind_kl_by_position",
    "bind_logit_shift",
    "bind_neuron_rank",
    "bind_run_health",
    "bind_step_ledger",
    "bind_text_heatmap",
    "bind_value_attribution",
    "bind_value_lens",
    "bind_weight_delta",
]
