"""megatron-core with tensor parallelism: its GPT model, schedule, gradient buffers and optimizer.

The process groups are those that the trainer beside it has made; Megatron knows one layout in a process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from handwritten import task
from verl_adaptor.backends.megatron import shim


class Model(GPTModel):
    """GPT without its last step, so that only positions which predict a response meet the vocabulary matrix."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    def negative_log_probs(self, hidden: Tensor, micro: task.Micro) -> Tensor:
        """[r, b] of the response tokens."""
        logits, _ = self.output_layer(hidden[micro.predictors])
        return vocab_parallel_cross_entropy(logits.div_(task.TEMPERATURE), micro.targets.t().contiguous())


def build(path: str, data: Mapping[str, Tensor]) -> task.Step:
    """One tensor-parallel replica."""
    with shim.active():
        hf = AutoConfig.from_pretrained(path)
        config = transformer_config(hf)
        model = Model(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=hf.vocab_size,
            max_sequence_length=hf.max_position_embeddings,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=int(hf.rope_parameters["rope_theta"]),
        )
        load(model, path, hf)
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=task.LEARNING_RATE, weight_decay=task.WEIGHT_DECAY, adam_beta1=0.9,
                adam_beta2=0.999, adam_eps=1e-8, clip_grad=task.MAX_GRAD_NORM, params_dtype=torch.float32,
            ),
            [wrapped],
            config_overrides={},  # decay on norms too
        )  # fmt: skip
    schedule = get_forward_backward_func()

    def forward(micros: Iterator[task.Micro], _: Any) -> tuple[Tensor, Any]:
        micro = next(micros)
        hidden = wrapped(micro.inputs["input_ids"], micro.inputs["position_ids"], invisible(micro))

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total = (model.negative_log_probs(hidden, micro) * micro.weights.t()).sum()
            return total, micro.tokens, {"loss": total.detach()}

        return hidden, loss

    def step() -> tuple[float, float]:
        with shim.active():
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            micros = list(task.micro_batches(data))
            reports = schedule(
                forward_step_func=forward, data_iterator=iter(micros), model=[wrapped], num_microbatches=len(micros),
                seq_length=data["input_ids"].shape[1], micro_batch_size=task.MICRO_ROWS, forward_only=False,
            )  # fmt: skip
            _, norm, _ = optimizer.step()
        total = sum(report["loss"] for report in reports) / data["response_mask"].sum()
        return float(total), float(norm)

    return step


def invisible(micro: task.Micro) -> Tensor:
    """[b, 1, length, length] True where a token must not see another. Positions are relative: only this matters."""
    mask = micro.inputs["attention_mask"].bool()
    length = mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return ~(causal & mask[:, None, None, :])


def transformer_config(hf: PreTrainedConfig) -> TransformerConfig:
    """The model's dimensions, and no fused kernel: a CPU has none."""
    return TransformerConfig(
        num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads, num_query_groups=hf.num_key_value_heads, kv_channels=hf.head_dim,
        normalization="RMSNorm", layernorm_epsilon=hf.rms_norm_eps, gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, attention_dropout=0.0, hidden_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        use_cpu_initialization=True, params_dtype=torch.float32, pipeline_dtype=torch.float32,
        persist_layer_norm=False, gradient_accumulation_fusion=False, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False, batch_p2p_sync=False,
        calculate_per_token_loss=True, finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip


@torch.no_grad()
def load(model: GPTModel, path: str, hf: PreTrainedConfig) -> None:
    """This rank's share of a Hugging Face Llama: whole query groups, matching rows of gate and up."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    saved = load_file(Path(path) / "model.safetensors")
    groups = hf.num_key_value_heads

    def share(name: str, dim: int = 0) -> Tensor:
        return saved[name].chunk(ranks, dim)[rank]

    own = {
        "embedding.word_embeddings.weight": share("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": saved["model.norm.weight"],
        "output_layer.weight": share("lm_head.weight"),
    }
    for number in range(hf.num_hidden_layers):
        ours, theirs = f"decoder.layers.{number}.", f"model.layers.{number}."
        qkv = [saved[f"{theirs}self_attn.{x}_proj.weight"].reshape(groups, -1, hf.hidden_size) for x in "qkv"]
        own |= {
            f"{ours}input_layernorm.weight": saved[f"{theirs}input_layernorm.weight"],
            f"{ours}self_attention.linear_qkv.weight": torch.cat(qkv, 1).flatten(0, 1).chunk(ranks)[rank],
            f"{ours}self_attention.linear_proj.weight": share(f"{theirs}self_attn.o_proj.weight", 1),
            f"{ours}pre_mlp_layernorm.weight": saved[f"{theirs}post_attention_layernorm.weight"],
            f"{ours}mlp.linear_fc1.weight": torch.cat([share(f"{theirs}mlp.{x}_proj.weight") for x in ("gate", "up")]),
            f"{ours}mlp.linear_fc2.weight": share(f"{theirs}mlp.down_proj.weight", 1),
        }
    parameters = dict(model.named_parameters())
    if parameters.keys() != own.keys():
        raise RuntimeError(f"parameters without a value: {sorted(parameters.keys() ^ own.keys())}")
    for name, parameter in parameters.items():
        parameter.copy_(own[name])
