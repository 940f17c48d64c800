"""Low-rank adapters (LoRA, arXiv:2106.09685) with peft: r * (a + b) trained numbers per matrix (a, b)."""
import torch


def add_adapters(model, rank):
    """Freezes the model and adds adapters of this rank to every linear layer except the LM head.

    Their product is scaled by 2 (alpha = 2 * rank) and is 0 at the start."""
    from peft import LoraConfig, inject_adapter_in_model
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    inject_adapter_in_model(config, model.requires_grad_(False))


class WithoutAdapters:
    """The reference of a LoRA run: the policy (a TokenLogps) with its adapters switched off."""

    def __init__(self, policy):
        from peft.tuners.tuners_utils import BaseTunerLayer
        self.policy = policy
        self.layers = [module for module in policy.modules() if isinstance(module, BaseTunerLayer)]

    def __call__(self, batch):
        self._enable_adapters(False)
        logp, entropy = self.policy(batch)  # (R,), (R,)
        self._enable_adapters(True)
        return logp, entropy

    def _enable_adapters(self, enabled):
        for layer in self.layers:
            layer.enable_adapters(enabled)

    def to(self, device):
        """Does nothing: it always is where the policy is."""

    def parameters(self):
        """Empty: it has no parameters of its own."""
        return ()


def merge_adapter(model, name, tensor):
    """Yields (name, tensor) of one state-dict entry as a checkpoint has it: renamed, with its adapter added.

    Yields nothing for the adapter's own tensors. The sum is a new tensor: merging in place and subtracting
    again would leave rounding errors in the frozen bf16 weights.
    """
    layer, base_layer, suffix = name.partition(".base_layer")
    if base_layer and suffix == ".weight":
        delta = model.get_submodule(layer).get_delta_weight("default").detach()
        # one fp32 copy, with the sum in place: a checkpoint is made beside vLLM's KV cache
        tensor = tensor.to(delta.device).to(torch.float32, copy=True).add_(delta).to(tensor.dtype)
    if ".lora_" not in name:
        yield layer + suffix, tensor


def place_frozen_weights(engine, device):
    """With --lora_rank and --offload optimizer: moves the frozen weights to `device`. Else does nothing.

    They are in host memory while vLLM, which has its own copy of them, generates. The first call makes that
    copy, pinned, and it stays: nothing changes it, so nothing is copied back from the GPU. It is one tensor,
    because PyTorch rounds the size of each pinned tensor up to a power of two.
    """
    frozen = [p for p in engine.module.parameters() if not p.requires_grad]
    if not frozen or not getattr(engine.optimizer, "cpu_offload", False):
        return
    if not hasattr(engine, "frozen_weights"):
        sizes = [p.numel() for p in frozen]
        pinned = torch.empty(sum(sizes), dtype=frozen[0].dtype, pin_memory=torch.cuda.is_available())
        engine.frozen_weights = [x.view_as(p).copy_(p.data) for x, p in zip(pinned.split(sizes), frozen)]
    for p, in_host_memory in zip(frozen, engine.frozen_weights):
        p.data = in_host_memory.to(device)  # itself, if it is there already
