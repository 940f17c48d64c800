"""A GPU made of host memory: real numbers, and errors where PyTorch on CUDA raises them.

Inside simulated_card(), a tensor is on the card or on the host as on a machine with one GPU. Its
storage carries the mark: views, `p.data = x` and saved tensors are where their storage is. The
kernels of the CPU compute the values. Streams, speed and limits of a GPU are not simulated."""
import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import runtime.batch

CARD, HOST = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
PIN_MEMORY = torch._C.TensorBase.pin_memory  # vLLM on a CPU replaces torch.Tensor.pin_memory
CROSSING = {aten.copy_.default, aten._to_copy.default}  # what moves values between devices
INDEXING = {aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default,  # the host's
            aten.index_put_.default, aten._index_put_impl_.default}  # indices are allowed here


def device_of(tensor):
    """CARD, HOST, or "meta" for a tensor without values."""
    if tensor.is_meta:
        return torch.device("meta")
    return CARD if getattr(tensor.untyped_storage(), "on_card", False) else HOST


def tensors_in(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


class Dispatch(TorchDispatchMode):
    """Below autograd: operators refuse a mix of devices; results are where the arguments are."""

    to = None  # device of the results of an operator that crosses

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = tensors_in((args, kwargs))
        if func in CROSSING:
            device = self.to or device_of(tensors[0])
        else:
            device = self.common_device(func, tensors, args)
        known = {x.untyped_storage()._cdata for x in tensors}
        out = func(*args, **kwargs)
        for x in tensors_in(out):
            if x.untyped_storage()._cdata not in known:
                x.untyped_storage().on_card = device == CARD
        return out

    def common_device(self, func, tensors, args):
        if func in INDEXING:  # indices of the host are allowed
            tensors = [args[0], *(x for x in tensors[1:] if device_of(x) == CARD), *args[2:3]]
        if torch.Tag.pointwise in func.tags or func in INDEXING:  # a number of the host is allowed
            on_card = any(device_of(x) == CARD for x in tensors)
            tensors = [x for x in tensors if not on_card or x.dim() or device_of(x) == CARD]
        devices = {device_of(x) for x in tensors}
        if len(devices) > 1:
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, "
                               f"got {[(str(device_of(x)), tuple(x.shape)) for x in tensors]}")
        return devices.pop() if devices else HOST


class Functions(TorchFunctionMode):
    """Above autograd: devices that Python code reads or asks for. Its `dispatch`: a Dispatch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in SPECIAL:
            return SPECIAL[func](self, *args, **kwargs)
        pinned, wanted = kwargs.pop("pin_memory", False), kwargs.get("device")
        if wanted is None or torch.device(wanted).type == "meta":
            out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs | {"device": HOST})
            if isinstance(out, torch.Tensor):
                out.untyped_storage().on_card = torch.device(wanted).type == "cuda"
        if pinned:
            out.untyped_storage().pinned = True
        return out

    def move(self, x, device, copy=False, **options):
        """x.to(device, **options): a copy if it is elsewhere."""
        if device_of(x) == device:
            return x.to(copy=copy, **options)
        with mock.patch.object(self.dispatch, "to", device):
            return aten._to_copy(x, **options)


def to(mode, x, *args, copy=False, **kwargs):
    if other := tensors_in((args, kwargs)):
        return mode.move(x, device_of(other[0]), copy, dtype=other[0].dtype)
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if x.is_meta or device is not None and device.type == "meta":
        return x.to(*args, **kwargs)
    device = device_of(x) if device is None else CARD if device.type == "cuda" else HOST
    return mode.move(x, device, copy, dtype=dtype or x.dtype)


def on_host(function):
    """A method that a tensor on the card refuses."""
    def call(mode, x, *_):
        if device_of(x) == CARD:
            raise TypeError(f"a tensor on the card has no {function.__name__}()")
        return function(x)
    return call


def pin_memory(x):
    pinned = x.clone()
    pinned.untyped_storage().pinned = True
    return pinned


SPECIAL = {
    torch.Tensor.device.__get__: lambda mode, x, *_: device_of(x),
    torch.Tensor.is_cuda.__get__: lambda mode, x, *_: device_of(x) == CARD,
    torch.Tensor.is_pinned: lambda mode, x, *_: getattr(x.untyped_storage(), "pinned", False),
    torch.Tensor.cpu: lambda mode, x, *_, **__: mode.move(x, HOST), torch.Tensor.to: to,
    torch.Tensor.numpy: on_host(torch.Tensor.numpy), PIN_MEMORY: on_host(pin_memory),
}


@contextlib.contextmanager
def simulated_card():
    """In this block tensors can be put on "cuda:0"."""
    run_backward = torch.autograd._engine_run_backward

    def backward(*args, **kwargs):
        with functions:  # PyTorch has left the mode to call this; DeepSpeed's hooks need it
            return run_backward(*args, **kwargs)

    with Dispatch() as Functions.dispatch, Functions() as functions:
        # what is compared with the forward pass: not the device, which is read outside of the mode
        same = {"default": lambda x: (x.shape, x.dtype)}
        with (mock.patch.object(torch.autograd, "_engine_run_backward", backward),
              mock.patch.object(torch.Tensor, "pin_memory", PIN_MEMORY),
              mock.patch.dict(checkpoint._allowed_determinism_checks_to_fns, same)):
            yield


def stub_cuda(monkeypatch, gib=80):
    """torch.cuda, which this build of PyTorch does not have, of one H100 with `gib` GiB."""
    size = gib * 2**30
    values = dict(
        is_available=True, device_count=1, get_device_capability=(9, 0),
        get_device_name="NVIDIA H100 80GB HBM3", mem_get_info=(size, size), memory_reserved=0,
        max_memory_reserved=2**30, empty_cache=None, synchronize=None, reset_peak_memory_stats=None)
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


def attention_kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size,
                     enable_gqa):
    """Flash attention: what the kernel demands of its arguments, then PyTorch's dense attention."""
    assert {x.device for x in (query, key, value, cu_seq_q, cu_seq_k)} == {CARD}
    assert {x.dtype for x in (query, key, value)} == {torch.bfloat16}
    assert {x.dtype for x in (cu_seq_q, cu_seq_k)} == {torch.int32}
    assert (cu_seq_q[-1], cu_seq_k[-1]) == (len(query), len(key)) and len(cu_seq_q) == len(cu_seq_k)
    assert max_q >= cu_seq_q.diff().max() and max_k >= cu_seq_k.diff().max()
    assert window_size == (-1, 0) and enable_gqa
    batch = SimpleNamespace(cu_seqlens_q=cu_seq_q, cu_seqlens_k=cu_seq_k)
    return runtime.batch.attend_in_groups(query, key, value, batch, scale)
