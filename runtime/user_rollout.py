"""Checks on what a user's own sampling function, see --rollout, takes and returns."""
import functools
import inspect
import math
import traceback
from pathlib import Path
from textwrap import shorten

from runtime import dist, memory, stop
from runtime.errors import RunError

ROUNDING = 1e-3  # a log-prob of a user's own computation may be above 0 by so much
# what a function of --rollout fills in, and the types
FIELDS = dict(prompt=list, completion=list, text=str, truncated=bool, vllm_logps=list, sampled=list)


def checked(rollout, spec):
    """A function that calls that of --rollout and checks what it returns. spec: the flag's value.

    A signal can end the call. Raises ValueError if the user's function does not take the arguments. The
    function returned here raises RunError, which names the user's function, for an exception in it and
    for the first Rollout that does not fit.
    """
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
