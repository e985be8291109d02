"""A Hugging Face config -> Megatron's GPT model: the chunks of it that this rank holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.inference.contexts import BaseInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl_adaptor.backends.megatron import layout
from verl_adaptor.backends.megatron.layout import Layout
from verl_adaptor.backends.megatron.names import FAMILIES
from verl_adaptor.backends.megatron.rows import Rows
from verl_adaptor.backends.vocab_parallel import embedded_without_padding_gradient, token_log_probs_and_entropy
from verl_adaptor.config import TrainerConfig
from verl_adaptor.errors import ModelError


def head_dim(model: PreTrainedConfig) -> int:
    """Width of one attention head."""
    return getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads


def expert_count(model: PreTrainedConfig) -> int:
    """Experts in each layer; 0 for a dense model."""
    return int(model.num_local_experts) if FAMILIES[model.model_type].router else 0


def transformer_config(model: PreTrainedConfig, config: TrainerConfig, place: Layout) -> TransformerConfig:
    """Megatron's settings for this model and this layout."""
    _check(model)
    family, bf16 = FAMILIES[model.model_type], config.dtype == "bfloat16"
    interleaved = place.virtual_pipeline > 1
    return TransformerConfig(
        num_layers=model.num_hidden_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_key_value_heads,
        kv_channels=head_dim(model),
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=family.bias,
        qk_layernorm=family.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # where it runs
        tensor_model_parallel_size=place.tensor,
        pipeline_model_parallel_size=place.pipeline,
        virtual_pipeline_model_parallel_size=place.virtual_pipeline if interleaved else None,
        expert_model_parallel_size=place.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=config.parallel.sequence_parallel,
        # the two go together: anything else gives silently wrong losses when interleaved
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=False,
        # in what type: the residual stream stays float32, as under autocast, but for Transformer Engine. What one stage
        # sends must be what the next receives, or it reads garbage
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        fp32_residual_connection=bf16 and not _engine(),
        pipeline_dtype=torch.bfloat16 if bf16 and _engine() else torch.float32,
        attention_softmax_in_fp32=True,
        # how: plain kernels, which exist everywhere
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        # the weights come from a file. Without "initialisation" the parameters are not marked as tensor parallel, and the
        # gradient norm is silently wrong
        use_cpu_initialization=True,
        perform_initialization=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
        # a loss is a sum over tokens with denominators of its own: no division by micro-batches or ranks
        calculate_per_token_loss=True,
        **(_recomputation() if config.activation_checkpointing else {}),
        **(_mixture(model) if family.router else {}),
    )


def build_chunks(
    model: PreTrainedConfig, config: TrainerConfig, settings: TransformerConfig, device: torch.device
) -> list[Chunk]:
    """This rank's chunks, weights not loaded yet: one, or as many as the interleaved schedule has stretches."""
    stretches = settings.virtual_pipeline_model_parallel_size
    numbers = [None] if stretches is None else list(range(stretches))
    return [Chunk(model, config, settings, number).to(device) for number in numbers]


class Chunk(GPTModel):
    """One stretch of layers, with the embedding before the first and a head after the last.

    Differs from Megatron's model in two ways. Positions are the batch's own, not 0, 1, 2, ... And the last stage returns
    hidden states: `outputs` sends only those that predict a response token through the vocabulary matrix.
    """

    def __init__(
        self, model: PreTrainedConfig, config: TrainerConfig, settings: TransformerConfig, stretch: int | None
    ) -> None:
        place = {"ignore_virtual": False, "vp_stage": stretch}
        super().__init__(
            settings,
            _layers(settings, stretch, expert_count(model)),
            vocab_size=padded(model.vocab_size, settings.tensor_model_parallel_size),
            max_sequence_length=model.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=model.tie_word_embeddings and config.head == "policy",
            position_embedding_type="rope",
            vp_stage=stretch,
        )
        for module in self.modules():
            if isinstance(module, Router):  # it decides in float32; rounded weights would decide otherwise
                module.weight.data = module.weight.data.float()
        if settings.tensor_model_parallel_size > 1 and settings.expert_model_parallel_size == 1:
            for name, parameter in self.named_parameters():
                if (
                    ".experts." in name
                ):  # whole on each rank, which has tokens of its own: Megatron sums cut experts only
                    parameter.sequence_parallel, parameter.tensor_model_parallel = True, False
        if self.pre_process and model.pad_token_id is not None:
            padding = model.pad_token_id + (model.vocab_size if model.pad_token_id < 0 else 0)  # -1 is the last
            self.embedding.word_embeddings.register_forward_hook(partial(_pad_row_is_constant, padding=padding))
        self.rotary_pos_emb = _Positions(model)
        self.real_vocab_size = model.vocab_size
        self.value_head: nn.Linear | None = None
        if self.post_process and config.head == "value":
            del self.output_layer
            self.post_process: bool = False  # of the GPT model alone: no output matrix. The final norm is the decoder's
            self.value_head = nn.utils.skip_init(nn.Linear, model.hidden_size, 1)
        elif self.post_process and settings.sequence_parallel:
            # its input is gathered before the predictors are picked
            self.output_layer.sequence_parallel, self.output_layer.allreduce_dgrad = False, True

    def forward(self, rows: Rows) -> Tensor:
        """Hidden states [length (of this rank), rows, hidden]."""
        self.rotary_pos_emb.positions = rows.position_ids
        return super().forward(rows.input_ids, rows.position_ids, rows.hidden)

    def read(self, ids: Tensor, positions: Tensor, hidden: Tensor, context: BaseInferenceContext) -> Tensor:
        """Hidden states [new, rows, hidden] of new tokens, whose keys and values go into the cache.

        Args:
            ids: [rows, new].
            positions: [rows, columns so far]: cached keys are kept without them.
            hidden: [rows, 1, new, columns so far], True where a token must not see another.
            context: the cache.
        """
        self.rotary_pos_emb.positions = positions
        states: Tensor = super().forward(ids, positions, hidden, inference_context=context, runtime_gather_output=True)
        return states

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def outputs(self, states: Tensor, rows: Rows) -> dict[str, Tensor]:
        """``log_probs`` and ``entropy``, or ``values``: [b, R] float32, the same on all tensor-parallel ranks."""
        if self.config.sequence_parallel:
            states = tensor_parallel.gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        sequences = rows.sequences
        states = states[sequences.predictors, : len(sequences.targets)].transpose(0, 1).contiguous()
        if self.value_head is not None:
            return {"values": sequences.restore(self.value_head(states.float())[..., 0])}
        tied = self.share_embeddings_and_output_weights
        logits, _ = self.output_layer(states, weight=self.shared_embedding_or_output_weight() if tied else None)
        log_probs, entropy = token_log_probs_and_entropy(
            logits,
            sequences.targets,
            sequences.temperature,
            axis=layout.tensor_axis(),
            vocab_size=self.real_vocab_size,
        )
        return {"log_probs": sequences.restore(log_probs), "entropy": sequences.restore(entropy)}


class _Positions(nn.Module):
    """Rotary angles of the positions that the batch gives, in the place of Megatron's own module."""

    def __init__(self, model: PreTrainedConfig) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(_frequencies(model), persistent=False)
        self.positions = torch.empty(0)
        """[rows, length] of the forward pass that is about to run."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """[length, rows, 1, head_dim] angles."""
        angles = self.positions.t()[..., None].float() * self.frequencies
        return torch.cat([angles, angles], dim=-1)[:, :, None]

    def get_rotary_seq_len(self, *_: Any) -> int:
        """Megatron asks; the positions know."""
        return self.positions.shape[-1]


class _Norm(nn.RMSNorm):
    """RMSNorm in float32, with the mark that sequence parallelism needs.

    Each rank then normalises its own tokens, so that the weight's gradient has to be summed over the ranks; Megatron does
    that for parameters that are marked, and its own wrapper of this class refuses.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=torch.float32)
        self.compute_dtype = config.params_dtype
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - Megatron's mark

    def forward(self, x: Tensor) -> Tensor:
        """As wide as `x`, of the type that matrices compute in."""
        return F.rms_norm(x.float(), self.normalized_shape, self.weight, self.eps).to(self.compute_dtype)


# -- settings ----------------------------------------------------------------------------------------------------


def padded(vocab_size: int, tensor: int) -> int:
    """The vocabulary with as many ids more as make it divisible."""
    return -(-vocab_size // tensor) * tensor


def _engine() -> bool:
    """Whether the layers are Transformer Engine's."""
    return bool(HAVE_TE) and torch.cuda.is_available()


def _layers(settings: TransformerConfig, stretch: int | None, experts: int) -> TransformerBlockSubmodules:
    """Transformer Engine's layers where CUDA and it are there, else Megatron's plain ones with our norm."""
    kind = {"num_experts": experts or None, "moe_grouped_gemm": False, "qk_layernorm": settings.qk_layernorm}
    if _engine():
        from megatron.core.extensions.transformer_engine import TENorm

        layer, norm = get_gpt_layer_with_transformer_engine_spec(**kind), TENorm
    else:
        layer, norm = get_gpt_layer_local_spec(**kind, normalization="RMSNorm"), _Norm
        _use_ours(layer)
    layer.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.arbitrary
    count = get_num_layers_to_build(settings, vp_stage=stretch)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _use_ours(layer: ModuleSpec) -> None:
    """Our norm and our addition to the residual stream, where Megatron's would be."""
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = _Norm
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = _add_to_residual
    for name in ("q_layernorm", "k_layernorm"):
        if getattr(attention, name) is not IdentityOp:
            setattr(attention, name, _Norm)


def _add_to_residual(*_: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Megatron's own rounds the residual stream to the type of what is added to it."""

    def add(addition: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        value, bias = addition
        return residual + (value if bias is None else value + bias)

    return add


def _pad_row_is_constant(
    embedding: tensor_parallel.VocabParallelEmbedding, args: tuple[Tensor], hidden: Tensor, *, padding: int
) -> Tensor:
    """As in transformers. Under sequence parallelism `hidden` is [length of this rank, rows, hidden] already."""
    ids = args[0]
    if embedding.reduce_scatter_embeddings:
        ids = tensor_parallel.scatter_to_sequence_parallel_region(ids.t().contiguous())
    return embedded_without_padding_gradient(hidden, ids, padding)


def _leave(tensor: Tensor) -> Tensor:
    """Draws nothing: what is allocated here is overwritten from the file, or that is an error."""
    return tensor


def _recomputation() -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _mixture(model: PreTrainedConfig) -> dict[str, Any]:
    """Softmax over all experts, then the best; their weights add up to 1 unless the model says that they do not."""
    return {
        "num_moe_experts": expert_count(model),
        "moe_ffn_hidden_size": getattr(model, "moe_intermediate_size", None) or model.intermediate_size,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_router_pre_softmax": not getattr(model, "norm_topk_prob", True),
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": False,
    }


def _frequencies(model: PreTrainedConfig) -> Tensor:
    """[head_dim / 2] rotary frequencies, by transformers' own formulas."""
    rope = model.rope_parameters
    if rope["rope_type"] == "default":
        width = head_dim(model)
        return 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width))
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](model, torch.device("cpu"))
    return frequencies


def _check(model: PreTrainedConfig) -> None:
    """Refuse what config.json may ask for and the layers here do not do. Raises `ModelError` with all of it."""
    allowed: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "mlp_only_layers": (None, []),
        "decoder_sparse_step": (None, 1),
    }
    values = {name: getattr(model, name, None) for name in allowed}
    problems = [f"{name}={value!r}" for name, value in values.items() if value not in allowed[name]]
    rope = model.rope_parameters.get("rope_type")
    if rope not in ("default", "linear", "llama3"):
        problems.append(f"rope_type={rope!r}")
    if len(set(getattr(model, "layer_types", None) or ())) > 1:
        problems.append("layers with and without a sliding window")
    if problems:
        raise ModelError(
            f"megatron: this {model.model_type} has {', '.join(problems)}, which the backend does not map; take backend hf."
        )
