"""Layers of Clifford networks of fused_kernels.geometric, as torch.nn.Module: the linear layer with a matrix for each
grade, the layer of products, and the layer of group actions.

    from fused_kernels.geometric_nn import CliffordLayer

    layer = CliffordLayer(512, signature=(3, 0, 0)).cuda()
    out = layer(x)  # x and out: (8, batch, 512)

signature, layout and order are those of geometric_product(), and so are the shapes and types of x. Features are the
dimension that geometric_product() calls so. math: how fp32 is multiplied in linear layers, as product() has it."""

from . import _torch as binding, geometric
from ._table import TRIPLES
from ._torch import torch


class MultivectorLinear(torch.nn.Module):
    """grade_linear() with its parameters: `weight` (grades, out_features, in_features), and `bias` (out_features) of
    the scalar, unless bias=False."""

    def __init__(self, in_features, out_features, signature=(3, 0, 0), bias=True, layout="blades_first", order="grade",
                 math="tf32x3"):
        super().__init__()
        self.options = dict(signature=tuple(signature), layout=layout, order=order, math=math)
        self.weight = torch.nn.Parameter(torch.empty(sum(signature) + 1, out_features, in_features))
        self.bias = torch.nn.Parameter(torch.zeros(out_features)) if bias else None
        torch.nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x):
        return geometric.grade_linear(x, self.weight, self.bias, **self.options)


class CliffordLayer(torch.nn.Module):
    """The gated product of x and of y = linear(x), with a weight for each triple of grades, normed. Parameters:
    `linear`, a MultivectorLinear, and `w` as geometric_product() has it: (features, triples) or, if connected,
    (triples, features, features).

    It is the layer of flash-clifford, whose parameters become these so: linear.weight = linear_weight.mT, linear.bias =
    linear_bias.flatten(), w = gp_weight. But its bias is added to all blades, so that the layer does not turn with its
    input; here it is added to the scalar, so a bias that is not 0 makes another layer.

    With math="tf32", a gate, blades first in the library's order and weights that are not connected, it is one call
    forward and one backward, fused_kernels.clifford_layer()."""

    def __init__(self, features, signature=(3, 0, 0), connected=False, gate="gelu", norm=True, bias=True,
                 layout="blades_first", order="grade", math="tf32x3"):
        super().__init__()
        signature = tuple(signature)
        self.gate, self.norm = gate, norm
        self.signature, self.layout, self.order = signature, layout, order
        # Inside, blades are as the library has them: so they are copied once, and not before and after each operator.
        self.linear = MultivectorLinear(features, features, signature, bias, math=math)
        triples = len(geometric.triples(signature))
        self.w = torch.nn.Parameter(torch.empty((triples, features, features) if connected else (features, triples)))
        deviation = (sum(signature) + 1)**-0.5
        torch.nn.init.normal_(self.w, std=deviation * features**-0.5 if connected else deviation)

    def forward(self, x):
        own = self.layout == "blades_first" and self.order == "grade"
        if own and self.is_one_call(x):
            rows = x.reshape(len(x), -1, x.shape[-1]).contiguous()
            out, _ = binding.calls["clifford_layer"](rows, self.linear.weight, self.linear.bias, self.w, self.signature,
                                                     bool(self.norm))
            return out.reshape(x.shape)
        planes = x if own else geometric.to_planes(x, self.signature, self.layout, self.order)
        out = geometric.geometric_product(planes, self.linear(planes), self.w, self.signature, self.gate, self.norm)
        if own:
            return out
        between = x.shape[1:-1] if self.layout == "blades_first" else x.shape[:-2]
        return geometric.from_planes(out, between, self.signature, self.layout, self.order)


    def is_one_call(self, x):
        """Whether clifford_layer() computes all of it: then the linear layer's products are in TF32."""
        return (x.is_cuda and x.dtype == self.w.dtype == self.linear.weight.dtype == torch.float32
                and self.linear.options["math"] == "tf32" and self.gate == "gelu" and self.w.dim() == 2
                and self.signature in TRIPLES and x.dim() >= 2)


class GroupAction(torch.nn.Module):
    """group_action() with its parameters: `action` (out_features, in_features, blades of even grade), whose
    multivectors are rotors or motors if the network keeps them so, and `weight` (out_features, in_features, grades). An
    action starts near 1, so that its square is not 0."""

    def __init__(self, in_features, out_features, signature=(3, 0, 1), layout="blades_last", order="null_first",
                 math="tf32x3"):
        super().__init__()
        signature = tuple(signature)
        self.options = dict(signature=signature, layout=layout, order=order, math=math)
        words = geometric.blades(sum(signature), order, signature[2])
        even = [place for place, word in enumerate(words) if len(word) % 2 == 0]
        self.register_buffer("even", torch.tensor(even), persistent=False)
        self.blades = len(words)
        start = torch.randn(out_features, in_features, len(even)) / len(even)
        start[..., 0] += 1  # the scalar is the first blade of all orders
        self.action = torch.nn.Parameter(start)
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, sum(signature) + 1))
        torch.nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x):
        u = self.action.new_zeros(*self.action.shape[:2], self.blades).index_copy(2, self.even, self.action)
        return geometric.group_action(x, u, self.weight, **self.options)
