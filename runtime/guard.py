"""Checks on rollouts, verdicts and optimizer steps: before a step is taken, and whether DeepSpeed took it."""
import functools
import inspect
import json
import math
import traceback
from pathlib import Path
from textwrap import shorten

from runtime import dist
from runtime.errors import RunError

MOST_SKIPPED = 3  # steps in a row
ROUNDING = 1e-3  # a log-prob of a user's own computation may be above 0 by so much
# what a function of --rollout fills in, and the types
FIELDS = dict(prompt=list, completion=list, text=str, truncated=bool, vllm_logps=list, sampled=list)


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


def checked(rollout, spec):
    """A function that calls that of --rollout and checks what it returns. spec: the flag's value.

    A signal can end the call. Raises ValueError if the user's function does not take the arguments. The
    function returned here raises RunError, which names the user's function, for an exception in it and
    for the first Rollout that does not fit.
    """
    from runtime import memory, stop  # not above: they import preflight, which imports this file
    try:
        inspect.signature(rollout).bind(*range(5))
        inspect.signature(rollout).bind(*range(6), top_p=1.0, top_k=0)
    except TypeError as e:
        raise ValueError(f"--rollout {spec}: {e}; it must take llm, prompts, n, temperature, max_tokens, "
                         "seeds=None, **sampling") from None

    @functools.wraps(rollout)
    def sample(llm, prompts, n, *args, **sampling):
        call = functools.partial(stop.interruptible, rollout)
        if dist.engine_ranks() > 1:  # no rank may leave while others wait for it in llm.generate
            call = rollout
        try:
            rollouts = call(llm, [list(prompt) for prompt in prompts], n, *args, **sampling)
        except (Exception, SystemExit) as e:
            if isinstance(e, RunError) or memory.is_out_of_memory(e) or stop.is_lost_rank(e):
                raise
            frames = traceback.extract_tb(e.__traceback__)
            file = str(Path(spec.rpartition(":")[0]).resolve())
            last = [frame for frame in frames if frame.filename == file][-1:] or frames
            text = shorten(f"{type(e).__name__}: {e}", 500)
            where = f"{last[-1].filename}:{last[-1].lineno}"
            raise RunError(f"--rollout {spec}: {text} ({where})") from e
        found = len(rollouts) if isinstance(rollouts, (list, tuple)) else shown(rollouts)
        if found != len(prompts) * n:
            raise RunError(f"--rollout {spec}: it must return a list of {n} Rollouts for each of "
                           f"{len(prompts)} prompts, in their order; it returned {found}")
        vocabulary = llm.llm_engine.model_config.get_vocab_size()
        for i, r in enumerate(rollouts):
            if problem := misfit(r, prompts[i // n], vocabulary):
                raise RunError(
                    f"--rollout {spec}: Rollout {i} of {len(rollouts)} does not fit: {problem}")
            r.advantages = [0.0] * len(r.completion)  # which may have grown since it was made
        return rollouts

    return sample


def shown(x):
    """A user's object, for a message."""
    return shorten(repr(x), 60)


def misfit(r, prompt, vocabulary):
    """What is wrong with a user's Rollout for a prompt (token ids), in words; "" if nothing.

    vocabulary: the number of tokens of the model.
    """
    for name, kind in FIELDS.items():
        if not hasattr(r, name):
            return f"it is {shown(r)}, not a Rollout"
        if not isinstance(getattr(r, name), kind):
            return f"its {name} is {shown(getattr(r, name))}, not a {kind.__name__}"
    if r.prompt != prompt:
        return "it has another prompt; the Rollouts must be in the order of the prompts"
    if not len(r.completion) == len(r.vllm_logps) == len(r.sampled) or not any(r.sampled):
        return (f"its completion has {len(r.completion)} tokens, {len(r.vllm_logps)} log-probs and "
                f"{len(r.sampled)} marks whether a token was sampled; they must be equally many, with "
                "at least one sampled token")
    for name, fits, wanted in (
            ("completion", lambda x: type(x) is int and 0 <= x < vocabulary,
             f"a token id of the model, an int from 0 to {vocabulary - 1}"),
            ("vllm_logps", lambda x: isinstance(x, (int, float)) and -math.inf < x <= ROUNDING,
             "a log-prob, finite and at most 0"),
            ("sampled", lambda x: type(x) is bool, "True or False")):
        for i, x in enumerate(getattr(r, name)):
            if not fits(x):
                return f"its {name}[{i}] is {shown(x)}, not {wanted}"
    return ""


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
