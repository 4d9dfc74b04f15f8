"""The maths of RLHF as pure, typed, differentiable, masked functions."""

from rlhf_lab.functional.advantages import *
from rlhf_lab.functional.baselines import *
from rlhf_lab.functional.diagnostics import *
from rlhf_lab.functional.direct_preference import *
from rlhf_lab.functional.dispatch import *
from rlhf_lab.functional.diversity import *
from rlhf_lab.functional.intervals import *
from rlhf_lab.functional.kl import *
from rlhf_lab.functional.logprobs import *
from rlhf_lab.functional.masks import *
from rlhf_lab.functional.moments import *
from rlhf_lab.functional.paired import *
from rlhf_lab.functional.policy_loss import *
from rlhf_lab.functional.preference import *
from rlhf_lab.functional.rewards import *
from rlhf_lab.functional.tilting import *
