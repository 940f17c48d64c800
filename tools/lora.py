"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: train r * (a + b) numbers instead of a matrix (a, b)."""


def add_adapters(model, rank):
    """Freezes the model and adds adapters of this rank, scaled by 2, to every linear layer but the head; they begin at 0."""
    from peft import LoraConfig, inject_adapter_in_model
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"), model.requires_grad_(False))


class WithoutAdapters:
    """A policy (TokenLogps) as it was before training: itself with its adapters off."""

    def __init__(self, policy):
        from peft.tuners.tuners_utils import BaseTunerLayer
        self.policy, self.layers = policy, [m for m in policy.modules() if isinstance(m, BaseTunerLayer)]

    def __call__(self, batch):
        self._switch(False)
        logp, entropy = self.policy(batch)  # (R,), (R,)
        self._switch(True)
        return logp, entropy

    def _switch(self, on):
        for layer in self.layers:
            layer.enable_adapters(on)

    def to(self, device):
        """It is where the policy is ..."""

    def parameters(self):
        """... and has none of its own."""
        return ()


def merged(model, name, tensor):
    """(name, tensor) of a state dict under the checkpoint's names, with its adapter added; nothing for the adapters themselves.

    Not in place: taking an adapter out of bf16 weights again leaves rounding errors in the weights that must not move.
    """
    layer, adapted, part = name.partition(".base_layer")
    if adapted and part == ".weight":
        delta = model.get_submodule(layer).get_delta_weight("default").detach()
        tensor = (tensor.to(delta.device).float() + delta.float()).to(tensor.dtype)
    if ".lora_" not in name:
        yield layer + part, tensor


def place_frozen(engine, where):
    """Under --offload optimizer the frozen weights of a LoRA run wait in host memory while vLLM holds its own copy of them."""
    if getattr(engine.optimizer, "cpu_offload", False):
        for p in engine.module.parameters():
            if not p.requires_grad:
                p.data = p.data.to(where)
