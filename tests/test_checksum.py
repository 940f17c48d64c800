"""The checksums that prove that vLLM has the trainer's weights: what they see and what they cannot see."""
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import nano_rlvr as nr
from conftest import ENV, ROOT, make_config
import runtime.model
import runtime.sampler
from runtime.sampler import CHUNK, SentWeights

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def different(a, b):
    return not torch.equal(runtime.sampler.checksum(a), runtime.sampler.checksum(b))


def test_it_is_the_sum_of_bits_times_odd_factors_modulo_2_to_the_64():
    x = torch.tensor([1.0, -2.0, 0.0, -0.0, 3e38])
    factors = runtime.sampler.factors(torch.device("cpu"))
    assert (factors % 2 == 1).all() and len(factors.unique()) == CHUNK
    total = sum(bits * factor for bits, factor in zip(x.view(torch.int32).tolist(), factors.tolist()))
    assert [value % 2**64 for value in runtime.sampler.checksum(x).tolist()] == [total % 2**64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_single_bit_changes_it(dtype):
    x = torch.randn(CHUNK + 3).to(dtype)
    bits = x.view(INTEGERS[dtype])
    for place in (0, 1, 77, CHUNK - 1, CHUNK, CHUNK + 2):
        for bit in range(torch.iinfo(bits.dtype).bits):
            y = x.clone()
            y.view(INTEGERS[dtype])[place] ^= torch.tensor(-2**15 if bit == 15 else 2**bit).to(bits.dtype)
            assert different(x, y), (place, bit)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_swapped_values_rows_and_chunks_change_it(dtype):
    x = torch.randn(3 * CHUNK // 256, 256).to(dtype)
    for i, j in ((0, 1), (5, CHUNK // 256), (CHUNK // 256, 2 * CHUNK // 256)):
        rows, values = x.clone(), x.clone()
        rows[[i, j]] = x[[j, i]]
        values[i, 9], values[j, 9] = x[j, 9], x[i, 9]
        assert different(x, rows) and different(x, values)
    first, *others = x.view(-1).split(CHUNK)
    assert different(x, torch.cat([*others, first]))
    equal_sums = torch.tensor([[1.0, 4.0], [4.0, 1.0]], dtype=dtype)
    assert different(equal_sums, equal_sums.flip(0))


def test_a_slice_or_a_transposed_matrix_has_the_checksum_of_its_copy():
    x = torch.randn(700, 600)
    assert not different(x[100:300], x[100:300].clone()) and not different(x.T, x.T.contiguous())
    assert len(runtime.sampler.checksum(x)) == 2 and len(runtime.sampler.checksum(x[0, :0])) == 0


# ---- a model as vLLM keeps it

class Fused(torch.nn.Module):
    """The tensors of the bundled model under vLLM's names: fused, and with a padded vocabulary."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"],
                              "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self, weights):
        super().__init__()
        weights = {name: w.clone() for name, w in weights.items() if name != "lm_head.weight"}
        padding = torch.full((57, 128), torch.nan)
        weights["model.embed_tokens.weight"] = torch.cat([weights["model.embed_tokens.weight"], padding])
        for fused, parts in self.packed_modules_mapping.items():
            for name in [name for name in weights if parts[0] in name]:
                pieces = [weights.pop(name.replace(parts[0], part)) for part in parts]
                weights[name.replace(parts[0], fused)] = torch.cat(pieces)
        for name, w in weights.items():
            self.add(name, w)
        self.get_submodule("model.embed_tokens").org_vocab_size = 263

    def add(self, name, tensor):
        path, _, last = name.rpartition(".")
        module = self
        for part in path.split("."):
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        setattr(module, last, torch.nn.Parameter(tensor, requires_grad=False))


@pytest.fixture
def weights(group):
    return runtime.model.load_model(make_config()).state_dict()


def check(model, weights):
    """Syncs nothing; compares a model with what was sent. Returns the error or ""."""
    sent = SentWeights(weights.items())
    assert all(w is weights[name] for name, w in sent)  # handed over unchanged
    try:
        sent.check(SimpleNamespace(apply_model=lambda function: [function(model)]))
    except RuntimeError as e:
        return str(e)
    return ""


def test_fused_padded_and_tied_weights_are_compared_under_the_checkpoint_s_names(weights, capsys):
    model = Fused(weights)
    assert check(model, weights) == "" and capsys.readouterr().out == ""
    for name, w in weights.items():
        flat = w.view(-1).view(torch.int32)
        flat[len(flat) // 2] ^= 1
        error = check(model, weights)
        assert name.replace("lm_head", "model.embed_tokens") in error  # the same storage
        assert "\n" not in error and "Do not trust this engine" in error
        flat[len(flat) // 2] ^= 1
    other = weights["lm_head.weight"] + 1
    assert "has no lm_head.weight" in check(model, weights | {"lm_head.weight": other})


def test_a_tensor_that_only_one_side_has_is_named(weights):
    model = Fused(weights)
    for name in ("model.norm.weight", "model.layers.2.self_attn.k_proj.bias"):
        fused = name.replace("k_proj", "qkv_proj")
        assert f"it has {fused}," in check(model, {n: w for n, w in weights.items() if n != name})
    assert "it has no extra.weight" in check(model, weights | {"extra.weight": torch.ones(3)})
    assert "it has model.norm.weight," in check(model, weights | {"model.norm.weight": torch.ones(127)})
    assert "56 more" not in (error := check(model, {})) and "more, for which it got no tensor" in error


def test_what_vllm_repacked_is_counted_and_said_once(weights, capsys):
    model = Fused(weights)
    for name, parameter in list(model.named_parameters()):
        if name.endswith("proj.weight"):
            model.add(name, torch.empty(0))
    assert check(model, weights) == check(model, weights) == ""
    assert capsys.readouterr().out == ("note: checksums see 35,840 of 822,272 weights of vLLM on this "
                                       "device, log-probs check the others (normal on a CPU)\n")
    model.get_submodule("model.norm").weight[0] += 1
    assert "model.norm.weight differ" in check(model, weights)


def test_vllm_may_keep_a_wider_type_and_gpt2_s_transposed_matrices(weights):
    half = {name: w.bfloat16() for name, w in weights.items()}
    model = Fused({name: w.float() for name, w in half.items()})
    assert check(model, half) == ""
    model.get_submodule("model.norm").weight[0] += 1
    assert "model.norm.weight differ" in check(model, half)
    model, wide, square = Fused(weights), torch.randn(4, 6), torch.randn(5, 5)
    model.add("h.c_fc.weight", wide.T.contiguous())
    model.add("h.c_proj.weight", square.T.contiguous())
    weights |= {"h.c_fc.weight": wide, "h.c_proj.weight": square}
    assert check(model, weights) == ""
    assert "h.c_proj.weight differ" in check(model, weights | {"h.c_proj.weight": square.flip(0)})


def test_every_sync_is_checked_also_one_that_vllm_ignores(weights):
    policy = SimpleNamespace(module=SimpleNamespace(model=runtime.model.load_model(make_config())))

    def sync(model, loads):
        nr.sync_weights(policy, SimpleNamespace(
            collective_rpc=lambda name, kwargs: loads(kwargs["weights_iterator"]), reset_prefix_cache=int,
            apply_model=lambda function: [function(model)]))

    sync(Fused(weights), loads=list)
    with pytest.raises(RuntimeError, match="layers.3.mlp.down_proj.weight differ, of 50 tensors"):
        sync(Fused(weights | {"model.layers.3.mlp.down_proj.weight": torch.zeros(128, 384)}), loads=list)
    with pytest.raises(RuntimeError, match="it has model.embed_tokens.weight, .* and 27 more"):
        sync(Fused(weights), loads=id)


# ---- the real vLLM and DeepSpeed

DAMAGES = {  # a damaged sync (checksum_worker.py) -> a tensor that the error names
    "lowest bit of k_proj": "layers.1.self_attn.k_proj.weight",
    "highest bit of a norm": "layers.0.input_layernorm.weight",
    "a bit of the last embedding": "embed_tokens.weight",
    "v_proj left out": "layers.1.self_attn.v_proj.weight",
    "up_proj left out": "layers.1.mlp.up_proj.weight",
    "norm left out": "layers.0.input_layernorm.weight",
    "norm of the step before": "layers.0.input_layernorm.weight",
    "k_proj of the step before": "layers.1.self_attn.k_proj.weight",
    "all of the step before": "more",
    "checkpoint from disk": "more",
    "trainer's weights ignored": "more, for which it got no tensor",
    "two values swapped": "layers.0.input_layernorm.weight",
    "two rows of up_proj swapped": "layers.1.mlp.up_proj.weight",
    "two norms swapped": "layers.0.input_layernorm.weight, model.layers.1.input_layernorm.weight differ",
}


@pytest.mark.parametrize("tied, dtype, ranks, policies", [
    (True, "float32", 1, ("lora", "zero2", "zero3")), (False, "bfloat16", 2, ("zero3",))])
def test_vllm_has_the_trainer_s_weights_and_every_damaged_sync_is_noticed(
        group, tmp_path, tied, dtype, ranks, policies):
    """The last of the policies takes the damaged syncs. With a vocabulary of 263, which vLLM pads to 320."""
    path = make_config().model
    if not tied:
        model = runtime.model.load_model(make_config())
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
        model.save_pretrained(path := str(tmp_path / "untied"))
        for file in (ROOT / "models/tiny").glob("tokenizer*"):
            (tmp_path / "untied" / file.name).write_bytes(file.read_bytes())
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), ROOT / "tests/checksum_worker.py"]
    done = subprocess.run([*command, tmp_path, path, dtype, *policies], capture_output=True, text=True,
                          env=ENV | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "note: checksums see" not in done.stdout  # all weights are compared
    for rank in range(ranks):
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for policy in policies:
            assert results.pop(f"{policy}, as loaded") == results.pop(f"{policy}, after a step") == ""
        assert results.pop("padding of the vocabulary") == results.pop("repaired") == ""
        assert results.keys() == DAMAGES.keys()
        for name, error in results.items():
            assert DAMAGES[name] in error and "\n" not in error, (name, error)
