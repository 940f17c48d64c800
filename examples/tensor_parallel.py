"""vLLM engines that several ranks share (tensor parallel): weights that do not fit one GPU.

    torchrun --nproc_per_node 2 -m examples.tensor_parallel --tp 2       flags of nano_rlvr.py work

Ranks 0 to tp - 1 share an engine, the next tp ranks the second one, and so on. vLLM's external
launcher expects the same calls in the same order from every rank of an engine. So the ranks gather
their prompts before each call, and each takes its own completions. After a sync they add up the
checksums of their shards: each of them then knows whether all shards are right.
"""
import argparse
import os

import torch

import nano_rlvr as nr
from runtime import memory, ranks, sync
from runtime.batch import flatten
from runtime.messages import RunError


class SharedEngine(nr.Sampler):
    """nano_rlvr's Sampler, of which `tp` ranks share one. All that it does is collective."""

    def __init__(self, cfg, tp):
        if ranks.world_size() % tp:
            raise RunError(f"--tp {tp}: must divide the number of ranks, {ranks.world_size()}")
        self._group, _ = torch.distributed.new_subgroups(tp)
        sequences = min(memory.most_sequences(cfg) * tp, 1024)
        # vLLM's own all-reduce ends the process if segments are expandable (vLLM issue 42609)
        super().__init__(
            cfg,
            tensor_parallel_size=tp,
            disable_custom_all_reduce=True,
            max_num_seqs=sequences,
            process=self.gather(os.getpid())[0])
        of_shard = sync.vllm_checksums

        def vllm_checksums(model, sent):
            shards = self.gather(of_shard(model, sent))
            return of_engine(shards, sent)

        sync.vllm_checksums = vllm_checksums

    def gather(self, item):
        """The items of the ranks that share this engine. Collective among them."""
        items = [None] * self._group.size()
        torch.distributed.all_gather_object(items, item, self._group)
        return items

    def generate(self, prompts, params, **options):
        """LLM.generate for the prompts of this rank: a RequestOutput each. The list may be empty.

        params: one SamplingParams, or a list with one per prompt. Raises RunError if one with
        temperature > 0 has no seed: the ranks would draw other tokens.
        """
        if not isinstance(params, list):
            params = [params] * len(prompts)
        requests = self.gather(list(zip(prompts, params)))  # a list per rank
        every_prompt = []
        every_params = []
        for prompt, p in flatten(requests):
            if p.temperature > 0 and p.seed is None:
                raise RunError("--tp: a rollout function has to give each SamplingParams a seed")
            every_prompt.append(prompt)
            every_params.append(p)
        outputs = super().generate(every_prompt, every_params, **options)
        first = sum(map(len, requests[:self._group.rank()]))
        return outputs[first:first + len(prompts)]


def of_engine(shards, sent):
    """sync.vllm_checksums of each shard -> of the whole engine, as if it were on one rank.

    The checksums of shards add up. Of what several ranks have a copy, all copies but one are
    subtracted: every rank has a whole norm. If there are few key heads, several ranks have the same
    rows of a fused parameter, but not of its first part (query, gate).
    """
    whole = {}
    for name, (parts, *_) in shards[0].items():
        elements = sum(rank[name][1] for rank in shards)
        total = sum(rank[name][2] for rank in shards)
        if not elements:  # repacked for a kernel
            whole[name] = parts, 0, 0
            continue
        of_parts = [sent[part] for part in parts]
        # once: the first part of a fused parameter; repeated: what several ranks have a copy of
        fused = int(len(parts) > 1)
        once = of_parts[:fused]
        repeated = of_parts[fused:]
        size = sum(x.elements for x in repeated)
        rest = elements - sum(x.elements for x in once)
        more = rest // size - 1 if size else 0  # copies that count twice
        elements -= more * size
        total -= more * sum(x.checksum for x in repeated)
        whole[name] = parts, elements, total
    return whole


def plan_shards(tp):
    """Lets the memory plan count a share of vLLM's weights on each rank. Replaces two functions."""
    step_bytes = memory.step_bytes
    kv_cache_bytes = memory.kv_cache_bytes

    def elsewhere(cfg, parameters):  # bytes of vLLM's weights on the other ranks of an engine
        return parameters * getattr(torch, cfg.dtype).itemsize * (1 - 1 / tp)

    def step(cfg, shape, gpu):
        parts = step_bytes(cfg, shape, gpu)
        if gpu:
            saved = elsewhere(cfg, shape.parameters)
            for name in ("vLLM, at least", "total"):
                generate, update, host = parts[name]
                parts[name] = [generate - saved, update, host]
        return parts

    def cache(cfg):
        found = kv_cache_bytes(cfg)
        if torch.cuda.is_available():
            parameters = memory.ModelShape.of(cfg.model).parameters
            found += int(elsewhere(cfg, parameters))
        return found

    memory.step_bytes = step
    memory.kv_cache_bytes = cache


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tp", type=int, default=2)
    own, argv = parser.parse_known_args()
    plan_shards(own.tp)
    nr.main(argv, sampler=lambda cfg: SharedEngine(cfg, own.tp))
