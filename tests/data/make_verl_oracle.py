"""Write verl_oracle.json: small random inputs and what verl makes of them.

verl needs another transformers than this package, so it gets an environment of its own::

    python -m venv /tmp/verl && /tmp/verl/bin/pip install torch verl==0.9.1
    /tmp/verl/bin/python tests/data/make_verl_oracle.py tests/data/verl_oracle.json

Inputs are rounded to six digits, so that the file holds exactly what verl saw.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import verl
from tensordict import TensorDict
from verl.trainer.ppo import core_algos as verl_ppo
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

ROWS, COLUMNS = 6, 7
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
SETTINGS = {
    "gamma": 0.95, "lam": 0.9, "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "value_clip": 0.5,
    "entropy_coef": 0.01, "kl_coef": 0.1, "target": 0.1, "horizon": 100, "scale": 10.0,
}  # fmt: skip


def make_inputs(seed, spread):
    """One random batch; `spread` is how far the policies are apart. Every row ends early or has an observation, or both."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random)

    mask = torch.ones(ROWS, COLUMNS)
    for row, length in enumerate((7, 4, 6, 1, 5, 7)):
        mask[row, length:] = 0
    mask[0, 2:4] = 0
    mask[4, 3] = 0
    mask[5, 0] = 0
    old = -normal(ROWS, COLUMNS).abs() - 0.1
    inputs = {
        "response_mask": mask,
        "group_ids": torch.tensor([0, 1, 0, 2, 1, 0]),  # the group 2 is a group of one
        "token_level_scores": normal(ROWS, COLUMNS) * mask,
        "values": normal(ROWS, COLUMNS),
        "reward_baselines": normal(ROWS),
        "old_log_probs": old,
        "ref_log_prob": old + spread * normal(ROWS, COLUMNS),
        "advantages": normal(ROWS, COLUMNS),
        "returns": normal(ROWS, COLUMNS),
        "new_log_probs": old + spread * normal(ROWS, COLUMNS),
        "new_entropy": normal(ROWS, COLUMNS).abs(),
        "new_values": normal(ROWS, COLUMNS),
        "rollout_log_probs": old + min(spread, 0.6) * normal(ROWS, COLUMNS),
    }
    return {name: torch.tensor(rounded(value)) for name, value in inputs.items()}


def rounded(value):
    """Nested lists of a tensor, six digits."""
    return json.loads(json.dumps(value.tolist()), parse_float=lambda text: round(float(text), 6))


def advantages(x):
    mask, rewards = x["response_mask"], x["token_level_scores"]
    index = x["group_ids"].numpy()
    gamma, lam = SETTINGS["gamma"], SETTINGS["lam"]
    grpo = verl_ppo.compute_grpo_outcome_advantage
    results = {
        "gae": verl_ppo.compute_gae_advantage_return(rewards, x["values"], mask, gamma, lam),
        "grpo": grpo(rewards, mask, index, norm_adv_by_std_in_grpo=True),
        "grpo_centred": grpo(rewards, mask, index, norm_adv_by_std_in_grpo=False),
        "rloo": verl_ppo.compute_rloo_outcome_advantage(rewards, mask, index),
        "reinforce_plus_plus": verl_ppo.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, config=SimpleNamespace(gamma=gamma)
        ),
        "remax": verl_ppo.compute_remax_outcome_advantage(rewards, x["reward_baselines"], mask),
    }
    return {name: {"advantages": a.tolist(), "returns": r.tolist()} for name, (a, r) in results.items()}


def kl_estimates(x):
    results = {}
    for estimator in ("k1", "abs", "k2", "k3"):
        log_probs = x["new_log_probs"].clone().requires_grad_()
        kl = verl_ppo.kl_penalty(log_probs, x["ref_log_prob"], estimator)
        kl.sum().backward()
        results[estimator] = {"value": kl.tolist(), "gradient": log_probs.grad.tolist()}
    return results


def kl_penalties(x):
    results = {}
    for estimator in ("k1", "abs", "k2", "k3"):
        controller = verl_ppo.AdaptiveKLController(SETTINGS["kl_coef"], SETTINGS["target"], SETTINGS["horizon"])
        names = ("response_mask", "token_level_scores", "old_log_probs", "ref_log_prob")
        batch = TensorDict({name: x[name] for name in names}, batch_size=[ROWS])
        data, metrics = apply_kl_penalty(SimpleNamespace(batch=batch), controller, estimator)
        results[estimator] = {
            "token_level_rewards": data.batch["token_level_rewards"].tolist(),
            "kl": metrics["actor/reward_kl_penalty"],
            "coef_after": float(controller.value),
        }
    return results


def policy_losses(x):
    """Each objective in each aggregation: alone, and with entropy bonus and k3 loss; its gradient, its metrics."""
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio_low=SETTINGS["clip_low"],
        clip_ratio_high=SETTINGS["clip_high"], clip_ratio_c=SETTINGS["dual_clip"],
    )  # fmt: skip
    mask = x["response_mask"]
    results = {}
    for objective in ("vanilla", "gspo", "cispo"):
        entry = {"loss": {}, "loss_with_entropy_and_kl": {}, "gradient": {}}
        for mode in MODES:
            log_probs = x["new_log_probs"].clone().requires_grad_()
            loss, metrics = verl_ppo.get_policy_loss_fn(objective)(
                x["old_log_probs"], log_probs, x["advantages"], mask, mode, config
            )
            loss.backward()
            entropy = verl_ppo.agg_loss(x["new_entropy"], mask, mode)
            kl = verl_ppo.agg_loss(verl_ppo.kl_penalty(x["new_log_probs"], x["ref_log_prob"], "k3"), mask, mode)
            entry["loss"][mode] = loss.item()
            whole = loss - SETTINGS["entropy_coef"] * entropy + SETTINGS["kl_coef"] * kl
            entry["loss_with_entropy_and_kl"][mode] = whole.item()
            entry["gradient"][mode] = log_probs.grad.tolist()
        results[objective] = entry | {"metrics": metrics}
    return results


def corrections(x):
    """Importance weights of what was sampled, truncated and masked, a token and a sequence; and a loss with them."""
    mask = x["response_mask"]
    config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True)
    results = {}
    for level in ("token", "sequence"):
        for threshold in ("2.0", "0.5_2.0"):
            for normalize in (False, True):
                weights, metrics = compute_rollout_correction_weights(
                    x["old_log_probs"] - x["rollout_log_probs"], mask, level, threshold, normalize
                )
                loss, _ = verl_ppo.get_policy_loss_fn("vanilla")(
                    x["old_log_probs"], x["new_log_probs"], x["advantages"], mask, "token-mean", config, weights
                )
                results[f"{level} {threshold} {normalize}"] = {
                    "weights": weights.tolist(),
                    "loss": loss.item(),
                    "ess": metrics["rollout_is_eff_sample_size"],
                    "mean": metrics["rollout_is_mean"],
                }
    return results


def value_losses(x):
    results = {"loss": {}, "gradient": {}}
    for mode in MODES:
        values = x["new_values"].clone().requires_grad_()
        loss, clipped = verl_ppo.compute_value_loss(
            values, x["returns"], x["values"], x["response_mask"], SETTINGS["value_clip"], mode
        )
        loss.backward()
        results["loss"][mode] = loss.item()
        results["gradient"][mode] = values.grad.tolist()
        results["clip_fraction"] = clipped.item()
    return results


def aggregations(x):
    """Of the advantages as if they were losses, with a row that has no token."""
    mask = x["response_mask"].clone()
    mask[3] = 0
    results = {mode: verl_ppo.agg_loss(x["advantages"], mask, mode).item() for mode in MODES}
    scaled = verl_ppo.agg_loss(x["advantages"], mask, "seq-mean-token-sum-norm", loss_scale_factor=SETTINGS["scale"])
    return {"empty_row": 3, "by_mode": results, "scaled": scaled.item()}


def main(path):
    cases = {}
    for name, (seed, spread) in {"near": (0, 0.3), "far": (1, 12.0)}.items():
        x = make_inputs(seed, spread)
        cases[name] = {
            "inputs": {key: rounded(value) for key, value in x.items()},
            "advantages": advantages(x),
            "kl_estimates": kl_estimates(x),
            "kl_penalties": kl_penalties(x),
            "policy_losses": policy_losses(x),
            "value_losses": value_losses(x),
            "corrections": corrections(x),
            "aggregations": aggregations(x),
        }
    versions = {"verl": verl.__version__, "torch": torch.__version__}
    Path(path).write_text(json.dumps({"versions": versions, "settings": SETTINGS, "cases": cases}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
