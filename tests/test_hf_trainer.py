"""The hf trainer: layouts, splits, checkpoints and probes that are its own. The laws it shares are in the suite."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from verl_adaptor.backends import checkpoint, export, probe
from verl_adaptor.backends.causal_lm import load_causal_lm, named_tensors, resolve_device
from verl_adaptor.backends.causal_lm import token_log_probs_and_entropy as per_token
from verl_adaptor.backends.heads import load_head
from verl_adaptor.backends.hf import verl_adaptor_backends
from verl_adaptor.backends.hf.trainer import HFTrainer
from verl_adaptor.batch import aggregate, collate, denominators
from verl_adaptor.config import ParallelConfig, TrainerConfig
from verl_adaptor.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    MissingGradient,
    ModelError,
    NonFiniteGradient,
    TrainerClosed,
    TrainerError,
    UnsupportedCapability,
)
from verl_adaptor.protocols import LossOutput
from verl_adaptor.samples import Trajectory
from verl_adaptor.testing.models import FAMILIES, VOCAB_SIZE, make_tiny_model
from verl_adaptor.tokenizer import load_tokenizer

[SPEC] = verl_adaptor_backends()
SPLITS: list[dict[str, Any]] = [
    {"micro_batch_size": 1},
    {"micro_batch_size": 2},
    {"max_tokens_per_micro_batch": 40},
    {"packing": True},
    {"packing": True, "max_tokens_per_micro_batch": 40},
    {"activation_checkpointing": True, "micro_batch_size": 4},
]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Family -> folder of its tiny model, made once."""
    made: dict[str, str] = {}

    def folder(family: str) -> str:
        if family not in made:
            made[family] = str(make_tiny_model(family, tmp_path_factory.mktemp("models") / family))
        return made[family]

    return folder


@pytest.fixture
def llama(model: Callable[[str], str]) -> str:
    return model("llama")


def trainer(folder: str, **settings: Any) -> HFTrainer:
    return HFTrainer(folder, TrainerConfig(**{"learning_rate": 1e-3, "device": "cpu", **settings}), None, SPEC)


def rows_of(seed: int = 0, rows: int = 6, temperature: float = 0.6) -> list[Trajectory]:
    """Unequal lengths, observations inside, some longer than the tiny models' attention window of 8."""
    r = random.Random(seed)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(r.randrange(3, VOCAB_SIZE) for _ in range(n))

    return [
        Trajectory(
            prompt_ids=ids(r.randrange(1, 12)),
            response_ids=ids(n := r.randrange(2, 16)),
            response_mask=(1, *(int(r.random() < 0.8) for _ in range(n - 1))),
            rollout_log_probs=(0.0,) * n,
            finish_reason="stop",
            temperature=temperature,
        )
        for _ in range(rows)
    ]


def batch_of(rows: list[Trajectory], seed: int = 0) -> TensorDict:
    batch = collate(rows, pad_token_id=0)
    generator = torch.Generator().manual_seed(seed)
    for key in ("advantages", "returns"):
        batch[key] = torch.randn(batch["responses"].shape, generator=generator)
    return batch


def policy_loss(outputs: Mapping[str, Tensor], batch: TensorDict) -> LossOutput:
    mask = batch["response_mask"]
    loss = -outputs["log_probs"] * batch["advantages"] - 0.01 * outputs["entropy"]
    return LossOutput(loss, {"entropy": ((outputs["entropy"] * mask).sum(), mask.sum())})


def value_loss(outputs: Mapping[str, Tensor], batch: TensorDict) -> LossOutput:
    return LossOutput((outputs["values"] - batch["returns"]).square())


def weights(of: HFTrainer) -> dict[str, Tensor]:
    return {name: t.clone() for bucket in of.export_weights().buckets() for name, t in bucket.items()}


def furthest(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).detach().abs().max()) for name in a)


# -- T1: log-probs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_plain_transformers_one_row_at_a_time(model: Any, family: str) -> None:
    rows = rows_of()
    plain = AutoModelForCausalLM.from_pretrained(model(family), dtype=torch.float32, attn_implementation="eager")
    outputs = []
    for split in ({}, {"packing": True}, {"packing": True, "micro_batch_size": 4}):
        with trainer(model(family), trainable=False, **split) as t:
            outputs.append(t.compute_log_probs(batch_of(rows)))
    for index, row in enumerate(rows):
        with torch.no_grad():
            logits = plain(torch.tensor([row.prompt_ids + row.response_ids])).logits[0]
        log_p = (logits[len(row.prompt_ids) - 1 : -1] / row.temperature).log_softmax(-1)
        n = len(row.response_ids)
        for log_probs, entropy in outputs:
            wanted = log_p.gather(1, torch.tensor(row.response_ids)[:, None])[:, 0]
            torch.testing.assert_close(log_probs[index, :n], wanted, atol=1e-5, rtol=0)
            torch.testing.assert_close(entropy[index, :n], -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=0)
            assert not log_probs[index, n:].any()


def test_padding_side_and_width_do_not_matter(llama: str) -> None:
    rows = rows_of()
    batch = batch_of(rows)
    width_p = batch["input_ids"].shape[1] - batch["responses"].shape[1]
    right = batch.clone()  # prompts flush left: padding lies between prompt and response
    for i, row in enumerate(rows):
        n = len(row.prompt_ids)
        for key in ("input_ids", "attention_mask", "position_ids"):
            right[key][i, :width_p] = torch.cat([batch[key][i, width_p - n : width_p], batch[key][i, : width_p - n]])
    with trainer(llama, trainable=False) as t, trainer(llama, trainable=False, packing=True) as packed:
        for one in (t, packed):
            a, b = one.compute_log_probs(batch), one.compute_log_probs(right)
            assert not (batch["attention_mask"] == right["attention_mask"]).all()
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_packed_sequence_sees_nothing_of_its_neighbours(model: Any) -> None:  # C17
    for family in ("llama", "gpt2", "gemma2"):
        with trainer(model(family), trainable=False, packing=True) as t:
            batch = batch_of(rows_of())
            before = t.compute_log_probs(batch).log_probs
            batch["input_ids"][::2] = batch["input_ids"][::2].flip(-1)
            torch.testing.assert_close(t.compute_log_probs(batch).log_probs[1::2], before[1::2], atol=1e-6, rtol=0)


def test_a_response_without_prompt_is_refused(llama: str) -> None:
    batch = batch_of(rows_of())
    batch["attention_mask"][2, : -batch["responses"].shape[1]] = 0
    with trainer(llama, trainable=False) as t, pytest.raises(BatchError, match="row 2 has a response and no prompt"):
        t.compute_log_probs(batch)


def test_rows_without_tokens_give_zeros(llama: str) -> None:
    batch = batch_of(rows_of(rows=2))
    batch["attention_mask"].zero_()
    for packing in (False, True):
        with trainer(llama, trainable=False, packing=packing) as t:
            assert not t.compute_log_probs(batch).log_probs.any()


def test_gradients_of_log_probs_and_entropy_are_autograds() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator)
    logits[0, 0, 3] = -torch.inf  # a token that cannot be sampled
    ids = torch.randint(0, 3, (2, 5), generator=generator)
    temperature = torch.tensor([[0.5], [2.0]])
    w1, w2 = torch.randn(2, 2, 5, generator=generator)

    def plain(z: Tensor) -> tuple[Tensor, Tensor]:
        log_p = (z / temperature[..., None]).log_softmax(-1)
        return log_p.gather(-1, ids[..., None])[..., 0], -(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1)

    found = []
    for function in (plain, lambda z: per_token(z, ids, temperature)):
        z = logits.clone().requires_grad_()
        log_probs, entropy = function(z)
        (log_probs * w1 + entropy * w2).sum().backward()
        found.append((log_probs.detach(), entropy.detach(), z.grad))
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)


# -- T2: one update is the same update ---------------------------------------------------------------------------


def five_steps(folder: str, *, reverse: bool = False, **settings: Any) -> tuple[list[dict[str, float]], Any]:
    # eps: where a gradient is 0 by symmetry (key biases), AdamW would turn rounding into whole steps
    loss = value_loss if settings.get("head") == "value" else policy_loss
    with trainer(folder, eps=1e-5, **settings) as t:
        batches = [batch_of(rows_of(seed), seed) for seed in range(5)]
        order = torch.arange(6).flip(0) if reverse else torch.arange(6)
        return [t.update(batch[order], loss) for batch in batches], weights(t)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mixtral"])
def test_five_updates_do_not_depend_on_the_split(model: Any, family: str) -> None:
    splits = SPLITS if family == "llama" else SPLITS[-2:]
    expected, expected_weights = five_steps(model(family))
    assert expected[-1]["loss"] != pytest.approx(expected[0]["loss"], abs=1e-2)
    for split in (*splits, {"reverse": True}):
        metrics, moved = five_steps(model(family), **split)
        for one, other in zip(metrics, expected, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5), split
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], abs=1e-5, rel=2e-6), split
            assert one["entropy"] == pytest.approx(other["entropy"], abs=1e-5), split
        assert furthest(moved, expected_weights) <= 5e-5, split


def test_an_update_is_adamw_on_the_whole_batch(llama: str) -> None:
    batch = batch_of(rows_of())
    plain = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.8, 0.9))
    with trainer(llama, weight_decay=0.1, betas=(0.8, 0.9), max_grad_norm=0.5) as t:
        for _ in range(2):
            inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids")}
            logits = plain(**inputs).logits[:, -batch["responses"].shape[1] - 1 : -1] / 0.6
            log_p = logits.log_softmax(-1)
            taken = log_p.gather(-1, batch["responses"][..., None])[..., 0]
            per_response = -taken * batch["advantages"] + 0.01 * (log_p.exp() * log_p).sum(-1)
            loss = (per_response * batch["response_mask"]).sum() / batch["response_mask"].sum()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            metrics = t.update(batch, policy_loss)
            assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
            assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
            assert metrics["grad_norm"] > 0.5
        assert furthest(weights(t), dict(plain.named_parameters())) <= 5e-5


@pytest.mark.parametrize("dtype_of", ["policy", "value"])
def test_bf16_is_near_float32_and_weights_stay_float32(llama: str, dtype_of: str) -> None:
    start = weights(trainer(llama, head=dtype_of, trainable=False))
    full, full_weights = five_steps(llama, head=dtype_of)
    half, half_weights = five_steps(llama, head=dtype_of, dtype="bfloat16")
    assert half[0]["loss"] != full[0]["loss"]
    assert half[0]["loss"] == pytest.approx(full[0]["loss"], rel=2e-2)
    assert half[0]["grad_norm"] == pytest.approx(full[0]["grad_norm"], rel=2e-2)
    assert all(t.dtype == torch.float32 for t in half_weights.values())

    def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
        return sum(float((a[n] - b[n]).square().sum()) for n in a) ** 0.5

    assert distance(half_weights, full_weights) <= 0.2 * distance(full_weights, start)


def test_the_schedule_is_the_one_asked_for(llama: str) -> None:
    settings = {"lr_schedule": "cosine", "lr_warmup_steps": 2, "total_steps": 6, "min_lr_ratio": 0.1}
    with trainer(llama, **settings) as t:
        rates = [t.update(batch_of(rows_of(rows=1)), policy_loss)["learning_rate"] for _ in range(7)]
    assert rates == pytest.approx([0, 5e-4, 1e-3, 8.68198e-4, 5.5e-4, 2.31802e-4, 1e-4], rel=1e-4)


# -- T7: gradients that are not numbers, losses that fail --------------------------------------------------------


def infinite_loss(outputs: Mapping[str, Tensor], batch: TensorDict) -> LossOutput:
    return LossOutput(outputs["log_probs"] * torch.inf)


def test_a_non_finite_gradient_changes_nothing(llama: str, tmp_path: Path) -> None:
    batch = batch_of(rows_of())
    settings = {"lr_schedule": "linear", "total_steps": 9}
    with trainer(llama, **settings) as disturbed, trainer(llama, **settings) as calm:
        for t in (disturbed, calm):
            t.update(batch, policy_loss)
        version = disturbed.export_weights().version
        assert disturbed.update(batch, infinite_loss)["skipped"] == 1
        assert disturbed.export_weights().version == version  # the engine need not load what did not change
        metrics = [t.update(batch, policy_loss) for t in (disturbed, calm)]
        assert metrics[0] == metrics[1]
        assert furthest(weights(disturbed), weights(calm)) == 0
    with trainer(llama, non_finite="raise") as t:
        before = weights(t)
        with pytest.raises(NonFiniteGradient, match="weights were not touched"):
            t.update(batch, infinite_loss)
        assert furthest(weights(t), before) == 0


def test_what_is_no_loss_a_token_is_refused(llama: str) -> None:
    with trainer(llama) as t:
        for wrong in (
            lambda outputs, micro: LossOutput(outputs["log_probs"].mean()),
            lambda o, m: LossOutput(o["log_probs"].detach()),
        ):
            with pytest.raises(TrainerError, match="one loss a response token"):
                t.update(batch_of(rows_of()), wrong)


@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"])
def test_the_loss_is_aggregated_as_configured(llama: str, mode: str) -> None:
    batch = batch_of(rows_of())
    settings = {"loss_aggregation": mode, "loss_scale_factor": 7.0, "micro_batch_size": 2, "max_grad_norm": None}
    with trainer(llama, **settings) as t:
        log_probs, entropy = t.compute_log_probs(batch)
        per_token = policy_loss({"log_probs": log_probs, "entropy": entropy}, batch).per_token
        expected = aggregate(per_token, batch["response_mask"], mode, denominators(batch), scale=7.0)
        assert t.update(batch, policy_loss)["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_accumulated_gradients_are_one_update(llama: str) -> None:
    batch = batch_of(rows_of())
    with trainer(llama) as t, trainer(llama) as whole:
        for part in (batch[:2], batch[2:]):
            t.forward_backward(part, policy_loss, denominators(batch))
        expected = whole.update(batch, policy_loss)
        assert t.optimizer_step()["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert furthest(weights(t), weights(whole)) <= 5e-5


# -- T4: export --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_weights_are_the_files_bit_for_bit(model: Any, family: str) -> None:
    on_disk = load_file(Path(model(family)) / "model.safetensors")
    with trainer(model(family), trainable=False) as t:
        update = t.export_weights()
        exported = weights(t)
    assert furthest(exported, on_disk) == 0
    assert {m.name: m.shape for m in update.tensors} == {name: tuple(x.shape) for name, x in on_disk.items()}
    tied = AutoConfig.from_pretrained(model(family)).tie_word_embeddings
    assert (list(update.tied) == ["lm_head.weight"]) == tied
    assert set(update.tied.values()) <= on_disk.keys()


def test_buckets_hold_fused_groups_whole_and_big_tensors_alone(model: Any) -> None:  # C08
    with trainer(model("mixtral"), trainable=False) as t:
        tensors, tied = named_tensors(t.head.model)
    update = export.weight_update(tensors, tied, 0, bucket_bytes=20_000)
    buckets = [list(bucket) for bucket in update.buckets()]
    assert [name for bucket in buckets for name in bucket] == [*dict.fromkeys(n for b in buckets for n in b)]
    assert {name for bucket in buckets for name in bucket} == tensors.keys()
    sizes = [sum(tensors[name].nbytes for name in bucket) for bucket in buckets]
    assert ["lm_head.weight"] in buckets
    assert len(buckets) < len(tensors)
    groups = {frozenset(group) for group in update.fused_groups}
    attention = "model.layers.1.self_attn."
    assert frozenset(f"{attention}{x}_proj.weight" for x in "qkv") in groups
    assert len(groups) == 4  # q/k/v and experts, twice
    for bucket, size in zip(buckets, sizes, strict=True):
        assert size <= 20_000 or len(bucket) == 1 or frozenset(bucket) in groups
        assert all(group <= set(bucket) or not group & set(bucket) for group in groups)


def test_an_export_is_not_pulled_after_the_weights_moved_on(llama: str) -> None:
    with trainer(llama) as t:
        update = t.export_weights()
        t.update(batch_of(rows_of()), policy_loss)
        with pytest.raises(TrainerError, match="weights of version 0 are gone"):
            next(update.buckets())
        assert t.export_weights().version == 1 == t.export_weights().version == t.policy_version


# -- T5: checkpoints ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["policy", "value"])
def test_resume_is_bit_for_bit(llama: str, tmp_path: Path, head: str) -> None:  # C10
    loss = policy_loss if head == "policy" else value_loss
    settings = {"head": head, "lr_schedule": "linear", "lr_warmup_steps": 1, "total_steps": 8}
    batches = [batch_of(rows_of(seed), seed) for seed in range(5)]
    with trainer(llama, **settings) as straight:
        for batch in batches[:3]:
            straight.export_weights()
            straight.update(batch, loss)
        straight.save_checkpoint(tmp_path / "c")
        expected = [straight.update(batch, loss) for batch in batches[3:]]
        wanted = weights(straight)
    with trainer(llama, **{**settings, "seed": 7}) as resumed:
        resumed.update(batches[4], loss)  # whatever was there before is gone
        resumed.export_weights()
        resumed.load_checkpoint(tmp_path / "c")
        assert resumed.policy_version == 2
        assert resumed.export_weights().version == 3  # the third update was never exported
        assert [resumed.update(batch, loss) for batch in batches[3:]] == expected
        assert furthest(weights(resumed), wanted) == 0
        assert resumed.policy_version == 4


def test_a_checkpoint_is_there_whole_or_not_at_all(
    llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # C12
    def no_space(*_: Any) -> None:
        raise OSError("no space left on device")

    with trainer(llama) as t:
        t.save_checkpoint(tmp_path / "old")
        manifest = (tmp_path / "old" / "manifest.json").read_text()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.torch, "save", no_space)
            for name in ("old", "new"):
                with pytest.raises(OSError, match="no space"):
                    t.save_checkpoint(tmp_path / name)
        assert [path.name for path in tmp_path.iterdir()] == ["old"]
        assert (tmp_path / "old" / "manifest.json").read_text() == manifest
        t.load_checkpoint(tmp_path / "old")
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").touch()
        with pytest.raises(CheckpointError, match="holds something else"):
            t.save_checkpoint(tmp_path / "mine")
        assert (tmp_path / "mine" / "thesis.tex").exists()


def test_broken_and_foreign_checkpoints_are_refused_and_change_nothing(model: Any, tmp_path: Path) -> None:
    def saved(folder: str, family: str = "llama", **settings: Any) -> Path:
        with trainer(model(family), **settings) as t:
            if t.config.trainable:
                t.update(batch_of(rows_of()), value_loss if t.config.head == "value" else policy_loss)
            t.save_checkpoint(tmp_path / folder)
        return tmp_path / folder

    truncated, lacking, other_format, corrupt = (saved(f"broken{i}") for i in range(4))
    (truncated / "model.safetensors").write_bytes((truncated / "model.safetensors").read_bytes()[:-9])
    (lacking / "optimizer.pt").unlink()
    manifest = json.loads((other_format / "manifest.json").read_text())
    (other_format / "manifest.json").write_text(json.dumps({**manifest, "format": "another/1"}))
    size = (corrupt / "optimizer.pt").stat().st_size
    (corrupt / "optimizer.pt").write_bytes(b"\0" * size)
    cases = {
        tmp_path / "nothing": "no manifest",
        truncated: "bytes where",
        lacking: "missing where",
        other_format: "format='another/1'; this trainer needs",
        corrupt: "cannot be read",
        saved("reference", trainable=False): "trainable=false",
        saved("critic", head="value"): "head='value'",
        saved("qwen", "qwen2"): "another model",
    }
    with trainer(model("llama")) as t:
        before = weights(t)
        for folder, message in cases.items():
            with pytest.raises(CheckpointError, match=message):
                t.load_checkpoint(folder)
            assert furthest(weights(t), before) == 0
            assert t.optimizer is not None and t.optimizer.steps == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mixtral"])
def test_plain_transformers_opens_what_was_saved(model: Any, family: str, tmp_path: Path) -> None:
    batch = batch_of(rows_of())
    with trainer(model(family)) as t:
        t.update(batch, policy_loss)
        for _ in range(2):  # the second replaces the first
            t.save_pretrained(tmp_path / "out")
        log_probs = t.compute_log_probs(batch).log_probs
        moved = weights(t)
    ids = torch.tensor([[5, 6, 7]])
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert opened.dtype == torch.float32
    assert furthest(named_tensors(opened)[0], moved) == 0
    with trainer(str(tmp_path / "out"), trainable=False) as again:
        assert torch.equal(again.compute_log_probs(batch).log_probs, log_probs)
        with torch.no_grad():
            assert torch.equal(again.head.model(ids).logits, opened.eval()(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("1+2=3") == load_tokenizer(model(family)).encode(
        "1+2=3"
    )
    old, new = (AutoConfig.from_pretrained(f).to_diff_dict() for f in (model(family), tmp_path / "out"))
    assert old == new
    assert opened.generation_config.eos_token_id == 2


# -- critic ------------------------------------------------------------------------------------------------------


def test_values_are_read_before_each_response_token_and_the_head_is_saved(llama: str, tmp_path: Path) -> None:
    rows = rows_of()
    batch = batch_of(rows)
    with trainer(llama, head="value", packing=True, micro_batch_size=4) as t:
        loss = [t.update(batch, value_loss)["loss"] for _ in range(8)]
        assert loss[-1] < loss[0]
        t.save_pretrained(tmp_path / "critic")
        values = t.compute_values(batch)
        with pytest.raises(UnsupportedCapability, match="head='policy'"):
            t.compute_log_probs(batch)
    backbone = AutoModel.from_pretrained(tmp_path / "critic").eval()
    head = load_file(tmp_path / "critic" / "value_head.safetensors")
    for index, row in enumerate(rows):
        with torch.no_grad():
            hidden = backbone(torch.tensor([row.prompt_ids + row.response_ids])).last_hidden_state[0]
        expected = (hidden @ head["weight"].T + head["bias"])[len(row.prompt_ids) - 1 : -1, 0]
        torch.testing.assert_close(values[index, : len(expected)], expected, atol=1e-5, rtol=0)
    with trainer(str(tmp_path / "critic"), head="value", trainable=False) as again:
        torch.testing.assert_close(again.compute_values(batch), values, atol=1e-5, rtol=0)
    seeds = [trainer(llama, head="value", trainable=False, seed=s).compute_values(batch) for s in (3, 3, 4)]
    assert torch.equal(seeds[0], seeds[1])
    assert not torch.equal(seeds[0], seeds[2])


# -- probes ------------------------------------------------------------------------------------------------------


def test_lost_gradients_are_found_at_start_up(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:  # C30
    head = load_head(llama, TrainerConfig(device="cpu"), torch.device("cpu"))
    head.model.get_input_embeddings().requires_grad_(False)
    probe.check_gradients(head)  # frozen embeddings are no reason for an alarm
    assert all(p.grad is None for p in head.parameters())
    monkeypatch.setattr(probe, "CHECKPOINTING", {"use_reentrant": True})
    monkeypatch.setattr(type(head.model), "enable_input_require_grads", lambda self: None)
    head.model.disable_input_require_grads()
    with pytest.raises(MissingGradient, match=r"20 of 20 parameters lose|1[0-9] of 20 parameters lose"):
        probe.check_gradients(head)


def test_wrong_gradients_are_found_at_start_up(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def detaching(self: Any, **_: Any) -> None:
        for module in self.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = True
                module._gradient_checkpointing_func = lambda f, x, *rest: f(x.detach(), *rest)

    model_class = type(load_causal_lm(llama, dtype=torch.float32, device="cpu"))
    monkeypatch.setattr(model_class, "gradient_checkpointing_enable", detaching)
    with pytest.raises(MissingGradient, match=r"model\.embed_tokens\.weight"):
        trainer(llama, activation_checkpointing=True)


def test_a_model_that_leaks_between_packed_sequences_is_refused(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head = load_head(llama, TrainerConfig(device="cpu", packing=True), torch.device("cpu"))
    original = type(head.model).forward

    def one_causal_mask(self: Any, *, attention_mask: Tensor, logits_to_keep: Any = 0, **inputs: Any) -> Any:
        if attention_mask.ndim == 4:
            attention_mask = torch.ones_like(attention_mask).tril()
        return original(self, attention_mask=attention_mask, logits_to_keep=logits_to_keep, **inputs)

    probe.check_packing(head)
    monkeypatch.setattr(type(head.model), "forward", one_causal_mask)
    with pytest.raises(UnsupportedCapability, match="leak into each other"):
        probe.check_packing(head)


# -- creation and life -------------------------------------------------------------------------------------------


def test_too_few_processes_are_refused(llama: str) -> None:
    with pytest.raises(ConfigError, match="multiply to 2 ranks, and 1 are running; start them with torchrun"):
        trainer(llama, parallel=ParallelConfig(data_parallel_size=2))


def test_bad_models_are_refused_with_the_cure(model: Any, tmp_path: Path) -> None:
    def folder(name: str, **config: Any) -> str:
        (tmp_path / name).mkdir()
        if config:
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        return str(tmp_path / name)

    unknown, encoder = folder("unknown", model_type="lama"), folder("t5", model_type="t5", architectures=["T5Model"])
    for name in (unknown, encoder):
        (Path(name) / "model.safetensors").touch()
    headless = tmp_path / "headless"
    AutoModel.from_pretrained(model("llama")).save_pretrained(headless)
    cases = {
        str(tmp_path / "nowhere"): "no such folder; give",
        folder("empty"): "no config.json .*save_pretrained",
        folder("bare", model_type="llama"): "no weights .*copy the weight files",
        unknown: "check model_type",
        encoder: "no causal language model; give a decoder-only",
        str(headless): "needs weights that are not there .lm_head.weight",
    }
    for path, message in cases.items():
        with pytest.raises(ModelError, match=message):
            trainer(path)
    with pytest.raises(ConfigError, match="no device"):
        resolve_device("gpu0")


def test_dropout_is_off_on_both_sides(tmp_path: Path) -> None:
    folder = make_tiny_model("gpt2", tmp_path, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    batch = batch_of(rows_of())
    losses = [trainer(str(folder)).update(batch, policy_loss)["loss"] for _ in range(2)]
    assert losses[0] == losses[1]
    with trainer(str(folder)) as t:
        t.save_pretrained(tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").resid_pdrop == 0.5  # the model's own recipe is kept


def test_close_and_untrainable(llama: str) -> None:
    t = trainer(llama, trainable=False)
    with pytest.raises(TrainerError, match="trainable=False"):
        t.update(batch_of(rows_of()), policy_loss)
    t.close()
    t.close()
    batch = batch_of(rows_of())
    for call in (t.export_weights, lambda: t.save_pretrained(Path("x")), lambda: t.compute_log_probs(batch)):
        with pytest.raises(TrainerClosed):
            call()


@pytest.fixture
def process_state() -> Iterator[None]:
    """Law I10: what a trainer must leave as it found it."""

    def state() -> list[Any]:
        return [torch.get_default_dtype(), torch.get_num_threads(), random.getstate(), threading.active_count()]

    before, rng = state(), torch.get_rng_state()
    yield
    assert state() == before
    assert torch.equal(torch.get_rng_state(), rng)


def test_the_process_is_left_as_found(llama: str, tmp_path: Path, process_state: None) -> None:
    for settings in ({"packing": True, "activation_checkpointing": True, "dtype": "bfloat16"}, {"head": "value"}):
        with trainer(llama, **settings) as t:
            t.update(batch_of(rows_of(rows=2)), value_loss if t.config.head == "value" else policy_loss)
            t.save_checkpoint(tmp_path / t.config.head)
