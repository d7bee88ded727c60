"""Qwen2's layers from megatron-core's pure PyTorch modules, with the parameter names of TransformerEngine's layers.

mbridge loads and exports weights by those names. TransformerEngine fuses the norm before a column-parallel linear layer
into it (`linear_qkv.layer_norm_weight`); megatron-core's local layers keep it apart (`input_layernorm.weight`).
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import rms_norm, scaled_dot_product_attention


class FinalNorm(torch.nn.RMSNorm):
    """The norm behind the last layer. megatron-core's wrapper of torch's norm refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        _sum_over_tensor_parallel_ranks(self.weight, config)


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then ColumnParallelLinear: TransformerEngine's LayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        _sum_over_tensor_parallel_ranks(self.layer_norm_weight, config)
        self.layernorm_epsilon = config.layernorm_epsilon

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed = rms_norm(input_, (input_.shape[-1],), self.layer_norm_weight, self.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


class CausalAttention(DotProductAttention):
    """Causal attention for both of verl's layouts, by torch's scaled_dot_product_attention.

    megatron-core's own class refuses packed sequences. The mask is not read, as TransformerEngine reads none where the
    mask is causal: in both layouts padding comes after a sequence's tokens, where causal attention cannot see it.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: padded sequences [s, b, n, d], or packed ones [t, n, d].
            key: the same, with as many heads as query or a divisor of it.
            value: as key.
            attention_mask: not read.
            attn_mask_type: not read; it is causal.
            attention_bias: not read.
            packed_seq_params: where each packed sequence starts and ends; None for padded ones.

        Returns:
            [s, b, n * d], or [t, n * d].
        """
        if packed_seq_params is None:
            heads_first = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
            return self._attend(*heads_first).permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q_padded
        bounds = (packed_seq_params.cu_seqlens_q if bounds is None else bounds).tolist()
        heads_first = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
        attended = [
            self._attend(*(tensor[:, :, start:end] for tensor in heads_first)) for start, end in pairwise(bounds)
        ]
        return torch.cat(attended, dim=2).squeeze(0).transpose(0, 1).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[b, n, s, d] in and out."""
        return scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            dropout_p=self.attention_dropout.p if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )


def _sum_over_tensor_parallel_ranks(norm_weight: torch.Tensor, config: TransformerConfig) -> None:
    """With sequence parallelism each rank sees a part of the tokens: megatron-core sums the gradients marked so."""
    vars(norm_weight)["sequence_parallel"] = config.sequence_parallel


def block_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage.

    Args:
        config: a dense model with RMSNorm.
        vp_stage: virtual pipeline stage; None without virtual pipelining.
        pp_rank: pipeline rank; None for this process's own.

    Raises:
        ValueError: another norm than RMSNorm, or mixture of experts.
    """
    if config.normalization != "RMSNorm" or config.num_moe_experts is not None:
        raise ValueError(
            f"the local layers are Qwen2's: RMSNorm and no experts, not {config.normalization} with "
            f"{config.num_moe_experts} experts; run this model on a GPU"
        )
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage, pp_rank=pp_rank
    )
    assert spec.layer_specs is not None
    return replace(spec, layer_specs=[_with_te_names(layer) for layer in spec.layer_specs], layer_norm=FinalNorm)


def _with_te_names(layer: ModuleSpec) -> ModuleSpec:
    submodules: Any = layer.submodules
    attention, mlp = submodules.self_attention, submodules.mlp
    return replace(
        layer,
        submodules=replace(
            submodules,
            input_layernorm=IdentityOp,
            pre_mlp_layernorm=IdentityOp,
            # It maps the separate norms to the fused names in checkpoints; here the names are the fused ones.
            sharded_state_dict_keys_map={},
            self_attention=replace(
                attention,
                submodules=replace(
                    attention.submodules, linear_qkv=NormColumnParallelLinear, core_attention=CausalAttention
                ),
            ),
            mlp=replace(mlp, submodules=replace(mlp.submodules, linear_fc1=NormColumnParallelLinear)),
        ),
    )
