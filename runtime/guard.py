"""Checks on optimizer steps: before a step is taken, and whether DeepSpeed took it."""
import json
import math

from runtime import dist

MOST_SKIPPED = 3  # steps in a row


def check_step(metrics, mismatch_bound):
    """Raises RuntimeError if vLLM sampled with other weights than the trainer's or the loss is not finite."""
    mismatch = metrics["mismatch/mean_abs"]
    if not mismatch <= mismatch_bound:  # also when it is NaN
        raise RuntimeError(
            "vLLM and the trainer disagree about the tokens that vLLM sampled: the mean |log-prob "
            f"difference| {mismatch:.2g} is above --mismatch_bound {mismatch_bound:.2g}. Either vLLM has "
            "other weights than the trainer (a sync failed), or the two compute this model differently. "
            "The step was not taken.")
    if not math.isfinite(metrics["loss"]):
        raise RuntimeError(f"the loss is {metrics['loss']}; the step was not taken")


class SkippedSteps:
    """Keeps the batches of skipped steps in <folder>/quarantine/; ends a run that does not recover."""

    def __init__(self, folder):
        self.folder, self.in_a_row = folder / "quarantine", 0

    def add(self, step, history, groups):
        """history: metrics of the step's updates; groups: its rollouts. Each rank writes its own.

        Raises RuntimeError after 3 skipped updates in a row.
        """
        for metrics in history:
            self.in_a_row = self.in_a_row + 1 if metrics["skipped"] else 0
        if any(metrics["skipped"] for metrics in history):
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"step-{step}-rank-{dist.rank()}.jsonl").open("w") as f:
                for r in (r for group in groups for r in group):
                    f.write(json.dumps({
                        "prompt": r.prompt, "completion": r.completion, "text": r.text, "reward": r.reward,
                        "advantage": r.advantage, "weight": r.weight, "vllm_logps": r.vllm_logps}) + "\n")
            dist.print_once(f"note: step {step} has a gradient that is not finite; see {self.folder}")
        if self.in_a_row >= MOST_SKIPPED:
            raise RuntimeError(
                f"{self.in_a_row} optimizer steps in a row had a gradient that is not finite; none was "
                "taken. Likely causes: --lr too high (the weights diverge), very large rewards, a broken "
                f"checkpoint. The batches are in {self.folder}.")
