"""Checks on an optimizer step before it is taken."""
import math


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
