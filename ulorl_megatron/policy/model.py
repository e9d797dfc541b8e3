"""Architecture + configuration -> Megatron's TransformerConfig, layer specs and GPTModel chunks."""

from typing import List

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.config.layout import padded_vocab_size
from ulorl_megatron.config.schema import PolicyConfig, Recompute, TransformerImpl
from ulorl_megatron.errors import UserError
from ulorl_megatron.policy.attention import PackedCausalAttention
from ulorl_megatron.policy.platform import cuda_tensors, device


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm under sequence parallelism: its weight's gradient is summed over tensor-parallel ranks."""

    def __init__(self, *, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device())
        self.weight.sequence_parallel = config.sequence_parallel


def transformer_config(arch: Architecture, policy: PolicyConfig, dtype: torch.dtype) -> TransformerConfig:
    """Exactly Qwen3 or Qwen3-MoE, in policy.parallel's layout. Dropout and the router's auxiliary loss are off."""
    sizes = policy.parallel
    interleaved = sizes.virtual_pipeline > 1
    moe = {}
    if arch.num_experts:
        moe = dict(
            num_moe_experts=arch.num_experts,
            moe_ffn_hidden_size=arch.moe_intermediate_size,
            moe_router_topk=arch.experts_per_token,
            moe_router_score_function="softmax",
            # Softmax over the chosen experts only is softmax over all, renormalised: HF's norm_topk_prob.
            moe_router_pre_softmax=not arch.norm_topk_prob,
            moe_router_dtype="fp32",
            # HF's router_aux_loss_coef of 0.001 must not leak in (SkyRL#838).
            moe_router_load_balancing_type="none",
            moe_aux_loss_coeff=0.0,
            moe_grouped_gemm=policy.transformer_impl is TransformerImpl.te,
        )
    recompute = {}
    if policy.recompute is Recompute.full:
        recompute = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif policy.recompute is Recompute.selective:
        recompute = dict(recompute_granularity="selective")
    config = TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.intermediate_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,  # every parameter is loaded
        use_cpu_initialization=not torch.cuda.is_available(),
        # Fused kernels of Apex and the JIT, which the local layers do without.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=sizes.tensor,
        sequence_parallel=sizes.tensor > 1,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline if interleaved else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        variable_seq_lengths=sizes.pipeline > 1,  # packs differ in length
        moe_token_dispatcher_type="alltoall",  # the one that allows it, and is asked for even without experts
        # The interleaved schedule is silently wrong on batched sends.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # The loss is a sum over tokens, divided once by the step's tokens over all ranks (AReaL#1273).
        calculate_per_token_loss=True,
        **moe,
        **recompute,
    )
    if arch.rope_scaling:
        _set_yarn(config, arch)
    return config


def _set_yarn(config: TransformerConfig, arch: Architecture) -> None:
    """YaRN's numbers, which GPTModel looks for as extra attributes of its configuration."""
    scaling = arch.rope_scaling
    config.position_embedding_type = "yarn"
    config.yarn_rotary_scaling_factor = float(scaling["factor"])
    config.yarn_original_max_position_embeddings = int(scaling["original_max_position_embeddings"])
    config.yarn_beta_fast = float(scaling.get("beta_fast") or 32.0)
    config.yarn_beta_slow = float(scaling.get("beta_slow") or 1.0)
    config.yarn_mscale = 1.0
    config.yarn_mscale_all_dim = 0.0
    config.yarn_correction_range_round_to_int = bool(scaling.get("truncate", True))


def _local_spec(config: TransformerConfig) -> ModuleSpec:
    """Megatron's local layer with norms and attention that know sequence and context parallelism and packing."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedCausalAttention
    # Checkpoint keys of the Transformer Engine layer, which holds these norms inside the linear that follows.
    layer.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if not config.num_moe_experts:
        layer.sharded_state_dict_keys_map["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return spec


def _block_spec(config: TransformerConfig, impl: TransformerImpl, vp_stage: int) -> TransformerBlockSubmodules:
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    if impl is TransformerImpl.local:
        return TransformerBlockSubmodules(layer_specs=[_local_spec(config)] * layers, layer_norm=RMSNorm)
    from megatron.core.extensions.transformer_engine import HAVE_TE, TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    if not HAVE_TE:
        raise UserError(
            "policy.transformer_impl is te, but Transformer Engine is not installed; install the extra `te` on a "
            "machine with CUDA, or set policy.transformer_impl to local"
        )
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=True
    )
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=TENorm)


def build_chunks(config: TransformerConfig, arch: Architecture, impl: TransformerImpl) -> List[GPTModel]:
    """This rank's model chunks (one per virtual pipeline stage), uninitialised, on its device."""
    stages = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(stages or 1):
        vp_stage = stage if stages else None
        with cuda_tensors():
            chunk = GPTModel(
                config=config,
                transformer_layer_spec=_block_spec(config, impl, vp_stage),
                vocab_size=padded_vocab_size(arch, config.tensor_model_parallel_size),
                max_sequence_length=arch.max_position_embeddings,
                pre_process=mpu.is_pipeline_first_stage(ignore_virtual=stages is None, vp_stage=vp_stage),
                post_process=mpu.is_pipeline_last_stage(ignore_virtual=stages is None, vp_stage=vp_stage),
                share_embeddings_and_output_weights=arch.tie_embeddings,
                position_embedding_type="rope",
                rotary_base=arch.rope_theta,
                vp_stage=vp_stage,
            )
        chunk.vp_stage = vp_stage
        chunks.append(chunk.to(device()))
    return chunks
