"""Laws T5 and T6: what a trainer saves, and what it moves away, comes back as it was."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from verl_adaptor.backends.causal_lm import resolve_device
from verl_adaptor.batch import denominators
from verl_adaptor.capabilities import Capability
from verl_adaptor.errors import CheckpointError, ConfigError, TrainerError
from verl_adaptor.memory import trim
from verl_adaptor.protocols import LossOutput, TrainerBackend
from verl_adaptor.protocols.trainer import TIERS
from verl_adaptor.testing.bench import Bench, policy_gradient
from verl_adaptor.testing.laws import law
from verl_adaptor.testing.laws_training import (
    OPTIONS,
    TRAINING,
    assert_same_run,
    refuses,
    run,
    stored_weights,
    weights,
)


@law("T5", TRAINING, needs=(Capability.EXACT_RESUME,))
def resume_is_exact(bench: Bench) -> None:
    """N + M steps equal N, save, load, M, bit for bit (C10)."""
    settings = {**OPTIONS, "lr_schedule": "linear", "lr_warmup_steps": 1, "total_steps": 8}
    folder = bench.folder / f"checkpoint-{len(list(bench.folder.iterdir()))}"
    with bench.trainer(**settings) as trainer:
        run(trainer, bench, steps=2)
        trainer.export_weights()
        trainer.save_checkpoint(folder)
        straight = run(trainer, bench, steps=3)
    with bench.trainer(**settings) as trainer:
        trainer.load_checkpoint(folder)
        assert trainer.policy_version == 1, "the policy version was not resumed"
        resumed = run(trainer, bench, steps=3)
    assert straight.losses == resumed.losses and straight.grad_norms == resumed.grad_norms
    assert straight.learning_rates == resumed.learning_rates, "the learning-rate schedule was not resumed"
    assert len(set(straight.learning_rates)) == 3, "the schedule stands still: the law would not see it restart"
    for name, tensor in straight.weights.items():
        assert torch.equal(tensor, resumed.weights[name]), f"{name} differs after resume"


@law("T5", TRAINING, needs=(Capability.EXACT_RESUME,))
def another_world_size_goes_on_or_is_refused(bench: Bench) -> None:
    """What many ranks saved, one loads and goes on from, or says that it cannot (C11)."""
    folder = bench.folder / "of-many-ranks"
    with bench.trainer(**OPTIONS) as trainer:
        ranks = trainer.config.parallel.world_size
        run(trainer, bench, steps=2)
        trainer.save_checkpoint(folder)
        expected = run(trainer, bench, steps=2)
    with bench.trainer(alone=ranks > 1, **OPTIONS) as trainer:
        try:
            trainer.load_checkpoint(folder)
        except CheckpointError as error:
            assert ranks > 1 and f"world_size={ranks}" in str(error), f"refused for no reason that it names: {error}"
        else:
            assert_same_run(run(trainer, bench, steps=2), expected, "another world size")


@law("T5", TRAINING, needs=(Capability.EXACT_RESUME,))
def a_half_written_checkpoint_is_refused(bench: Bench) -> None:
    """Whatever file is missing or cut short, loading is `CheckpointError` and changes nothing; so if it is all zeros, and
    needed (C12)."""
    whole = bench.folder / "whole"
    with bench.trainer() as trainer:
        trainer.update(bench.batch(), policy_gradient)
        trainer.save_checkpoint(whole)
        trainer.update(bench.batch(), policy_gradient)
        expected = weights(trainer)
        names = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
        assert names, "the checkpoint is empty"
        for name in names:
            for damage in (Path.unlink, cut_short, blanked):
                half = bench.folder / "half"
                shutil.copytree(whole, half)
                damage(half / name)
                if takes(trainer, half):
                    assert damage is blanked, f"CheckpointError was not raised: {name} was gone or too short"
                    trainer.update(bench.batch(), policy_gradient)  # nothing needs the file: as from a whole checkpoint
                found = weights(trainer)
                assert all(torch.equal(found[n], expected[n]) for n in expected), (
                    f"{name} was damaged, and something of it was read"
                )
                shutil.rmtree(half)
        refuses(CheckpointError, partial(TrainerBackend.load_checkpoint, folder=bench.folder / "nowhere"), trainer)


@law("T5", TRAINING, needs=(Capability.SAVE_PRETRAINED,))
def save_pretrained_opens_in_transformers(bench: Bench) -> None:
    """The saved folder holds the trained weights, under names that plain transformers loads without complaint."""
    from transformers import AutoModelForCausalLM

    folder = bench.folder / "pretrained"
    with bench.trainer() as trainer:
        trainer.update(bench.batch(), policy_gradient)
        trainer.save_pretrained(folder)
        exported = weights(trainer)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    saved = stored_weights(folder)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in exported.items())
    ids = torch.tensor([bench.prompts(1, longest=40)[0]])
    assert not torch.equal(model(ids).logits, bench.oracle(ids).logits), "the untrained weights were saved"


@law(
    "T6",
    TRAINING,
    needs=(Capability.OFFLOAD,),
    refused=lambda bench: bench.trainer().offload("disk"),
)
def offload_is_exact(bench: Bench) -> None:
    """Offload and onload are bit-exact, in the middle of a mini-batch; in between nothing reads what is not there."""
    batch = bench.batch()
    over = denominators(batch)
    expected = run(bench.trainer(), bench, steps=4)
    for tier in TIERS:
        with bench.trainer() as trainer:
            run(trainer, bench, steps=2)
            loss = trainer.forward_backward(batch, policy_gradient, over)["loss"]
            for _ in range(2):  # twice is harmless
                trainer.offload(tier)
            refuses(TrainerError, lambda t: t.update(batch, policy_gradient), trainer)
            refuses(TrainerError, lambda t: t.export_weights(), trainer)
            refuses(ConfigError, lambda t: t.offload("tape"), trainer)
            for _ in range(2):
                trainer.onload()
            trainer.optimizer_step()
            got = run(trainer, bench, steps=1)
            assert [loss, *got.losses] == expected.losses[2:], f"{tier}: training went on differently"
        for name, tensor in expected.weights.items():
            assert torch.equal(got.weights[name], tensor), f"{tier}: {name} differs"


@law("T6", TRAINING, needs=(Capability.OFFLOAD,))
def offload_gives_the_memory_back(bench: Bench) -> None:
    """At least 80 % of weights and AdamW's averages leave the memory of the ranks' processes, or devices, and come back."""
    folder = Path(bench.variant("large", hidden_size=512, intermediate_size=2048))
    state = 3 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    with bench.trainer() as scales, bench.trainer(str(folder)) as trainer:
        least = 0.8 * state / trainer.config.parallel.world_size
        trainer.update(bench.batch(), policy_gradient)
        for tier in TIERS if resolve_device(trainer.config.device).type == "cuda" else ("disk",):
            before = weigh(scales, bench)
            trainer.offload(tier)
            away = weigh(scales, bench)
            trainer.onload()
            after = weigh(scales, bench)
            assert before - away >= least, (
                f"{tier}: {before - away:.0f} bytes a rank came back, of at least {least:.0f}"
            )
            assert after - away >= least, (
                f"{tier}: {after - away:.0f} bytes a rank were taken again: the rest was not away"
            )


# -- helpers -----------------------------------------------------------------------------------------------------


def takes(trainer: TrainerBackend, folder: Path) -> bool:
    """Whether the checkpoint was loaded; False where it was refused as it should be."""
    try:
        trainer.load_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def cut_short(file: Path) -> None:
    """As by a crash while it was written."""
    file.write_bytes(file.read_bytes()[:-7])


def blanked(file: Path) -> None:
    """As by a power cut after its length, and before its contents, reached the disk."""
    file.write_bytes(bytes(file.stat().st_size))


def weigh(scales: TrainerBackend, bench: Bench) -> float:
    """Bytes that a rank of `scales`, a small trainer on the same ranks, holds; the mean where there are several."""
    batch = bench.batch()
    return scales.forward_backward(batch, weighing, denominators(batch))["held"]


def weighing(outputs: Mapping[str, torch.Tensor], batch: TensorDict) -> LossOutput:
    """A loss that runs where the ranks are, and tells what their processes hold."""
    device = outputs["log_probs"].device
    gc.collect()
    trim()  # what is freed and kept for later is held by nobody
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device)
    else:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
        held = (resident - shared) * os.sysconf("SC_PAGE_SIZE")  # libraries and Ray's object store are nobody's own
    return LossOutput(0 * outputs["log_probs"], {"held": (torch.tensor(held), torch.tensor(1.0))})
