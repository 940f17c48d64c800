"""DeepSpeed's engine: start, learning rate, weights, AdamW's state, log-probs of rollouts."""
import functools
import os

import torch

from runtime import memory, ranks
from runtime.batch import collate, pack_evenly
from runtime.model import merge_adapter

KINDS = ("fp32", "exp_avg", "exp_avg_sq")  # per trained parameter: weights, first and second moment


def start_deepspeed(module, cfg):
    """DeepSpeed's engine: ZeRO, AdamW on fp32 master weights, gradients of packs summed in fp32.

    bf16 weights alone would not learn: at lr 1e-6 an update is below the last bit of most weights.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    memory.keep_freed_memory()  # after vLLM has its KV cache, whose pages are not touched yet
    adamw = functools.partial(torch.optim.AdamW, fused=True)  # on a CPU nine times as fast
    zero = {"stage": cfg.zero_stage, "reduce_bucket_size": memory.BUCKET}
    if cfg.offload == "optimizer":
        adamw = deepspeed.ops.adam.DeepSpeedCPUAdam
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = adamw(trained, lr=cfg.lr, betas=(0.9, cfg.beta2), weight_decay=cfg.weight_decay)
    return deepspeed.initialize(model=module, optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # backward() may be called any number of times
        "gradient_clipping": cfg.max_grad_norm,
        "bf16": {"enabled": cfg.dtype == "bfloat16"}, "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
    })[0]


def adamw_states(engine):
    """AdamW's dicts of state, one per group of shards."""
    return engine.optimizer.optimizer.state.values()


def set_lr(engine, step, cfg):
    """Sets the learning rate of a step, and returns it: linear decay from lr at step 0 to
    lr * lr_end at step `steps`, times a linear warm-up."""
    warmup = min(1.0, (step + 1) / max(1, cfg.warmup))
    lr = cfg.lr * warmup * (1 - (1 - cfg.lr_end) * step / max(1, cfg.steps))
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    return lr


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
    sharded, place, part = hasattr(p, "ds_id"), "full", value
    if sharded:  # ZeRO-3: safe_set_full_* fails if the shards are padded
        place, size = "local", p.ds_tensor.numel()
        part = value.flatten()[ranks.rank() * size:][:size]
        part = torch.nn.functional.pad(part, (0, size - len(part)))
    if kind != "fp32":
        getattr(utils, f"safe_set_{place}_optimizer_state")(p, part, kind)
        return
    getattr(utils, f"safe_set_{place}_fp32_param")(p, part)
    # DeepSpeed updates the weights of the forward pass only in a step
    with deepspeed.zero.GatheredParameters([p], modifier_rank=0, enabled=sharded):
        p.copy_(value)


def place_frozen_weights(engine, device=None):
    """With --lora_rank and --offload optimizer, moves the frozen weights: to the GPU, or `device`.

    While vLLM generates they are in host memory, in a copy that stays: nothing changes it. It is
    one tensor, because PyTorch rounds the size of each pinned tensor up to a power of two."""
    frozen = [p for p in engine.module.parameters() if not p.requires_grad]
    if not frozen or not getattr(engine.optimizer, "cpu_offload", False):
        return
    if not hasattr(engine, "frozen_weights"):
        sizes, dtype = [p.numel() for p in frozen], frozen[0].dtype
        pinned = torch.empty(sum(sizes), dtype=dtype, pin_memory=torch.cuda.is_available())
        engine.frozen_weights = [x.view_as(p).copy_(p.data)
                                 for x, p in zip(pinned.split(sizes), frozen)]
    for p, in_host_memory in zip(frozen, engine.frozen_weights):
        p.data = in_host_memory.to(device or ranks.device())  # itself, if it is there already


# before vLLM wakes up, the frozen weights make room for its own; once it sleeps, they come back
sleep, wake = functools.partial(place_frozen_weights, device="cpu"), place_frozen_weights


@torch.no_grad()
def token_logps(model, rollouts, dummy, cfg):
    """-> per rollout, a list with the log-prob of each sampled token under a model. Collective.
    dummy: a rollout for ranks with fewer packs."""
    found = {}  # id of the rollout -> its list
    for packed in pack_evenly(rollouts, dummy, cfg.pack_tokens):
        batch = collate(packed, ranks.device())
        logp, _ = model(batch)  # (R,)
        for r, own in zip(packed, logp.split(batch.lengths.tolist())):
            found[id(r)] = own.tolist()
    return [found[id(r)] for r in rollouts]
