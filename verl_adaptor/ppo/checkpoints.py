"""Run checkpoints: everything a run needs to go on as if it had never stopped.

    DIR/checkpoints/step-000050/
        actor/ critic/      what the trainers saved
        state.json          step, data position, KL controller, evaluations
        pipeline.pkl        of an asynchronous run: what was in flight

A folder is written under a temporary name and renamed when it is whole, so a run killed at any moment finds either
the old checkpoint or the new one, never half of one (C12).
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_adaptor.config import CheckpointConfig
from verl_adaptor.errors import CheckpointError
from verl_adaptor.ppo.evaluate import Evaluation

if TYPE_CHECKING:
    from verl_adaptor.ppo.loop import PPO

_PIPELINE = "pipeline.pkl"


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder
        self.config = config

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        return max(self.folder.glob("step-??????"), default=None)

    def newest_step(self) -> int:
        """Its step; 0 without one."""
        newest = self.newest()
        return int(newest.name.removeprefix("step-")) if newest else 0

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to save after this step."""
        return last or bool(self.config.every and step % self.config.every == 0)

    def save(self, run: PPO, step: int, pipeline: Mapping[str, Any] | None = None) -> None:
        """Write the checkpoint of `step` and delete those that are older than the newest `keep`.

        Args:
            run: whose parts.
            step: updates done.
            pipeline: of an asynchronous run: `Pipeline.state_dict()`.
        """
        final = self.folder / f"step-{step:06d}"
        partial = self.folder / f"{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        run.actor.save_checkpoint(partial / "actor")
        if run.critic is not None:
            run.critic.save_checkpoint(partial / "critic")
        state = {
            "step": step,
            "prompts": run.prompts.state_dict(),
            "kl": run.kl.state_dict(),
            "evaluations": {str(at): evaluation.state_dict() for at, evaluation in run.evaluations.items()},
        }
        if pipeline is not None:
            (partial / _PIPELINE).write_bytes(pickle.dumps(pipeline))  # prompts' facts may be what JSON cannot tell
        (partial / "state.json").write_text(json.dumps(state), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in sorted(self.folder.glob("step-??????"))[: -self.config.keep]:
            shutil.rmtree(old)

    def restore(self, run: PPO, pipeline: Callable[[dict[str, Any]], None] | None = None) -> int:
        """Load the newest checkpoint into the run's parts; returns the steps done, 0 without a checkpoint (C10).

        Args:
            run: whose parts.
            pipeline: of an asynchronous run: is handed what was in flight.
        """
        newest = self.newest()
        if newest is None:
            return 0
        try:
            state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{newest} cannot be read ({error}); delete it to resume from an older one."
            ) from error
        run.actor.load_checkpoint(newest / "actor")
        if run.critic is not None:
            run.critic.load_checkpoint(newest / "critic")
        run.prompts.load_state_dict(state["prompts"])
        run.kl.load_state_dict(state["kl"])
        run.evaluations = {int(at): Evaluation.from_state(e) for at, e in state["evaluations"].items()}
        if pipeline is not None:
            pipeline(pickle.loads((newest / _PIPELINE).read_bytes()))
        return int(state["step"])
