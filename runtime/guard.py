"""Checks on verdicts and optimizer steps: before a step is taken, and whether DeepSpeed took it."""
import json
import math

from runtime import dist
from runtime.errors import RunError

MOST_SKIPPED = 3  # steps in a row


def check_step(metrics, mismatch_bound, rollout=""):
    """Raises RunError if vLLM sampled with other weights than the trainer's or the loss is not finite.

    rollout: the value of --rollout, whose function may also have returned other log-probs than vLLM's.
    """
    mismatch = metrics["mismatch/mean_abs"]
    if not mismatch <= mismatch_bound:  # also when it is NaN
        user = f"--rollout {rollout} returned other ids or log-probs than vLLM's, or " * bool(rollout)
        raise RunError(
            "vLLM and the trainer disagree about the tokens that vLLM sampled: the mean |log-prob "
            f"difference| {mismatch:.2g} is above --mismatch_bound {mismatch_bound:.2g}. Either {user}vLLM "
            "has other weights than the trainer (a sync failed), or the two compute this model differently. "
            "The step was not taken.")
    if not math.isfinite(metrics["loss"]):
        raise RunError(f"the loss is {metrics['loss']}; the step was not taken")


def check_verdicts(prefix, values, metrics, verifier):
    """Raises RunError if no completion of any rank got a verdict. Collective.

    values: a number or None per completion of this rank. metrics: see stats.add_counts, also for prefix.
    verifier: may have `crashes`, a dict with the last line of the first crash of each reward function.
    """
    total, verdicts = dist.all_sum(len(values), sum(value is not None for value in values))
    if verdicts:
        return
    crashes = dist.all_gather(list(getattr(verifier, "crashes", {}).values()))
    counts = "".join(f"{prefix}/{name} {metrics.get(f'{prefix}/{name}', 0):.0f}, "
                     for name in ("timeouts", "crashes"))
    raise RunError(
        f"none of {total:.0f} completions got a verdict ({counts}the others None)"
        + "".join(f"; first crash: {text[:300]}" for text in crashes[:1])
        + ". Check the reward function and the columns of the data; --reward_timeout is its time limit.")


def count_skipped(in_a_row, step, history, groups, folder):
    """Returns how many optimizer steps in a row were skipped, up to the end of this step.

    history: metrics of the step's updates; groups: its rollouts, which go to <folder>/quarantine/ if one of
    them was skipped (each rank writes its own). Raises RunError after 3 in a row.
    """
    for metrics in history:
        in_a_row = in_a_row + 1 if metrics["skipped"] else 0
    quarantine = folder / "quarantine"
    if any(metrics["skipped"] for metrics in history):
        quarantine.mkdir(parents=True, exist_ok=True)
        with (quarantine / f"step-{step}-rank-{dist.rank()}.jsonl").open("w") as f:
            for r in (r for group in groups for r in group):
                f.write(json.dumps({
                    "prompt": r.prompt, "completion": r.completion, "text": r.text, "reward": r.reward,
                    "advantages": r.advantages, "weight": r.weight, "vllm_logps": r.vllm_logps}) + "\n")
        dist.print_once(f"note: step {step} has a gradient that is not finite; see {quarantine}")
    if in_a_row >= MOST_SKIPPED:
        raise RunError(
            f"{in_a_row} optimizer steps in a row had a gradient that is not finite; none was taken. "
            "Likely causes: --lr too high (the weights diverge), very large rewards, a broken checkpoint. "
            f"The batches are in {quarantine}.")
    return in_a_row
