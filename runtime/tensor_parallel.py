"""A vLLM engine over several ranks (--tp): each asks for its own prompts, and they generate them together."""
from runtime import dist, stop
from runtime.errors import RunError

STEPS = 16  # of the engine, from one look for signals to the next


class SharedLLM:
    """vLLM's LLM object of one of the ranks. What it does is collective among the ranks of its engine.

    vLLM's external launcher expects that every rank of an engine makes the same calls in the same order.
    """

    def __init__(self, llm):
        self._llm, self._steps, self._may_stop = llm, 0, False
        self._step, llm.llm_engine.step = llm.llm_engine.step, self._step_unless_stopped

    def __getattr__(self, name):
        return getattr(self._llm, name)

    def generate(self, prompts, params, **options):
        """LLM.generate for the prompts of this rank: a RequestOutput per prompt. No prompts are allowed.

        params: one SamplingParams, or a list with one per prompt. Raises RunError for random sampling without
        a seed: the ranks would draw different tokens.
        """
        # A signal must not take one rank out of the call while the others wait for it: see below.
        self._may_stop, stop.in_call = stop.in_call, False
        params = params if isinstance(params, list) else [params] * len(prompts)
        requests = dist.engine_gather(list(zip(prompts, params)))
        all_prompts, all_params = [[r[i] for part in requests for r in part] for i in (0, 1)]
        if any(p.temperature > 0 and p.seed is None for p in all_params):
            raise RunError("--tp: a rollout function has to give each SamplingParams a seed")
        outputs = self._llm.generate(all_prompts, all_params, **options)
        first = sum(map(len, requests[:dist.engine_rank()]))
        return outputs[first:first + len(prompts)]

    def _step_unless_stopped(self):
        """A step of the engine. Every STEPS steps, all ranks leave the call if one of them got a signal."""
        self._steps += 1
        if self._may_stop and self._steps % STEPS == 0:
            if any(dist.engine_gather(stop.received is not None)):
                raise stop.Stopped
        return self._step()
