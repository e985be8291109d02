"""Laws T1, T2, T4 and T5 for trainers of low-rank adapters, and for reference policies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor

from verl_adaptor.capabilities import Capability
from verl_adaptor.errors import CheckpointError, TrainerError
from verl_adaptor.protocols import TrainerBackend
from verl_adaptor.testing.bench import Bench, policy_gradient, squared_error
from verl_adaptor.testing.laws import law
from verl_adaptor.testing.laws_training import (
    STEPS,
    TRAINING,
    Run,
    assert_same_run,
    copied,
    refuses,
    response_tokens,
    run,
    stored_weights,
    weights,
)

LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 6.0}
"""Scale 1.5: a swallowed alpha shows."""


@law("T1", TRAINING, needs=(Capability.LORA, Capability.REFERENCE))
def the_reference_is_the_base(bench: Bench) -> None:
    """With adapters off a trained policy has its base's log-probs, exactly; closing the reference closes nothing else."""
    batch = bench.batch()
    with bench.trainer() as plain:
        base = plain.compute_log_probs(batch)
    with bench.trainer(**LORA) as trainer:
        assert torch.equal(trainer.compute_log_probs(batch).log_probs, base.log_probs), "the first ratio is not 1"
        with trainer.reference() as reference:
            run(trainer, bench, steps=2)
            for got, expected in zip(reference.compute_log_probs(batch), base, strict=True):
                assert torch.equal(got, expected), "the reference moved with the policy"
            moved = (trainer.compute_log_probs(batch).log_probs - base.log_probs).abs().max()
            assert float(moved) > 1e-3, "the adapters stayed off, or learn nothing"
            refuses(TrainerError, lambda t: t.update(batch, policy_gradient), reference)
        run(trainer, bench, steps=1)


@law("T1", TRAINING, needs=(Capability.REFERENCE,), refused=lambda bench: bench.trainer().reference().close())
def a_reference_stays_where_it_was(bench: Bench) -> None:
    """Without adapters the reference is a copy: the policy as it was loaded, whatever is trained or resumed since."""
    batch = bench.batch()
    with bench.trainer() as trainer:
        base = trainer.compute_log_probs(batch).log_probs
        run(trainer, bench, steps=1)
        with trainer.reference() as reference:
            run(trainer, bench, steps=1)
            assert torch.equal(reference.compute_log_probs(batch).log_probs, base)
            refuses(TrainerError, lambda t: t.update(batch, policy_gradient), reference)
        run(trainer, bench, steps=1)


@law("T2", TRAINING, needs=(Capability.LORA,))
def adapters_alone_are_trained(bench: Bench) -> None:
    """Updates are AdamW's on A and B of W + s B A, written out with plain autograd; no split changes them."""
    split: dict[str, Any] = {"micro_batch_size": 1}
    if bench.spec.support(Capability.ACTIVATION_CHECKPOINTING):
        split["activation_checkpointing"] = True
    for settings in ({}, split):
        with bench.trainer(**LORA, **settings, max_grad_norm=0.2) as trainer:
            start = saved_adapters(trainer, bench.folder / "start")
            got = run(trainer, bench)
        assert_same_run(got, plain_run(bench, start, max_grad_norm=0.2), f"adapters, {settings}")


@law("T2", TRAINING, needs=(Capability.LORA, Capability.VALUE_HEAD))
def a_critic_trains_adapters_and_its_head(bench: Bench) -> None:
    """The value head is trained beside the adapters, and the backbone is not."""
    batch = bench.batch()
    with bench.trainer(head="value", **LORA) as critic:
        start, before = saved_adapters(critic, bench.folder / "critic-start"), weights(critic)
        losses = [critic.update(batch, squared_error)["loss"] for _ in range(STEPS)]
        end, after = saved_adapters(critic, bench.folder / "critic-end"), weights(critic)
    assert losses[-1] < losses[0], "the critic does not learn"
    for name in before.keys() - start.keys():
        stays = not name.startswith("value_head.")
        assert torch.equal(before[name], after[name]) == stays, f"{name} {'moved' if stays else 'stood still'}"
    assert all(not torch.equal(start[n][1], end[n][1]) for n in start), "some adapters stood still"


@law("T4", TRAINING, needs=(Capability.LORA,))
def adapters_are_exported_merged(bench: Bench) -> None:
    """Exported weights are W + s B A under Hugging Face names: at first the base's, bit for bit; A and B come with them."""
    base = stored_weights(Path(bench.path))
    with bench.trainer(**LORA, learning_rate=1e-2) as trainer:
        exported = weights(trainer)
        assert exported.keys() == base.keys(), f"names differ: {sorted(exported.keys() ^ base.keys())[:5]}"
        assert all(torch.equal(tensor, base[name]) for name, tensor in exported.items()), "B is not 0 at the start"
        exported = run(trainer, bench, steps=2).weights
        adapters = saved_adapters(trainer, bench.folder / "adapters")
        alone = trainer.export_weights().adapters
        assert alone is not None, "adapters are not exported by themselves"
        beneath, parts = copied(alone.base), copied(alone.weights)
    assert adapters, "no adapters were saved"
    assert beneath.keys() == base.keys() and all(torch.equal(t, base[name]) for name, t in beneath.items())
    for layer, (a, b, scale, _) in ((name.removesuffix(".weight"), found) for name, found in adapters.items()):
        same = torch.equal(parts[f"{layer}.lora_A.weight"], a) and torch.equal(parts[f"{layer}.lora_B.weight"], b)
        assert same and scale == alone.alpha / alone.rank, f"{layer}: exported adapters are not the saved ones"
    expected = merged(base, adapters)
    for name, tensor in exported.items():
        gap = float((tensor - expected[name]).abs().max())
        assert gap <= (1e-6 if name in adapters else 0), f"{name} is {gap:.1e} from base + s B A"
        assert (name in adapters) != torch.equal(tensor, base[name]), f"{name}: adapters stand still, or the base moved"


@law("T5", TRAINING, needs=(Capability.LORA, Capability.EXACT_RESUME))
def adapters_resume_exactly(bench: Bench) -> None:
    """N + M steps equal N, save, load, M, bit for bit; the checkpoint holds no base, and fits its own base only."""
    folder = bench.folder / "adapter-checkpoint"
    paths = [bench.variant(f"base-{seed}", seed=seed, hidden_size=256, intermediate_size=768) for seed in (0, 1)]
    with bench.trainer(paths[0], **LORA) as trainer:
        run(trainer, bench, steps=2)
        trainer.save_checkpoint(folder)
        straight = run(trainer, bench, steps=2)
    with bench.trainer(paths[0], **LORA) as trainer:
        trainer.load_checkpoint(folder)
        resumed = run(trainer, bench, steps=2)
    assert (straight.losses, straight.grad_norms) == (resumed.losses, resumed.grad_norms)
    assert all(torch.equal(tensor, resumed.weights[name]) for name, tensor in straight.weights.items())
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    whole = sum(file.stat().st_size for file in Path(paths[0]).glob("*.safetensors"))
    assert written < whole, f"{written} bytes for adapters of a model of {whole}: the base was saved too"
    for path, settings in ((paths[1], LORA), (paths[0], {}), (paths[0], LORA | {"lora_alpha": 8.0})):
        with bench.trainer(path, **settings) as other:
            refuses(CheckpointError, lambda t: t.load_checkpoint(folder), other)


@law("T5", TRAINING, needs=(Capability.LORA, Capability.SAVE_PRETRAINED))
def adapters_open_in_peft_and_merged_in_transformers(bench: Bench) -> None:
    """Both ways to save give plain transformers and peft the same trained policy."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    alone, whole = bench.folder / "adapter-alone", bench.folder / "adapter-merged"
    with bench.trainer(**LORA, learning_rate=1e-2) as trainer:
        exported = run(trainer, bench, steps=2).weights
        trainer.save_adapter(alone)
        trainer.save_pretrained(whole)
    saved = stored_weights(whole)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())
    ids = torch.tensor([bench.prompts(1, longest=40)[0]])
    base = AutoModelForCausalLM.from_pretrained(bench.path, dtype=torch.float32)
    with torch.no_grad():
        untrained = base(ids).logits
        by_peft = PeftModel.from_pretrained(base, str(alone)).eval()(ids).logits
        by_transformers = AutoModelForCausalLM.from_pretrained(whole).eval()(ids).logits
    gap = float((by_peft - by_transformers).abs().max())
    assert gap <= 1e-4, f"logits of the two folders differ by {gap:.1e}"
    assert float((by_peft - untrained).abs().max()) > 1e-2, "the untrained policy was saved"


# -- the oracle --------------------------------------------------------------------------------------------------

Factors = Mapping[str, tuple[Tensor, Tensor, float, bool]]
"""Name of a weight -> A [r, in], B [out, r], scale, and whether the weight is kept as [in, out]."""


def saved_adapters(trainer: TrainerBackend, folder: Path) -> Factors:
    """A trainer's adapters, from the folder that it saves."""
    trainer.save_adapter(folder)
    settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    scale = LORA["lora_alpha"] / LORA["lora_rank"]
    assert settings["lora_alpha"] / settings["r"] == scale, f"saved with another scale than {scale}"
    found = {
        name.removeprefix("base_model.model."): t for name, t in load_file(folder / "adapter_model.safetensors").items()
    }
    layers = [name.removesuffix(".lora_A.weight") for name in found if ".lora_A." in name]
    return {
        f"{layer}.weight": (
            found[f"{layer}.lora_A.weight"],
            found[f"{layer}.lora_B.weight"],
            scale,
            settings["fan_in_fan_out"],
        )
        for layer in layers
    }


def merged(base: Mapping[str, Tensor], factors: Factors) -> dict[str, Tensor]:
    """W + s B A for the layers that have adapters."""
    changes = {n: (s * b @ a).T if transposed else s * b @ a for n, (a, b, s, transposed) in factors.items()}
    return {name: tensor + changes[name] if name in changes else tensor for name, tensor in base.items()}


def plain_run(bench: Bench, start: Factors, *, max_grad_norm: float) -> Run:
    """`run` by plain autograd through the merged weights of the oracle, a row at a time."""
    batch, base = bench.batch(), stored_weights(Path(bench.path))
    leaves = [t.clone().requires_grad_() for a, b, *_ in start.values() for t in (a, b)]
    pairs = zip(leaves[::2], leaves[1::2], strict=True)
    factors = {n: (a, b, s, t) for (a, b), (n, (_, _, s, t)) in zip(pairs, start.items(), strict=True)}
    # the trainer's own defaults, but for what a bench sets
    optimizer = torch.optim.AdamW(leaves, lr=1e-3, weight_decay=0.01, eps=1e-8 if bench.family == "llama" else 1e-5)
    results = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        now = merged({name: base[name] for name in factors}, factors)
        loss = _token_mean(bench, batch, now)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, max_grad_norm)
        optimizer.step()
        results.append({"loss": loss.item(), "grad_norm": float(norm), "learning_rate": 1e-3})
    return Run(results, {name: tensor.detach() for name, tensor in merged(base, factors).items()})


def _token_mean(bench: Bench, batch: TensorDict, weights: Mapping[str, Tensor]) -> Tensor:
    """The token-mean of `policy_gradient` over the batch, by unpadded rows; `weights` replace the oracle's own."""
    total = torch.zeros(())
    for row, real in zip(batch, response_tokens(batch), strict=True):
        ids, count = row["input_ids"][row["attention_mask"].bool()], int(real.sum())
        logits = torch.func.functional_call(bench.oracle, dict(weights), (ids[None],), {"use_cache": False}).logits[0]
        log_probs = logits[-count - 1 : -1].log_softmax(-1).gather(-1, ids[-count:, None])[:, 0]
        total = total - (log_probs * row["advantages"][real] * row["response_mask"][real]).sum()
    return total / batch["response_mask"].sum()
