"""The maths of RLHF as pure, typed, differentiable, masked functions."""

from rlhf_lab.functional.advantages import *
from rlhf_lab.functional.aggregation import *
from rlhf_lab.functional.baselines import *
from rlhf_lab.functional.best_of_n import *
from rlhf_lab.functional.by_name import *
from rlhf_lab.functional.choices import *
from rlhf_lab.functional.diagnostics import *
from rlhf_lab.functional.direct_preference import *
from rlhf_lab.functional.diversity import *
from rlhf_lab.functional.entropy import *
from rlhf_lab.functional.gradient_noise import *
from rlhf_lab.functional.intervals import *
from rlhf_lab.functional.kl import *
from rlhf_lab.functional.logprobs import *
from rlhf_lab.functional.masks import *
from rlhf_lab.functional.moments import *
from rlhf_lab.functional.padding import *
from rlhf_lab.functional.permutation import *
from rlhf_lab.functional.policy_loss import *
from rlhf_lab.functional.preference import *
from rlhf_lab.functional.rewards import *
from rlhf_lab.functional.seeds import *
from rlhf_lab.functional.tilting import *
from rlhf_lab.functional.value_loss import *
