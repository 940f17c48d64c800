"""The sampler: checksums prove that vLLM has the trainer's weights; ranks can share an engine."""
import json
import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from vllm import SamplingParams

import nano_rlvr as nr
import sync_worker
from conftest import ENV, ROOT, TORCHRUN, make_config, save_untied, within
from examples import tensor_parallel
from runtime import engine, model, ranks, sync
from runtime.messages import RunError
from runtime.sync import CHUNK, SentWeights, checksum


@pytest.mark.exercise_15
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_bit_changes_it_and_the_order_does_not(dtype):
    x, integer = torch.randn(CHUNK + 3).to(dtype), getattr(torch, f"int{8 * dtype.itemsize}")
    full = checksum(x)
    for place in (0, 77, CHUNK - 1, CHUNK, CHUNK + 2):
        rest = full - checksum(x[place:place + 1])  # it is a sum
        for bit in range(8 * dtype.itemsize):
            y = x[place:place + 1].clone()
            y.view(integer)[0] ^= torch.tensor(-2**15 if bit == 15 else 2**bit).to(integer)
            assert rest + checksum(y) != full, (
                f"bit {bit} of value {place} flipped: yours is still {full}, wanted another number")
    x = torch.randn(700, 600).to(dtype)
    assert checksum(x) == checksum(x.T) == checksum(x.flip(0)) == sum(map(checksum, x))
    empty, zero = checksum(x[0, :0]), checksum(torch.zeros(1).to(dtype))
    assert empty == 0 != zero, f"of no value: yours {empty}, wanted 0; of a zero: yours {zero}"
    assert checksum(torch.tensor([12345])) != checksum(torch.tensor([4568919932995217184]))  # x, ~x


# ---- blocks of the prefix cache

@pytest.mark.skipif(torch.cuda.is_available(), reason="there vLLM's own blocks are short")
def test_a_prompt_shorter_than_vllms_own_block_is_computed_once_for_its_samples(llm):
    prompts = [{"prompt_token_ids": [65 + i % 7 for i in range(100)]}] * 2
    params = SamplingParams(max_tokens=1)
    [first], [second] = (llm._llm.generate(prompt, params, use_tqdm=False) for prompt in prompts)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 96)  # three blocks of 32


# ---- how a token is drawn on a CPU

def test_a_token_is_drawn_as_often_as_its_probability_says_and_never_at_probability_0(monkeypatch):
    """With random numbers at equal distances, the counts are n * p up to the two ends of its range
    of numbers. A seeded row does not depend on the others."""
    n = 2**12
    p = torch.tensor([0.0, 0.5, 0.0, 0.125, 1e-9, 0.375, 0.0])
    grid = torch.arange(n, dtype=torch.float64)[:, None] / n
    with monkeypatch.context() as patch:
        patch.setattr(torch, "rand", lambda *shape, **_: grid.clone())
        tokens = engine.sample_by_inversion(p.expand(n, -1), {})
    counts = tokens.bincount(minlength=len(p))
    assert (counts - n * p / p.sum()).abs().max() <= 1 and not counts[p == 0].any()
    probs = torch.rand(3, 1000).softmax(-1)
    draw = engine.sample_by_inversion
    drawn = [draw(probs, {1: torch.Generator().manual_seed(seed)})[1].item()
             for seed in (5, 5, 6)]
    alone = engine.sample_by_inversion(probs[1:2], {0: torch.Generator().manual_seed(5)})
    assert drawn[0] == drawn[1] == alone.item() != drawn[2]


def test_vllm_draws_its_tokens_in_this_way(llm):
    from vllm.v1.sample.ops import topk_topp_sampler
    with mock.patch.object(topk_topp_sampler, "random_sample",
                           side_effect=topk_topp_sampler.random_sample) as draw:
        llm.generate([{"prompt_token_ids": [5, 6]}], SamplingParams(max_tokens=3, seed=1),
                     use_tqdm=False)
    assert draw.call_count and draw.side_effect is engine.sample_by_inversion


def test_samples_share_the_whole_blocks_of_their_prompt(llm):
    prompt = {"prompt_token_ids": [*range(5, 75)]}  # 70 tokens: two blocks of 32, or four of 16
    first, second = llm.generate([prompt] * 2, SamplingParams(max_tokens=1), use_tqdm=False)
    assert second.num_cached_tokens == 64


# ---- a model as vLLM keeps it

class Fused:
    """The tensors of the bundled model, or a rank's part, as vLLM has them: fused and padded."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"],
                              "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, weights, rank=0, ranks=1):
        weights = {name: w.clone() for name, w in weights.items() if name != "lm_head.weight"}
        embedding = weights["model.embed_tokens.weight"]
        padded = torch.cat([embedding, torch.full((57, 128), torch.nan)])
        weights["model.embed_tokens.weight"] = padded.chunk(ranks)[rank].clone()
        for fused, parts in self.packed_modules_mapping.items():
            for name in [name for name in weights if parts[0] in name]:
                pieces = [weights.pop(name.replace(parts[0], part)) for part in parts]
                weights[name.replace(parts[0], fused)] = torch.cat(pieces)
        rows = len(padded) // ranks
        own_rows = SimpleNamespace(num_org_elements=min(rows, max(0, 263 - rank * rows)))
        layers = {"model.embed_tokens": SimpleNamespace(shard_indices=own_rows)}
        self.weights, self.get_submodule, self.modules = weights, layers.get, layers.values
        self.named_parameters = weights.items
        self.lm_head = None  # vLLM's Qwen2 has this module


@pytest.fixture
def weights(group):
    return model.load_model(make_config()).state_dict()


def vllm_name(name):
    """The name of a tensor of the checkpoint in vLLM."""
    for fused, parts in Fused.packed_modules_mapping.items():
        for part in parts:
            name = name.replace(f".{part}.", f".{fused}.")
    return name.replace("lm_head", "model.embed_tokens")  # the same storage


def check(vllm_model, weights, loads=list):
    """load_weights into a stand-in for vLLM, which has a model and does loads(the iterator).
    Returns the error or ""."""
    llm = engine.Sampler.__new__(engine.Sampler)
    llm._llm = SimpleNamespace(
        collective_rpc=lambda name, kwargs: loads(kwargs["weights_iterator"]),
        recurrent=True, is_checked=True, expert_layers=[], reset_prefix_cache=int,
        apply_model=lambda function: [function(vllm_model)])
    try:
        nr.load_weights(llm, iter(weights.items()))
    except RunError as e:
        return str(e)
    return ""


def test_fused_padded_and_tied_weights_are_compared_under_the_checkpoint_s_names(weights, capsys):
    fused = Fused(weights)
    assert check(fused, weights) == "" and capsys.readouterr().out == ""
    half = {name: w.bfloat16() for name, w in weights.items()}  # vLLM may keep a wider type
    assert check(Fused({name: w.float() for name, w in half.items()}), half) == ""
    for name, w in weights.items():
        flat = w.view(-1).view(torch.int32)
        flat[len(flat) // 2] ^= 1
        error = check(fused, weights)
        assert vllm_name(name) in error
        assert "\n" not in error and "rank 0" in error and "Do not trust this engine" in error
        flat[len(flat) // 2] ^= 1
    other = weights["lm_head.weight"] + 1
    assert "lm_head.weight differ" in check(fused, weights | {"lm_head.weight": other})
    name = "model.layers.2.self_attn.k_proj.bias"
    rest = {n: w for n, w in weights.items() if n != name}
    assert vllm_name(name) in check(fused, rest)
    short = weights | {"model.norm.weight": torch.ones(127)}
    assert "model.norm.weight differ" in check(fused, short)
    for name, parameter in list(fused.named_parameters()):
        if name.endswith("proj.weight"):
            fused.weights[name] = torch.empty(0)  # vLLM has repacked it
    ranks.print_each_once.cache_clear()
    assert check(fused, weights) == check(fused, weights) == ""
    assert capsys.readouterr().out.count("checksums see 35,840 of 822,272 weights of vLLM") == 1


def test_weights_with_other_names_in_vllm_are_compared_and_a_of_mamba_layers_too(weights):
    """Its mapper knows the names. A is -exp(A_log)."""
    weights = weights | {"model.layers.0.mamba.A_log": torch.randn(8).bfloat16()}
    fused = Fused(weights)
    for name in list(fused.weights):
        tensor = fused.weights.pop(name)
        if name.endswith("A_log"):
            tensor = -tensor.float().exp()
        fused.weights[name.replace(".layers.", ".blocks.").replace("A_log", "A")] = tensor
    assert "model.blocks.0." in check(fused, weights)  # without a mapper
    fused.hf_to_vllm_mapper = SimpleNamespace(
        map_name=lambda name: name.replace(".layers.", ".blocks."))
    assert check(fused, weights) == ""
    for name in "model.blocks.0.mamba.A", "model.blocks.3.self_attn.qkv_proj.bias":
        right = fused.weights[name]
        fused.weights[name] = right + 1
        assert f"weights: {name} differ or are missing (1 in all" in check(fused, weights)
        fused.weights[name] = right


def test_a_tied_head_is_not_sent_to_a_model_without_one_and_an_untied_head_is(weights):
    """Gemma 2 in vLLM refuses a tied head."""
    fused = Fused(weights)
    del fused.lm_head
    names = []
    assert check(fused, weights, lambda sent: names.extend(name for name, _ in sent)) == ""
    assert names == [name for name in weights if name != "lm_head.weight"]
    other = weights["lm_head.weight"] + 1
    assert "lm_head.weight differ" in check(fused, weights | {"lm_head.weight": other})


@pytest.mark.exercise_16
def test_every_sync_is_checked_and_a_failure_names_the_tensor_and_the_rank(weights):
    def refuse(iterator):
        for name, _ in iterator:
            if "down_proj" in name:
                raise ValueError("wrong\nshape" + 999 * " !")

    fused, name = Fused(weights), "model.layers.3.mlp.down_proj.weight"
    assert check(fused, weights) == ""
    wrong = Fused(weights | {name: torch.zeros(128, 384)})
    assert f"{name} differ or are missing (1 in all; 50 tensors" in check(wrong, weights)
    error = check(fused, weights, id)  # vLLM ignores the iterator
    assert "model.embed_tokens.weight," in error and "(30 in all;" in error
    name = "model.layers.0.mlp.down_proj.weight"
    place = f"on rank 0 at tensor {1 + list(weights).index(name)}, {name}: "
    assert len(error := check(fused, weights, refuse)) < 700 and f"{place}ValueError: w" in error


def test_vllm_refuses_more_tokens_than_a_model_has_positions(group, tokenizer, tmp_path):
    own = model.load_model(make_config())
    own.config.max_position_embeddings = 159  # max_prompt 64 and max_tokens 96 are 160
    own.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RunError, match="^vLLM does not start: .*159"):
        nr.Sampler(make_config(model=str(tmp_path)))


# ---- examples/tensor_parallel.py: shards of an engine that ranks share

def shards(weights, ranks, key_heads=2):
    """The tensors that each of `ranks` ranks has: vLLM's Megatron layout. -> a list of dicts."""
    parts = [{} for _ in range(ranks)]
    for name, w in weights.items():
        cut, dim = 1, 0
        if "q_proj" in name or "gate" in name or "up_proj" in name:
            cut = ranks
        elif "k_proj" in name or "v_proj" in name:
            cut = key_heads
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            cut, dim = ranks, 1
        pieces = w.chunk(cut, dim)
        for rank, part in enumerate(parts):
            part[name] = pieces[rank * cut // ranks]
    return parts


def check_shards(models, weights):
    """What each rank says, once they have exchanged the checksums of their shards."""
    weights = SentWeights(weights.items())
    list(weights)
    of_shards = [sync.vllm_checksums(part, weights.sent) for part in models]
    return sync.compare(tensor_parallel.of_engine(of_shards, weights.sent), weights.sent)


def test_every_wrong_bit_of_a_shard_is_noticed(weights, ranks=4):
    """Four ranks have two copies of each of two key heads; norms have as many copies as ranks. One
    layer has all kinds of tensors."""
    weights = {name: w for name, w in weights.items() if ".layers." not in name or ".0." in name}
    parts = shards(weights, ranks)
    models = [Fused(part, rank, ranks) for rank, part in enumerate(parts)]
    assert check_shards(models, weights) == ""
    for part in models:
        for name, parameter in part.named_parameters():
            bits = parameter.view(-1).view(torch.int32)
            bits[0] ^= 1
            said = check_shards(models, weights)
            bits[0] ^= 1
            assert "differ" in said, name
    assert "differ" in check_shards(models[:-1], weights)
    repacked = [{"qkv_proj.weight": (["q", "k", "v"], 0, 0)}] * ranks
    sent = dict.fromkeys("qkv", SimpleNamespace(elements=4, checksum=1))
    assert tensor_parallel.of_engine(repacked, sent) == repacked[0]


def test_a_rank_may_have_no_prompts_and_each_sampled_request_needs_a_seed():
    llm = tensor_parallel.SharedEngine.__new__(tensor_parallel.SharedEngine)
    llm._group = SimpleNamespace(rank=lambda: 1)
    llm.gather = lambda item: [[(1, SamplingParams(temperature=0))], item]
    llm._llm, llm.lean = SimpleNamespace(generate=lambda prompts, params: prompts), None
    assert all(llm.generate(p, SamplingParams(temperature=0)) == p for p in ([], [2]))
    with pytest.raises(RunError, match="a seed"):
        llm.generate([2], SamplingParams(temperature=1))


# ---- the real vLLM and DeepSpeed

def test_two_ranks_have_an_engine_with_their_weights_and_notice_every_damaged_sync(
        llm, tokenizer, tmp_path):
    """They sample what single ranks sample. Their model is not tied."""
    save_untied(model.load_model(make_config()), path := tmp_path / "untied")
    tokenizer.save_pretrained(path)
    command = [*TORCHRUN, "2", ROOT / "tests/sync_worker.py", tmp_path, path]
    done = subprocess.run(command, capture_output=True, text=True,
                          env=ENV | {"PYTHONPATH": f"{ROOT}:{ROOT}/examples"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "note: checksums see" not in done.stdout  # all weights are compared
    for rank in range(2):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        prompts, seeds = sync_worker.prompts_of(rank)
        single = [r.completion for r in nr.rollout(llm, prompts, 2, 1.0, 24, seeds)]
        for first, second in results["sampled"]:
            assert first == single != second
        within(max(results["mismatch"]), 1e-4)
        for damage, named in sync_worker.DAMAGES.items():
            error = results["damaged"][damage.__name__]
            assert named in error and "\n" not in error, (damage, error)
        assert results["repaired"] == ""
