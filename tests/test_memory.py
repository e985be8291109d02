"""Offload: what leaves, what stays, and what comes back."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from verl_adaptor.errors import TrainerError
from verl_adaptor.memory import Offloaded


def sizes(*tensors: torch.Tensor) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in tensors]


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]),
    rows=st.integers(1, 40),
    columns=st.integers(1, 7),
    chosen=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_bits_views_and_ties_return_whatever_is_given(dtype, rows, columns, chosen, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(0, 256, (rows * columns * 16,), dtype=torch.uint8, generator=generator)
    bits = (whole % 2 if dtype == torch.bool else whole).clone()
    tensor = bits.view(dtype)  # NaNs of all kinds among them
    views = [tensor[: len(tensor) // 2], tensor.unflatten(0, (-1, 2)).T, tensor]
    before = bits.clone()
    away = Offloaded(views[:chosen], "disk")
    facts = away.nbytes, sizes(tensor, *views)
    away.restore()  # first of all: a failing assertion would print tensors that are not there
    assert facts == (len(before), [0] * 4)
    assert torch.equal(bits, before)
    assert tensor.untyped_storage().resizable(), "the next time it could not be offloaded"
    tensor.fill_(1)
    assert all(bool((view == 1).all()) for view in views), "a view went its own way"


def test_every_storage_moves_once_and_host_memory_stays_where_it_is() -> None:
    layer, other = nn.Linear(8, 8), nn.Linear(8, 8)
    other.weight = layer.weight
    layer.weight.grad = torch.ones(8, 8)
    tensors = [layer.weight, other.weight, layer.weight.grad, layer.bias, torch.empty(0)]
    assert Offloaded(tensors, "host").nbytes == 0 and sizes(layer.weight) == [256]
    away = Offloaded(tensors, "disk")
    assert away.nbytes == 2 * 256 + 32
    away.restore()
    assert other.weight is layer.weight and float(layer.weight.grad.sum()) == 64


def test_what_was_mapped_from_a_file_leaves_too(tmp_path: Path) -> None:
    save_file({"w": torch.arange(1000.0)}, tmp_path / "w.safetensors")
    parameter = nn.Parameter(load_file(tmp_path / "w.safetensors")["w"])
    mapped = torch.from_file(str(tmp_path / "w.safetensors"), size=100, dtype=torch.uint8)
    view, first = mapped[10:20], mapped.clone()
    parameter.detach().numpy()  # after this, torch does not resize it either
    assert not mapped.untyped_storage().resizable() and not parameter.untyped_storage().resizable()
    away = Offloaded([parameter, mapped], "disk")
    facts = sizes(parameter, mapped, view)
    away.restore()
    assert facts == [0, 0, 0]
    mapped += 1
    assert torch.equal(view, first[10:20] + 1), "a view that nobody named stayed behind"
    mapped -= 1
    assert torch.equal(parameter, torch.arange(1000.0)) and torch.equal(mapped, first)
    (parameter * 2).sum().backward()
    assert parameter.grad is not None


def test_a_full_disk_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1 << 16)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Path("/dev/full").open("r+b", 0))  # noqa: SIM115
    with pytest.raises(TrainerError, match=r"524288 bytes could not be written to .*nothing was offloaded.*TMPDIR"):
        Offloaded([tensor], "disk")
    assert torch.equal(tensor, torch.arange(1 << 16))


def test_no_file_is_left_and_a_short_one_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    away = Offloaded([torch.ones(1000)], "disk")
    assert list(tmp_path.iterdir()) == []  # unnamed: gone with the process, even after a crash
    assert away._file is not None
    away._file.truncate(100)
    with pytest.raises(TrainerError, match="ended after 100 of 4000 bytes: the trainer's state is lost"):
        away.restore()
