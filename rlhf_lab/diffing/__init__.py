"""Model diffing: two models side by side, and which of their weights makes which difference."""

from rlhf_lab.diffing.activation_store import ActivationStore, collect_activations
from rlhf_lab.diffing.attention import AttentionSplit, HeadCache, attention_split
from rlhf_lab.diffing.compare import Comparison, compare
from rlhf_lab.diffing.contrast import Contrast, make_contrast
from rlhf_lab.diffing.crosscoder import Crosscoder, fit_crosscoder, latent_scaling
from rlhf_lab.diffing.groups import Groups, coarse_groups, fine_groups, restrict
from rlhf_lab.diffing.heads import ablate_heads, patch_heads
from rlhf_lab.diffing.kl_attribution import kl_by_output, kl_by_weights
from rlhf_lab.diffing.lens import logit_lens
from rlhf_lab.diffing.logit_shift import split_shift
from rlhf_lab.diffing.patching import (
    Patched,
    PatchPlace,
    Side,
    part_places,
    patch_activations,
    patch_hook,
)
from rlhf_lab.diffing.path_patching import patch_path
from rlhf_lab.diffing.sae import load_sae
from rlhf_lab.diffing.steering import (
    Steered,
    control_vector,
    mean_difference,
    steering_sweep,
)
from rlhf_lab.diffing.transplant import Transplant, transplant
from rlhf_lab.diffing.weight_line import WeightLine, shift_by_weights
from rlhf_lab.diffing.weights import graft, graft_groups, path, truncate, truncate_delta
