"""Networks of the package's operators, as torch.nn.Module: DiffusionNet and its block. Names and shapes in their
state_dict() are those of github.com/nmwsharp/diffusion-net, so load_state_dict() takes its .pth files, and from the
same seed the same weights are drawn.

    from fused_kernels.nn import DiffusionNet

    net = DiffusionNet(C_in=16, C_out=8).cuda()
    mesh = net.mesh(mass, evals, evecs, gradX, gradY)  # once a mesh
    out = net(x, mesh)  # or, as the original: net(x, mass, L, evals, evecs, gradX, gradY)
    several = net.mesh([mass_1, mass_2], [evals_1, evals_2], ...)  # of any sizes; x has the vertices of both

Only the spectral method is here. Between the two transforms everything has a row per eigenvector, not per vertex: of
gradX and gradY only gr = gradX evecs and gi = gradY evecs are needed, (vertices, eigen), and the gradients' weights are
applied to the spectrum. On a GPU, in torch.bfloat16 and torch.float16, diffusion() and gradient_features() compute it,
forward and backward. They read mass, evals and times in that type, too. In torch.float32 they do so for lists of meshes
alone; else product() multiplies, because backward that is faster, and the MLPs' linear layers, too. All this fp32 is
multiplied with math="tf32x3": that is about as accurate as PyTorch's products in fp32, which run on the CUDA cores,
while these run on tensor cores. After torch.set_float32_matmul_precision("high") it is math="tf32". All else, the CPU
and torch.float64, are PyTorch's products, by the same formulas.

What autograd sees of a block are a few nodes, each with its own backward pass: an MLP is one, and in torch.float32 so
is all before it. Else the host would take longer to start a block's kernels than the GPU to run them. So hooks of an
MLP's layers are not called. Gradients with create_graph=True, and in torch.float32 torch.compile, take PyTorch's
operators instead.

The type is that of the weights, or the one of torch.autocast. There are gradients of x and of all parameters, but none
of the mesh."""

import typing

from ._table import check
from ._torch import aligned, calls, torch


def spectral_gradients(gradX, gradY, evecs):
    """(gradX evecs, gradY evecs), which are dense: what a network reads of the two. Shapes: gradX and gradY (vertices,
    vertices), sparse or dense, evecs and the results (vertices, eigen); or all have one dimension more, before these,
    for several meshes. A gradient that is dense and has the shape of evecs is returned as it is. The results have the
    type of evecs, and are computed in fp32 or a wider one."""
    check(evecs.dim() in (2, 3), f"evecs has the shape {tuple(evecs.shape)}; it has to have 2 or 3 dimensions")
    vertices = evecs.shape[-2]
    wide = torch.promote_types(evecs.dtype, torch.float32)

    def in_spectrum(name, grad):
        check(grad is not None, f"{name} is missing: the gradient features need gradX and gradY")
        if grad.layout == torch.strided and grad.shape == evecs.shape:
            return grad.to(evecs.dtype)
        check(tuple(grad.shape) == (*evecs.shape[:-1], vertices),
              f"{name} has the shape {tuple(grad.shape)}; it has to be {(*evecs.shape[:-1], vertices)}, or, in the "
              f"spectrum, {tuple(evecs.shape)}")
        grad, basis = grad.to(wide), evecs.to(wide)
        if grad.dim() == 3:
            return torch.stack([grad[at] @ each for at, each in enumerate(basis)]).to(evecs.dtype)
        return (grad @ basis).to(evecs.dtype)

    with torch.no_grad(), torch.autocast(evecs.device.type, enabled=False):
        return in_spectrum("gradX", gradX), in_spectrum("gradY", gradY)


# ---- A mesh as the operators read it, and its products ---------------------------------------------------------------


class Mesh(typing.NamedTuple):
    """What the method mesh() of a network or a block returns, in the network's type. gr and gi are gradX evecs and
    gradY evecs, if the network has gradient features.

    Of meshes that differ in their sizes all vertices are in one dimension, evals are (meshes, eigen), and `offsets`
    (meshes + 1) say where each mesh begins and the last one ends. Where there are no operators, `parts` are the meshes
    one by one. `factors` are for products in fp32; evecs, gr and gi are parts of them then."""

    mass: typing.Any
    evals: typing.Any
    evecs: typing.Any
    gr: typing.Any = None
    gi: typing.Any = None
    offsets: typing.Any = None
    parts: typing.Any = None
    factors: typing.Any = None

    def split(self, x):
        """The rows of x that each of the parts has."""
        return x.split([len(each.mass) for each in self.parts])


class Factors(typing.NamedTuple):
    """What products in fp32 read of a mesh. `basis` is evecs above gr above gi, and `basis_t` its transpose, which the
    library would make anew in each call; `evecs_t` has its first columns. `gradients` multiplies complex numbers whose
    real and imaginary parts are rows below each other: its columns are by turns those of gr above gi and of -gi above
    gr."""

    minus_evals: typing.Any
    basis: typing.Any
    basis_t: typing.Any
    evecs_t: typing.Any
    gradients: typing.Any = None
    gradients_t: typing.Any = None


def _with_factors(block, mesh):
    """Of a mesh in fp32, or a batch whose matrices are multiples of 16 bytes apart; none for a compiled program."""
    *meshes, vertices, eigen = mesh.evecs.shape
    sizes = vertices * eigen, vertices * block.C_width, eigen * block.C_width
    if not mesh.evecs.is_cuda or mesh.evecs.dtype != torch.float32 or torch.compiler.is_compiling():
        return mesh
    if meshes and any(each % 4 for each in sizes):
        return mesh
    parts = [each for each in (mesh.evecs, mesh.gr, mesh.gi) if each is not None]
    basis = torch.cat(parts, -2)
    basis_t, pair = basis.mT.contiguous(), ()
    if len(parts) > 1:
        turned = torch.stack((basis[..., vertices:, :], torch.cat((-mesh.gi, mesh.gr), -2)), -1).flatten(-2)
        pair = turned, turned.mT.contiguous()
    parts = basis.split(vertices, -2)
    return mesh._replace(**dict(zip(("evecs", "gr", "gi"), parts)), factors=Factors(
        -mesh.evals.unsqueeze(-1), basis, basis_t, _readable(basis_t[..., :vertices]), *pair))


def _readable(part):
    """A part of a matrix, or its copy where its rows do not begin at multiples of 16 bytes."""
    return part if part.data_ptr() % 16 == 0 and part.stride(-2) % 4 == 0 else part.contiguous()


def _meshes_of(block, *lists):
    """Of lists with a tensor for each mesh: mass, evals, evecs, gradX, gradY."""
    count = len(lists[0])
    check(count > 0 and all(each is None or len(each) == count for each in lists),
          f"there are {[None if each is None else len(each) for each in lists]} tensors; of mass, evals, evecs and, if "
          "they are given, gradX and gradY there has to be one for each mesh")
    parts = [_tensors_of(block, *(None if each is None else each[at] for each in lists)) for at in range(count)]
    for mass, evals, *_ in parts:
        check(mass.dim() == 1, f"mass has the shape {tuple(mass.shape)}; in a list it has to have 1 dimension")
        check(len(evals) == len(parts[0][1]),
              f"evals has the shape {tuple(evals.shape)}; all meshes have to have {len(parts[0][1])} eigenvectors")
    mass, evals, evecs, *pair = zip(*parts)
    together = torch.cat(mass), torch.stack(evals), torch.cat(evecs)
    ends = [0]
    for each in mass:
        ends.append(ends[-1] + len(each))
    offsets = torch.tensor(ends, dtype=torch.int32, device=together[0].device)
    mesh = Mesh(*together, *map(torch.cat, pair), offsets=offsets)
    return mesh if _has_operators(mesh) else mesh._replace(parts=[Mesh(*each) for each in parts])


def _mesh_of(block, mass, evals, evecs, gradX, gradY):
    """Of tensors in any type, or of lists of such."""
    if isinstance(mass, (list, tuple)):
        return _meshes_of(block, mass, evals, evecs, gradX, gradY)
    return _with_factors(block, Mesh(*_tensors_of(block, mass, evals, evecs, gradX, gradY)))


def _tensors_of(block, mass, evals, evecs, gradX, gradY):
    """mass, evals, evecs, and, if the block needs them, gr and gi, in its type."""
    for name, each in ("mass", mass), ("evals", evals), ("evecs", evecs):
        check(each is not None, f"{name} is missing: the spectral method needs mass, evals and evecs")
    check(evecs.dim() in (2, 3), f"evecs has the shape {tuple(evecs.shape)}; it has to have 2 or 3 dimensions")
    *meshes, vertices, eigen = evecs.shape
    for name, each, shape in ("mass", mass, (*meshes, vertices)), ("evals", evals, (*meshes, eigen)):
        check(tuple(each.shape) == shape, f"{name} has the shape {tuple(each.shape)}; it has to be {shape}")
    if any(each is not None and each.requires_grad for each in (mass, evals, evecs, gradX, gradY)):
        raise RuntimeError("DiffusionNet has no gradient of mass, evals, evecs, gradX or gradY; call detach() on them")
    pair = spectral_gradients(gradX, gradY, evecs) if block.with_gradient_features else ()
    return [each.to(_type_of(block)).contiguous() for each in (mass, evals, evecs, *pair)]


def _type_of(block):
    """In which type a block computes."""
    weight = block.diffusion.diffusion_time
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _has_operators(mesh):
    """Whether diffusion() and gradient_features() compute."""
    is_fp32 = mesh.evecs.dtype == torch.float32
    return mesh.evecs.is_cuda and mesh.evecs.dtype != torch.float64 and (not is_fp32 or mesh.offsets is not None)


def _math_of(dtype):
    """How operators and products multiply."""
    if dtype != torch.float32:
        return "fp32"
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


# ---- Nodes of autograd: several layers each --------------------------------------------------------------------------


def _linear(x, weight, bias, math):
    """Of a torch.nn.Linear and rows."""
    if x.dtype != torch.float32:
        return torch.addmm(bias, x, weight.t())
    return calls["product_bias"](x, weight.t(), bias, math)


def _linear_gradients(d, x, weight, math, needs_x, needs_weight, needs_bias):
    """Of x, the weight and the bias, or None."""
    if x.dtype != torch.float32:
        return d @ weight if needs_x else None, d.t() @ x if needs_weight else None, d.sum(0) if needs_bias else None
    d_x, d_weight, d_bias = calls["product_backward"](d, x, weight.t(), math, needs_x, needs_weight, needs_bias)
    return d_x, d_weight.t() if needs_weight else None, d_bias


def _by_autograd(function, inputs, needed, d):
    """The gradients of a function of inputs that PyTorch's operators compute: they have gradients themselves."""
    with torch.enable_grad():
        wanted = [each for each, is_needed in zip(inputs, needed) if is_needed]
        found = iter(torch.autograd.grad(function(), wanted, d, create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed]


class _Layers(torch.autograd.Function):
    """An MLP of `operands`, by turns a weight and a bias; between each two layers ReLU, and dropout if `dropped`, the
    share, is not 0. What a layer was given says by its zeros, too, what ReLU and dropout let through."""

    @staticmethod
    def forward(ctx, dropped, x, *operands):
        kept, math = [], _math_of(x.dtype)
        weights = operands if operands[0].dtype == x.dtype else [each.to(x.dtype) for each in operands]
        rows = _linear(x.reshape(-1, x.shape[-1]), *weights[:2], math)
        for at in range(2, len(weights), 2):
            rows = rows.relu_()
            if dropped:
                rows = torch.native_dropout(rows, dropped, True)[0]
            kept.append(rows)
            rows = _linear(rows, *weights[at:at + 2], math)
        ctx.numbers = dropped, math
        ctx.save_for_backward(x, *operands, *kept)
        return rows.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, d):
        (dropped, math), (_, *needed), saved = ctx.numbers, ctx.needs_input_grad, ctx.saved_tensors
        inputs, kept = saved[:len(needed)], saved[len(needed):]
        scale = 0 if dropped == 1 else 1 / (1 - dropped)
        if torch.is_grad_enabled():
            return None, *_by_autograd(lambda: _again(scale, kept, *inputs), inputs, needed, d)
        x, found = inputs[0], []
        kept = x.reshape(-1, x.shape[-1]), *kept
        d = aligned(d.reshape(-1, d.shape[-1]).contiguous())
        for at in range(len(kept) - 1, -1, -1):
            weight = inputs[2 * at + 1].to(x.dtype)
            d, *own = _linear_gradients(d, kept[at], weight, math, at > 0 or needed[0], *needed[2 * at + 1:2 * at + 3])
            found = own + found
            if at:
                d = _threshold_backward(d, kept[at], 0)
            if at and dropped:
                d = d.mul_(scale)
        return None, d.view(x.shape) if needed[0] else None, *found


def _again(scale, kept, x, *operands):
    """What _Layers computed, by operators of PyTorch."""
    x = torch.nn.functional.linear(x, *(each.to(x.dtype) for each in operands[:2]))
    for at, given in enumerate(kept, 1):
        x = x * (given > 0).view(x.shape) * scale
        x = torch.nn.functional.linear(x, *(each.to(x.dtype) for each in operands[2 * at:2 * at + 2]))
    return x


class _Spectrum(torch.autograd.Function):
    """x, x diffused and the gradient features of that, side by side, by products in fp32. `weights` are those of the
    gradient features."""

    @staticmethod
    def forward(ctx, block, mesh, x, times, *weights):
        own, product, math = mesh.factors, calls["product"], _math_of(torch.float32)
        vertices, width = x.shape[-2:]
        apart = *x.shape[:-2], -1, vertices, width  # below each other are: x diffused, xr and xi; then re and im
        damping = torch.exp(own.minus_evals * times)
        spectral = damping * product(own.evecs_t, (mesh.mass.unsqueeze(-1) * x).contiguous(), math)
        results = product(own.basis if weights else mesh.evecs, spectral, math).view(apart)
        diffused, *pair = results.unbind(-3)
        parts, kept = [x, diffused], []
        if weights:
            has_rotations = len(weights) == 2
            weight = torch.cat(weights) if has_rotations else weights[0]
            weighted = product(spectral.view(-1, width), weight.t(), math)  # of each eigenvector a row, or two
            gradients = own.gradients if has_rotations else _readable(own.basis[..., vertices:, :])
            weighted = product(gradients, weighted.view(*x.shape[:-2], -1, width), math).view(apart)
            (xr, xi), (re, im) = pair, weighted.unbind(-3)
            parts.append(torch.addcmul(xr * re, xi, im).tanh_())
            kept = weight, weighted
        out = torch.cat(parts, -1)
        ctx.others = block, mesh, math
        ctx.save_for_backward(x, times, *weights, damping, spectral, results, out, *kept)
        return out

    @staticmethod
    def backward(ctx, d):
        (block, mesh, math), (_, _, *needed), saved = ctx.others, ctx.needs_input_grad, ctx.saved_tensors
        inputs, (damping, spectral, results, out, *kept) = saved[:len(needed)], saved[len(needed):]
        if torch.is_grad_enabled():
            return None, None, *_by_autograd(lambda: block.before_mlp(inputs[0], mesh), inputs, needed, d)
        own, product, width = mesh.factors, calls["product"], out.shape[-1] // (3 if kept else 2)
        d_x, d_diffused, *d_features = d.split(width, -1)
        d_results, d_weights = torch.empty_like(results), ()
        d_results.select(-3, 0).copy_(d_diffused)
        if kept:
            weight, weighted = kept
            d_dots = _tanh_backward(d_features[0], out.narrow(-1, 2 * width, width)).unsqueeze(-3)
            torch.mul(d_dots, weighted, out=d_results.narrow(-3, 1, 2))
            has_rotations = len(weight) == 2 * width
            gradients_t = own.gradients_t if has_rotations else _readable(own.basis_t[..., results.shape[-2]:])
            d_weighted = product(gradients_t, (d_dots * results.narrow(-3, 1, 2)).flatten(-3, -2), math)
            d_spectral, d_weight, _ = _linear_gradients(d_weighted.view(-1, len(weight)), spectral.view(-1, width),
                                                        weight, math, True, True, False)
            d_spectral = d_spectral.view(spectral.shape).add_(product(own.basis_t, d_results.flatten(-3, -2), math))
            d_weights = d_weight.split(width)
        else:
            d_spectral = product(own.evecs_t, d_results.flatten(-3, -2), math)
        d_times = torch.mv((spectral * d_spectral).view(-1, width).t(), own.minus_evals.flatten())
        if needed[0]:
            d_x = torch.addcmul(d_x, product(mesh.evecs, damping * d_spectral, math), mesh.mass.unsqueeze(-1))
        return None, None, d_x, d_times, *d_weights


# Both have no other name in Python.
_threshold_backward, _tanh_backward = (getattr(torch.ops.aten, f"{name}_backward").default
                                       for name in ("threshold", "tanh"))


# ---- The parts of a block --------------------------------------------------------------------------------------------


class LearnedTimeDiffusion(torch.nn.Module):
    """Diffusion with a time for each channel, which is learned."""

    def __init__(self, C_inout, method="spectral"):
        super().__init__()
        check(method == "spectral", f"diffusion_method is {method!r}; here it has to be 'spectral'")
        self.C_inout = C_inout
        self.diffusion_time = torch.nn.Parameter(torch.zeros(C_inout))

    def set_back(self):
        """The optimizer may have made times negative. As in the original they are set back, and keep their gradient."""
        self.diffusion_time.data.clamp_(min=1e-8)

    def forward(self, x, mesh):
        """(x diffused, its spectrum)."""
        self.set_back()
        dtype = mesh.evecs.dtype
        if mesh.parts is not None:
            diffused, spectral = zip(*map(self, mesh.split(x), mesh.parts))
            return torch.cat(diffused), torch.stack(spectral)
        if _has_operators(mesh):
            operands = x.contiguous(), mesh.evecs, mesh.mass, mesh.evals, self.diffusion_time.to(dtype)
            if mesh.offsets is not None:
                return calls["diffusion_ragged"](*operands, mesh.offsets, _math_of(dtype))
            return calls["diffusion"](*operands, _math_of(dtype))
        wide = torch.promote_types(dtype, torch.float32)
        damping = torch.exp(-mesh.evals.to(wide).unsqueeze(-1) * self.diffusion_time.to(wide)).to(dtype)
        spectral = damping * (mesh.evecs.mT @ (mesh.mass.unsqueeze(-1) * x))
        return mesh.evecs @ spectral, spectral


class SpatialGradientFeatures(torch.nn.Module):
    """tanh of the scalar products of each vertex's gradients with combinations of them, which are learned."""

    def __init__(self, C_inout, with_gradient_rotations=True):
        super().__init__()
        self.C_inout, self.with_gradient_rotations = C_inout, with_gradient_rotations
        for name in ("A_re", "A_im") if with_gradient_rotations else ("A",):
            setattr(self, name, torch.nn.Linear(C_inout, C_inout, bias=False))

    def forward(self, spectral, mesh):
        """Of the spectrum of what was diffused."""
        if _has_operators(mesh):
            return self._by_operators(spectral, mesh)
        if mesh.parts is not None:
            return torch.cat(list(map(self, spectral, mesh.parts)))
        xr, xi = mesh.gr @ spectral, mesh.gi @ spectral
        if not self.with_gradient_rotations:
            weighted = self.A(spectral)
            return torch.tanh(xr * (mesh.gr @ weighted) + xi * (mesh.gi @ weighted))
        re, im = self.A_re(spectral), self.A_im(spectral)
        return torch.tanh(xr * (mesh.gr @ re - mesh.gi @ im) + xi * (mesh.gi @ re + mesh.gr @ im))

    def _by_operators(self, spectral, mesh):
        if self.with_gradient_rotations:
            weights = [each.weight.to(spectral.dtype) for each in (self.A_re, self.A_im)]
        else:
            weight = self.A.weight.to(spectral.dtype)
            weights = [weight, torch.zeros_like(weight)]
        operands, math = (spectral, mesh.gr, mesh.gi, *weights), _math_of(spectral.dtype)
        if mesh.offsets is not None:
            return calls["gradient_features_ragged"](*operands, mesh.offsets, math)
        return calls["gradient_features"](*operands, math)


class MiniMLP(torch.nn.Sequential):
    """Linear layers with an activation between each two, and before each but the first a dropout."""

    def __init__(self, layer_sizes, dropout=False, activation=torch.nn.ReLU, name="miniMLP"):
        super().__init__()
        for at, sizes in enumerate(zip(layer_sizes, layer_sizes[1:])):
            if at and dropout:
                self.add_module(f"{name}_mlp_layer_dropout_{at:03}", torch.nn.Dropout(0.5))
            self.add_module(f"{name}_mlp_layer_{at:03}", torch.nn.Linear(*sizes))
            if at + 2 < len(layer_sizes):
                self.add_module(f"{name}_mlp_act_{at:03}", activation())

    def forward(self, x):
        """One node, if its layers are what they were at first, and it is called eagerly."""
        if not x.is_cuda or x.dtype == torch.float64 or torch.compiler.is_compiling():
            return super().forward(x)
        operands, shares = [], set()
        for each in self:
            if type(each) is torch.nn.Linear and each.bias is not None:
                operands += each.weight, each.bias
            elif type(each) is torch.nn.Dropout:
                shares.add(each.p if each.training else 0)
            elif type(each) is not torch.nn.ReLU:
                return super().forward(x)
        if len(shares) > 1:
            return super().forward(x)
        return _Layers.apply(shares.pop() if shares else 0, x, *operands)


# ---- The networks ----------------------------------------------------------------------------------------------------


class DiffusionNetBlock(torch.nn.Module):
    """x + MLP(x, x diffused, the gradient features of that). Arguments are the original's."""

    def __init__(self, C_width, mlp_hidden_dims, dropout=True, diffusion_method="spectral",
                 with_gradient_features=True, with_gradient_rotations=True):
        super().__init__()
        self.C_width, self.mlp_hidden_dims, self.dropout = C_width, mlp_hidden_dims, dropout
        self.with_gradient_features, self.with_gradient_rotations = with_gradient_features, with_gradient_rotations
        self.diffusion = LearnedTimeDiffusion(C_width, diffusion_method)
        self.MLP_C = (3 if with_gradient_features else 2) * C_width
        if with_gradient_features:
            self.gradient_features = SpatialGradientFeatures(C_width, with_gradient_rotations)
        self.mlp = MiniMLP([self.MLP_C, *mlp_hidden_dims, C_width], dropout)

    def mesh(self, mass, evals, evecs, gradX=None, gradY=None):
        """What forward() takes in the place of `mass`, and then it needs none of the others. Shapes: as forward()."""
        return _mesh_of(self, mass, evals, evecs, gradX, gradY)

    def forward(self, x_in, mass, L=None, evals=None, evecs=None, gradX=None, gradY=None):
        """Shapes: x_in and the result (vertices, C_width), mass (vertices), evals (eigen), evecs (vertices, eigen),
        gradX and gradY (vertices, vertices), sparse or dense, or what spectral_gradients() has made of them; or all
        have one dimension more, before these, for several meshes. Meshes that differ in their sizes are lists of such
        tensors, one for each mesh, and x_in and the result have the vertices of all, one mesh after another. `mass`
        may be what mesh() has returned. L is not read."""
        mesh = mass if isinstance(mass, Mesh) else self.mesh(mass, evals, evecs, gradX, gradY)
        _check_operands(x_in, self.C_width, mesh, self)
        x = x_in.to(mesh.evecs.dtype)
        if mesh.factors is None or torch.compiler.is_compiling():
            return self.mlp(self.before_mlp(x, mesh)) + x_in
        self.diffusion.set_back()
        weights = [each.weight for each in self.gradient_features.children()] if self.with_gradient_features else []
        return self.mlp(_Spectrum.apply(self, mesh, x, self.diffusion.diffusion_time, *weights)) + x_in

    def before_mlp(self, x, mesh):
        """x, x diffused and the gradient features of that, side by side."""
        diffused, spectral = self.diffusion(x, mesh)
        parts = [x, diffused]
        if self.with_gradient_features:
            parts.append(self.gradient_features(spectral, mesh))
        return torch.cat(parts, -1)


def _check_operands(x, width, mesh, block):
    """Each forward pass calls this, so no sentence is written where all is right."""
    shape, dtype = (*mesh.evecs.shape[:-1], width), _type_of(block)
    if x.shape != shape:
        raise ValueError(f"x_in has the shape {tuple(x.shape)}; it has to be {shape}")
    if x.device != mesh.evecs.device:
        raise ValueError(f"x_in is on {x.device}, but the mesh is on {mesh.evecs.device}")
    if mesh.evecs.dtype != dtype:
        raise ValueError(f"the mesh is of {mesh.evecs.dtype}, but the network computes in {dtype}; make it by mesh() "
                         "again")
    if block.with_gradient_features and mesh.gr is None:
        raise ValueError("the mesh has no gradX and gradY, which the gradient features need")


CORNERS = {"edges": 2, "faces": 3}
OUTPUTS = "vertices", *CORNERS, "global_mean"


class DiffusionNet(torch.nn.Module):
    """A linear layer, blocks, and a linear layer. Arguments are the original's:

    C_in, C_out: channels of what comes in and goes out. C_width: channels between. N_block: how many blocks.
    mlp_hidden_dims: sizes of hidden layers of each block's MLP; [C_width, C_width] if None. dropout: whether the MLPs
    have one, of 0.5. outputs_at: "vertices"; "edges" or "faces", whose outputs are means of their corners'; or
    "global_mean", one output for each mesh, the mean of its vertices' by their masses, added up in fp32 or wider.
    last_activation: a function of the outputs, which have a dimension for meshes there, also if there is one mesh.
    with_gradient_features, with_gradient_rotations: as DiffusionNetBlock. diffusion_method: "spectral"."""

    def __init__(self, C_in, C_out, C_width=128, N_block=4, last_activation=None, outputs_at="vertices",
                 mlp_hidden_dims=None, dropout=True, with_gradient_features=True, with_gradient_rotations=True,
                 diffusion_method="spectral"):
        super().__init__()
        check(outputs_at in OUTPUTS, f"outputs_at is {outputs_at!r}; it has to be {' or '.join(map(repr, OUTPUTS))}")
        check(diffusion_method == "spectral", f"diffusion_method is {diffusion_method!r}; here it has to be 'spectral'")
        check(N_block >= 1, f"N_block is {N_block}; it has to be at least 1")
        self.C_in, self.C_out, self.C_width, self.N_block = C_in, C_out, C_width, N_block
        self.last_activation, self.outputs_at, self.dropout = last_activation, outputs_at, dropout
        self.mlp_hidden_dims = [C_width, C_width] if mlp_hidden_dims is None else mlp_hidden_dims
        self.with_gradient_features, self.with_gradient_rotations = with_gradient_features, with_gradient_rotations
        self.first_lin = torch.nn.Linear(C_in, C_width)
        self.last_lin = torch.nn.Linear(C_width, C_out)
        for at in range(N_block):
            self.add_module(f"block_{at}", DiffusionNetBlock(
                C_width, self.mlp_hidden_dims, dropout, diffusion_method, with_gradient_features,
                with_gradient_rotations))

    def mesh(self, mass, evals, evecs, gradX=None, gradY=None):
        """What forward() takes in the place of `mass`, and then it needs none of the others: in the type in which the
        network computes now, so call it where forward() is called, as to torch.autocast. Shapes: as forward()."""
        return self.block_0.mesh(mass, evals, evecs, gradX, gradY)

    def forward(self, x_in, mass, L=None, evals=None, evecs=None, gradX=None, gradY=None, edges=None, faces=None):
        """Shapes: x_in (vertices, C_in); mass, evals, evecs, gradX and gradY as DiffusionNetBlock.forward() has them;
        edges (edges, 2) and faces (faces, 3), torch.int64, of which one is needed if outputs are there. The result has
        a row of C_out for each vertex, edge or face; a "global_mean" is (C_out). All may have one dimension more,
        before these, for several meshes; of meshes that differ in their sizes, of which mass, evals, evecs, gradX and
        gradY are lists, they have not, and edges and faces count the vertices of all meshes; but global means have a
        row for each. L is not read."""
        corners = {"edges": edges, "faces": faces}.get(self.outputs_at)
        if x_in.dim() not in (2, 3) or x_in.shape[-1] != self.C_in:
            raise ValueError(f"x_in has the shape {tuple(x_in.shape)}; it has to be (vertices, {self.C_in}), or that "
                             "with one dimension more before it")
        if self.outputs_at in CORNERS and corners is None:
            raise ValueError(f"{self.outputs_at} is missing: the outputs are there")
        mesh = mass if isinstance(mass, Mesh) else self.mesh(mass, evals, evecs, gradX, gradY)
        _check_operands(x_in, self.C_in, mesh, self.block_0)
        x = self.first_lin(x_in)
        for at in range(self.N_block):
            x = getattr(self, f"block_{at}")(x, mesh)
        x = self.last_lin(x)
        is_single = x.dim() == 2
        if self.outputs_at == "global_mean":
            x, is_single = _mean_of_mesh(x, mesh), is_single and mesh.offsets is None
        if is_single:
            x = x.unsqueeze(0)
        if corners is not None:
            x = _means(x, corners.unsqueeze(0) if is_single else corners, self.outputs_at)
        if self.last_activation is not None:
            x = self.last_activation(x)
        return x.squeeze(0) if is_single else x


def _means(x, corners, name):
    """Of the rows of x at the corners of each edge or face."""
    if corners.dim() != 3 or len(corners) != len(x) or corners.shape[2] != CORNERS[name]:
        raise ValueError(f"{name} has the shape {tuple(corners.shape)}; each has {CORNERS[name]} vertices, and there "
                         "are as many meshes as of x_in")
    rows = x.gather(1, corners.flatten(1).unsqueeze(-1).expand(-1, -1, x.shape[2]))
    return rows.unflatten(1, (corners.shape[1], CORNERS[name])).mean(2)


def _mean_of_mesh(x, mesh):
    """Of the rows of each mesh, by the vertices' masses."""
    wide = torch.promote_types(x.dtype, torch.float32)
    mass = mesh.mass.to(wide).unsqueeze(-1)
    sums = x * mass, mass
    if mesh.offsets is None:
        sums, masses = (each.sum(-2) for each in sums)
    else:
        sums, masses = (torch.segment_reduce(each, "sum", offsets=mesh.offsets) for each in sums)
    return (sums / masses).to(x.dtype)
