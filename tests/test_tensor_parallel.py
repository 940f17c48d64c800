"""Ranks that share a vLLM engine (--tp): they sample what single ranks sample, and each shard is checked."""
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams

import nano_rlvr as nr
from conftest import ENV, ROOT, make_config
import runtime.flags
import runtime.model
import runtime.sampler
from runtime import dist, stop
from runtime.dist import RunError
from test_checksum import Fused


def shards(weights, ranks, heads=4, key_heads=2):
    """The tensors that each of `ranks` ranks has: vLLM's Megatron layout. -> a list of {name: tensor}."""
    parts = []
    for rank in range(ranks):
        parts.append({})
        for name, w in weights.items():
            cut, dim, of = 1, 0, rank
            if "q_proj" in name or "gate" in name or "up_proj" in name:
                cut = ranks
            elif "k_proj" in name or "v_proj" in name:
                cut = min(ranks, key_heads)
                of = rank * cut // ranks
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                cut, dim = ranks, 1
            parts[-1][name] = w.chunk(cut, dim)[of if cut > 1 else 0] if w.dim() > dim else w
    return parts


class Shard(Fused):
    """The part of a model that a rank has, with vLLM's names."""

    def __init__(self, weights, rank, ranks):
        super().__init__(weights)
        whole = self.get_parameter("model.embed_tokens.weight")
        self.add("model.embed_tokens.weight", whole.data.chunk(ranks)[rank].clone())
        self.get_submodule("model.embed_tokens").org_vocab_size = 263


def check(monkeypatch, models, weights):
    """What each rank says about its shard: the ranks one after the other, with what all of them exchange."""
    sent = runtime.sampler.SentWeights(weights.items())
    list(sent)
    items, said = [], []
    monkeypatch.setattr(dist, "engine_ranks", lambda: len(models))
    for exchange in (lambda item: items.append(item) or [item] * len(models), lambda item: list(items)):
        monkeypatch.setattr(dist, "engine_gather", exchange)
        said = []
        for rank, model in enumerate(models):
            monkeypatch.setattr(dist, "engine_rank", lambda rank=rank: rank)
            said.append(runtime.sampler.compare(model, sent.sent))
    return said


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_wrong_bit_of_a_shard_is_noticed_by_all_ranks_of_its_engine(group, monkeypatch, ranks):
    """Four ranks have two copies of each of two key heads; norms have as many copies as ranks."""
    weights = runtime.model.load_model(make_config()).state_dict()
    models = [Shard(part, rank, ranks) for rank, part in enumerate(shards(weights, ranks))]
    assert check(monkeypatch, models, weights) == [""] * ranks
    for model in models:
        for name, parameter in model.named_parameters():
            bits = parameter.data.view(-1).view(torch.int32)
            bits[0] ^= 1
            said = check(monkeypatch, models, weights)
            bits[0] ^= 1
            assert len(set(said)) == 1 and "differ" in said[0], name
    assert check(monkeypatch, models[::-1], weights)[0]  # each rank has the shard of another one
    missing = {name: w for name, w in weights.items() if name != "model.norm.weight"}
    assert "it has model.norm.weight" in check(monkeypatch, models, missing)[0]


def test_two_ranks_with_one_engine_sample_as_single_ranks_do_and_notice_a_damaged_shard(
        llm, tmp_path, request):
    """ZeRO-2 and ZeRO-3, two steps each: the mean mismatch is below 1e-4, float32's rounding times 1,000."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    left = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")  # as vLLM's ranks leave it when they are killed
    left.touch()
    request.addfinalizer(lambda: left.unlink(missing_ok=True))
    done = subprocess.run([*torchrun, ROOT / "tests/tensor_parallel_worker.py", tmp_path], text=True,
                          capture_output=True, env=ENV | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "note: checksums see" not in done.stdout  # all weights are compared
    from tensor_parallel_worker import DAMAGED, prompts_of
    for rank in (0, 1):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        prompts, seeds = prompts_of(rank)
        single = [r.completion for r in nr.rollout(llm, prompts, 2, 1.0, 24, seeds)]
        for stage in ("2", "3"):
            (first, _), (second, _) = results[stage]
            assert first == single != second
            assert all(mismatch < 1e-4 for _, mismatch in results[stage])
        assert results["repaired"] == ""
        for name, error in results["damaged"].items():
            assert "differ, of 50 tensors compared" in error and "\n" not in error, name
        assert results["damaged"].keys() == DAMAGED.keys()


@pytest.fixture
def shared(monkeypatch):
    """(the LLM of the second of three ranks, what its engine was asked). The others have 2 and 1 prompts."""
    greedy, asked = SamplingParams(temperature=0), []

    def generate(prompts, params):
        asked.append((prompts, params, stop.in_call))
        return [str(prompt) for prompt in prompts]

    monkeypatch.setattr(dist, "engine_rank", lambda: 1)
    monkeypatch.setattr(dist, "engine_gather", lambda item: [[(1, greedy), (2, greedy)], item, [(3, greedy)]])
    return runtime.sampler.SharedLLM(
        SimpleNamespace(llm_engine=SimpleNamespace(step=lambda: "step"), generate=generate)), asked


def test_a_rank_gets_the_completions_of_its_own_prompts(shared):
    llm, asked = shared
    assert llm.generate([7, 8], [SamplingParams(seed=1), SamplingParams(seed=2)]) == ["7", "8"]
    assert llm.generate([9], SamplingParams(temperature=0)) == ["9"] and llm.generate([], []) == []
    assert [prompts for prompts, *_ in asked] == [[1, 2, 7, 8, 3], [1, 2, 9, 3], [1, 2, 3]]
    assert [params.seed for params in asked[0][1]] == [None, None, 1, 2, None]


def test_random_sampling_without_a_seed_is_refused(shared):
    with pytest.raises(RunError, match="a seed"):
        shared[0].generate([1], SamplingParams(temperature=1))


def test_a_signal_ends_a_shared_call_at_the_same_step_on_all_ranks_and_nowhere_else(shared, monkeypatch):
    llm, asked = shared
    monkeypatch.setattr(stop, "in_call", True)
    llm.generate([7], SamplingParams(temperature=0))
    assert asked[0][2] is False  # the handler raises nothing
    monkeypatch.setattr(dist, "engine_gather", lambda item: [False, item, True])  # another rank got a signal
    for _ in range(runtime.sampler.STEPS - 1):
        assert llm.llm_engine.step() == "step"
    with pytest.raises(stop.Stopped):
        llm.llm_engine.step()
    monkeypatch.setattr(stop, "in_call", False)  # not within stop.interruptible
    monkeypatch.setattr(dist, "engine_gather", lambda item: [item])
    llm.generate([7], SamplingParams(temperature=0))
    assert {llm.llm_engine.step() for _ in range(2 * runtime.sampler.STEPS)} == {"step"}


@pytest.mark.parametrize("tp, heads, key_heads, fits", [
    (1, 7, 7, True), (2, 4, 2, True), (4, 4, 2, True), (2, 3, 3, False), (4, 8, 3, False), (8, 8, 2, True)])
def test_heads_that_vllm_cannot_divide_are_refused_in_one_line(tp, heads, key_heads, fits):
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads)
    cfg = nr.Config(tp=tp, model="a")
    if fits:
        runtime.flags.check_heads(cfg, config)
    else:
        with pytest.raises(ValueError, match=f"--tp {tp}: .*heads") as e:
            runtime.flags.check_heads(cfg, config)
        assert "\n" not in str(e.value)


def test_ranks_that_do_not_make_whole_engines_are_refused_in_one_line():
    with pytest.raises(ValueError, match="--tp 2: must divide the number of ranks, 1"):
        make_config(tp=2)
