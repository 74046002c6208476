"""Products with a weight that is laid out once as the processor's matrix library wants it.

Left to itself the library lays a weight out anew at each product. That vanishes behind many rows, and is most of the
work behind the few that decoding several texts has. Kept is a second copy of each weight, as long as the weight lives.
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_kept = WeakTensorKeyDictionary()  # weight -> what it was when it was packed, and it packed


def can_pack(weight: Tensor) -> bool:
    """Whether `packed_linear` takes it: in memory of the CPU, of a type that its library multiplies."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of a weight that `can_pack`: x (..., K), weight (N, K), bias (N,) -> (..., N); without gradients.

    A weight that was changed in place is packed anew, as torch counts changes: one made through `weight.data` in place
    is not seen.
    """
    return torch.ops.minilm.packed_linear(x, weight, bias)


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    state = weight._version, weight.data_ptr()
    kept = _kept.get(weight)
    if kept is None or kept[0] != state:
        kept = _kept[weight] = state, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    y = torch.ops.mkldnn._linear_pointwise(x.reshape(-1, x.shape[-1]), kept[1], bias, "none", [], "")
    return y.view(*x.shape[:-1], len(weight))


def _shaped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


# an operator, so that the compiler takes it as a whole; the short way to define one, which costs the least per call
torch.library.define("minilm::packed_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("minilm::packed_linear", "cpu", _multiplied)
torch.library.register_fake("minilm::packed_linear", _shaped)
