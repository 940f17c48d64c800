"""Checks of a run: rehearsal before step 0, verdicts, optimizer steps, and what a user's rollout returns."""
import dataclasses
import functools
import inspect
import json
import math
import random
import traceback
from pathlib import Path
from textwrap import shorten

import torch

from runtime import dist, memory, stop
from runtime.batch import Rollout, collate
from runtime.dist import RunError
from runtime.model import on_device
from runtime.shape import empty_model
from runtime.trainer import adamw_states, set_lr

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

# Largest mean |difference| of log-probs that the dtype explains; a larger --mismatch_bound takes its place.
# float32: 8,192 times its rounding, 2**-23. bfloat16: two kernels differ by 0.02 to 0.05.
NOISE = {"float32": 2**-10, "bfloat16": 0.15}

# The same if kernels and shapes are equal: 64 times the rounding of float32, the dtype of log-probs.
ROUNDING = 2**-17


@torch.no_grad()
def check_packing(policy, cfg):
    """Raises RunError if a log-prob depends on the other sequences of a pack. Collective.

    With random tokens, two completions per prompt:
    1. Packed and alone, log-probs differ by no more than the noise of the dtype.
    2. If every second completion is replaced, the log-probs of the others do not change: not by one bit, in
       any dtype, as shapes and kernels stay the same. Two exceptions have the bound of 1: experts, which then
       multiply other numbers of tokens, and a device whose kernels do not repeat their own results.
    """
    rng, vocab = random.Random(0), empty_model(cfg.model).config.get_text_config().vocab_size

    def tokens(most):
        return [rng.randrange(vocab) for _ in range(min(16, most))]

    def logps(sequences):
        rollouts = [Rollout(prompt, completion, "", False, [0.0] * len(completion))
                    for prompt, completion in sequences]
        return policy(collate(rollouts, dist.device()))[0].view(len(sequences), -1)  # (B, R / B)

    prompts = [tokens(cfg.max_prompt), tokens(cfg.max_prompt)]
    sequences = [(prompt, tokens(cfg.max_tokens)) for prompt in prompts for _ in range(2)]
    replaced = [(prompt, completion if i % 2 else tokens(cfg.max_tokens))
                for i, (prompt, completion) in enumerate(sequences)]
    packed = logps(sequences)  # (4, R / 4)
    alone = torch.cat([logps([sequence]) for sequence in sequences])  # (4, R / 4)
    repeats = torch.equal(packed, logps(sequences))
    experts = any("expert" in name for name, _ in policy.named_parameters())
    noise = max(NOISE.get(cfg.dtype, 0.0), cfg.mismatch_bound)
    for difference, bound, fault in (
        (packed - alone, noise, "packed and single sequences give different log-probs"),
        ((packed - logps(replaced))[1::2], ROUNDING if repeats and not experts else noise,
         "the log-probs of a sequence depend on the others in its pack"),
    ):
        mean = max(dist.all_gather([difference.abs().nan_to_num(torch.inf).mean().item()]))
        if mean > bound:
            raise RunError(
                f"--model {cfg.model}: {fault} (mean |difference| {mean:.2g}, bound {bound:.2g}): this model "
                "is not supported")


def largest_pack(cfg):
    """(prompt tokens, completion tokens) of each sequence of the largest pack that can occur.

    One sequence has the largest length. The others have a prompt of one token, so that the pack has the most
    tokens and nearly the most completion tokens, which are the rows of the LM head.
    """
    sequences = [(cfg.max_prompt, cfg.max_tokens)]
    left = cfg.pack_tokens - cfg.max_prompt - cfg.max_tokens
    while left >= 2:
        sequences.append((1, min(left - 1, cfg.max_tokens)))
        left -= sum(sequences[-1])
    return sequences


def rehearse(policy, ref, cfg):
    """Takes two steps on the largest pack at learning rate 0, then resets AdamW: weights and optimizer are as
    before, and too little memory shows before step 0. Collective.

    Twice, because the first step creates AdamW's moments and the second needs memory beside them. Raises
    RunError if log-probs depend on the pack (see check_packing), or if policy and reference differ already.
    """
    check_packing(policy, cfg)
    vocab = empty_model(cfg.model).config.get_text_config().vocab_size
    rollouts = [Rollout([i % vocab] * prompt, [0] * completion, "", True, [0.0] * completion, weight=1.0)
                for i, (prompt, completion) in enumerate(largest_pack(cfg))]  # hardly two equal prompts
    largest = collate(rollouts, dist.device())
    set_lr(policy, 0, dataclasses.replace(cfg, lr=0.0))
    if ref is not None:
        with torch.no_grad(), on_device(ref):
            largest.ref, _ = ref(largest)  # (R,)
    for _ in range(2):
        logp, _ = policy(largest)  # (R,)
        if ref is not None:
            difference = (logp.detach() - largest.ref).abs().mean().item()
            if not difference <= NOISE.get(cfg.dtype, NOISE["float32"]):  # also when it is NaN
                raise RunError(f"policy and reference differ before the first step (mean |difference| of "
                               f"log-probs {difference:.2g}): the model was loaded twice with different "
                               "weights; is its checkpoint complete?")
        policy.backward(-logp.mean())
        policy.step()
    for state in adamw_states(policy):
        for name in state:
            state[name] *= 0  # in place for tensors; DeepSpeed's CPU AdamW counts its steps in an int


ABOVE_0 = 1e-3  # a log-prob of a user's own computation may be above 0 by so much

# what a function of --rollout fills in, and the types
FIELDS = dict(prompt=list, completion=list, text=str, truncated=bool, vllm_logps=list, sampled=list)


def checked(rollout, spec):
    """A function that calls that of --rollout and checks what it returns. spec: the flag's value.

    Raises ValueError if the user's function does not take the arguments. The
    function returned here raises RunError, which names the user's function, for an exception in it and
    for the first Rollout that does not fit.
    """
    try:
        inspect.signature(rollout).bind(*range(5))
        inspect.signature(rollout).bind(*range(6), top_p=1.0)
    except TypeError as e:
        raise ValueError(f"--rollout {spec}: {e}; it must take llm, prompts, n, temperature, max_tokens, "
                         "seeds=None, **sampling") from None

    @functools.wraps(rollout)
    def sample(llm, prompts, n, *args, **sampling):
        try:
            rollouts = rollout(llm, [list(prompt) for prompt in prompts], n, *args, **sampling)
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
            ("vllm_logps", lambda x: isinstance(x, (int, float)) and -math.inf < x <= ABOVE_0,
             "a log-prob, finite and at most 0"),
            ("sampled", lambda x: type(x) is bool, "True or False")):
        for i, x in enumerate(getattr(r, name)):
            if not fits(x):
                return f"its {name}[{i}] is {shown(x)}, not {wanted}"
    return ""
