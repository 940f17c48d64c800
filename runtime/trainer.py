"""The models in a step: weights, AdamW's state, adapters, ways to the GPU, log-probs."""
import contextlib

import torch

from runtime import ranks
from runtime.batch import collate, pack_evenly

KINDS = ("fp32", "exp_avg", "exp_avg_sq")  # per trained parameter: weights, first and second moment


def adamw_states(engine):
    """AdamW's dicts of state, one per group of shards."""
    return engine.optimizer.optimizer.state.values()


def named_weights(engine):
    """Yields (name, tensor) of every weight as a saved file has it, which vLLM reads: under its
    name, each expert by itself. LoRA adapters are merged, ZeRO-3 shards gathered one tensor at a
    time. Collective."""
    import deepspeed
    from transformers.core_model_loading import revert_weight_conversion
    model = engine.module.model
    # keep_vars: with ZeRO-3's attributes. named_parameters() would leave out a tied lm_head.weight.
    for name, tensor in model.state_dict(keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([tensor], enabled=hasattr(tensor, "ds_id")):
            merged = dict(merge_adapter(model, name, tensor.detach()))
            yield from revert_weight_conversion(model, merged).items()


def merge_adapter(model, name, tensor):
    """Yields (name, tensor) of a state-dict entry under the checkpoint's name. With LoRA: a copy to
    which the adapter is added, and nothing for the adapter's own tensors."""
    layer, base_layer, suffix = name.partition(".base_layer")
    if base_layer and suffix == ".weight":
        delta = model.get_submodule(layer).get_delta_weight("default").detach()
        # one fp32 copy, with the sum in place: a checkpoint is made beside vLLM's KV cache
        tensor = tensor.to(delta.device).to(torch.float32, copy=True).add_(delta).to(tensor.dtype)
    if ".lora_" not in name:
        yield layer + suffix, tensor


def trained_parameters(engine):
    """{name: parameter} of the weights that AdamW updates."""
    return {name: p for name, p in engine.module.model.named_parameters() if p.requires_grad}


def get_tensor(p, kind):
    """A whole fp32 tensor of a parameter, on its device; kind: one of KINDS. Collective."""
    from deepspeed import utils
    if kind == "fp32":
        return utils.safe_get_full_fp32_param(p)
    return utils.safe_get_full_optimizer_state(p, kind)


@torch.no_grad()
def set_tensor(p, kind, value):
    """Replaces a tensor of a parameter by `value`, of the whole parameter's shape. Collective."""
    import deepspeed
    from deepspeed import utils
    place = "full"
    part = value
    sharded = hasattr(p, "ds_id")
    if sharded:  # ZeRO-3: safe_set_full_* fails if the shards are padded
        place = "local"
        size = p.ds_tensor.numel()
        part = value.flatten()[ranks.rank() * size:][:size]
        part = torch.nn.functional.pad(part, (0, size - len(part)))
    if kind != "fp32":
        set_state = getattr(utils, f"safe_set_{place}_optimizer_state")
        set_state(p, part, kind)
        return
    set_weight = getattr(utils, f"safe_set_{place}_fp32_param")
    set_weight(p, part)
    # DeepSpeed updates the weights of the forward pass only in a step
    with deepspeed.zero.GatheredParameters([p], modifier_rank=0, enabled=sharded):
        p.copy_(value)


@contextlib.contextmanager
def on_device(model):
    """Moves a module to the GPU: for this block or, if it has stays_on_gpu, for good. In host
    memory its weights are pinned: the GPU reads them several times as fast."""
    returning = [] if getattr(model, "stays_on_gpu", False) else list(model.parameters())
    for p in returning:
        if torch.cuda.is_available() and not p.is_pinned():
            p.data = p.data.pin_memory()
    in_host_memory = [p.data for p in returning]
    model.to(ranks.device())
    yield
    for p, data in zip(returning, in_host_memory):
        p.data = data


# ---- low-rank adapters: see add_adapters in runtime/model.py

class WithoutAdapters(torch.nn.Module):
    """The reference of a LoRA run: the policy (a TokenLogps) with its adapters switched off."""

    def __init__(self, policy):
        from peft.tuners.tuners_utils import BaseTunerLayer
        super().__init__()
        self.policy = [policy]  # in a list: the policy's parameters are not those of this module
        self.layers = [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]

    def forward(self, pack):
        for layer in self.layers:
            layer.enable_adapters(False)
        logp, entropy = self.policy[0](pack)  # (R,), (R,)
        for layer in self.layers:
            layer.enable_adapters(True)
        return logp, entropy


def place_frozen_weights(engine, device=None):
    """With --lora_rank and --offload optimizer, moves the frozen weights: to the GPU, or `device`.

    While vLLM generates they are in host memory, in a copy that stays: nothing changes it. It is
    one tensor, because PyTorch rounds the size of each pinned tensor up to a power of two.
    """
    frozen = [p for p in engine.module.parameters() if not p.requires_grad]
    if not frozen or not getattr(engine.optimizer, "cpu_offload", False):
        return
    if not hasattr(engine, "frozen_weights"):
        sizes = [p.numel() for p in frozen]
        dtype = frozen[0].dtype
        pinned = torch.empty(sum(sizes), dtype=dtype, pin_memory=torch.cuda.is_available())
        engine.frozen_weights = []
        for p, copy in zip(frozen, pinned.split(sizes)):
            engine.frozen_weights.append(copy.view_as(p).copy_(p.data))
    for p, in_host_memory in zip(frozen, engine.frozen_weights):
        p.data = in_host_memory.to(device or ranks.device())  # itself, if it is there already


def offload_frozen(engine):
    """Before vLLM wakes up, the frozen weights make room for vLLM's own."""
    place_frozen_weights(engine, "cpu")


def load_frozen(engine):
    """Once vLLM sleeps, the frozen weights come back."""
    place_frozen_weights(engine)


# ---- log-probs of rollouts

@torch.no_grad()
def token_logps(model, rollouts, cfg):
    """-> per rollout, a list with the log-prob of each sampled token under a model. Collective."""
    lists = pack_evenly(rollouts, cfg.pack_tokens, cfg.layout)
    packs = [collate(members, layout=cfg.layout) for members in lists]
    logps = rollout_logps(packs, [model(pack)[0] for pack in packs])
    return [logps[id(r)] for r in rollouts]


def rollout_logps(packs, logps):
    """{id of a rollout: its part of the log-probs, a list}. logps: (R,) of each pack."""
    parts = {}
    for pack, logp in zip(packs, logps):
        for r, part in zip(pack.rollouts, logp.split(pack.lengths.tolist())):
            parts[id(r)] = part.tolist()
    return parts
