"""The update of UloRL as pure tensor functions: no I/O, no Megatron, no distribution.

Everything works on the flat token layout: T response tokens of N samples, tokens of a sample in order,
`sample_index[t]` the sample of token t. float32 or float64; results keep the dtype of their inputs.
"""

from ulorl_megatron.algorithm.advantages import group_advantages
from ulorl_megatron.algorithm.importance import importance_ratio
from ulorl_megatron.algorithm.loss import policy_loss
from ulorl_megatron.algorithm.mastery import mastered_positive_mask
from ulorl_megatron.algorithm.overlong import overlong_penalty

__all__ = ["group_advantages", "importance_ratio", "mastered_positive_mask", "overlong_penalty", "policy_loss"]
