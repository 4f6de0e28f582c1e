"""DiffusionNet by PyTorch's operators alone, and meshes with what it reads of them: what fused_kernels.nn is compared
with. A network is a function of its state_dict(), so it is computed in whichever type the tensors have."""

import torch
import torch.nn.functional as F


# ---- The network -------------------------------------------------------------------------------------------------


def gradient(grad, diffused, spectral):
    """grad diffused, of a sparse (vertices, vertices) matrix; or grad spectral, of a dense one of the spectrum."""
    if grad.layout == torch.strided:
        return grad @ spectral
    if diffused.dim() == 3:
        return torch.stack([torch.sparse.mm(grad[at], each) for at, each in enumerate(diffused)])
    return torch.sparse.mm(grad, diffused)


def mlp(weights, x, name):
    layers = sum(each.startswith(f"{name}_mlp_layer_") and each.endswith(".weight") for each in weights)
    for at in range(layers):
        x = F.linear(x, weights[f"{name}_mlp_layer_{at:03}.weight"], weights[f"{name}_mlp_layer_{at:03}.bias"])
        x = F.relu(x) if at + 1 < layers else x
    return x


def block(weights, name, x, mass, evals, evecs, gradX, gradY):
    """Of the weights whose names begin with `name`: with rotations, without, or without gradient features."""
    times = weights[f"{name}.diffusion.diffusion_time"]
    with torch.no_grad():
        times.clamp_(min=1e-8)
    spectral = torch.exp(-evals.unsqueeze(-1) * times) * (evecs.mT @ (mass.unsqueeze(-1) * x))
    diffused = evecs @ spectral
    parts = [x, diffused]
    of_gradients = f"{name}.gradient_features.A"
    if f"{of_gradients}.weight" in weights or f"{of_gradients}_re.weight" in weights:
        gx, gy = gradient(gradX, diffused, spectral), gradient(gradY, diffused, spectral)
        if f"{of_gradients}.weight" in weights:
            real, imag = (F.linear(each, weights[f"{of_gradients}.weight"]) for each in (gx, gy))
        else:
            re, im = weights[f"{of_gradients}_re.weight"], weights[f"{of_gradients}_im.weight"]
            real, imag = F.linear(gx, re) - F.linear(gy, im), F.linear(gy, re) + F.linear(gx, im)
        parts.append(torch.tanh(gx * real + gy * imag))
    return x + mlp(weights, torch.cat(parts, -1), f"{name}.mlp.miniMLP")


def network(weights, x, mass, evals, evecs, gradX, gradY):
    """Outputs at vertices, without dropout."""
    x = F.linear(x, weights["first_lin.weight"], weights["first_lin.bias"])
    for name in sorted({each.split(".")[0] for each in weights if each.startswith("block_")}):
        x = block(weights, name, x, mass, evals, evecs, gradX, gradY)
    return F.linear(x, weights["last_lin.weight"], weights["last_lin.bias"])


# ---- Meshes ------------------------------------------------------------------------------------------------------


def sphere(times=3):
    """(vertices, faces) of an icosahedron whose faces were divided into four so many times: 10 * 4^times + 2 vertices,
    on the unit sphere, and faces that turn left seen from outside."""
    golden = (1 + 5**0.5) / 2
    points = [(0.0, s, t * golden) for s in (-1, 1) for t in (-1, 1)]
    points = torch.tensor([p[i:] + p[:i] for i in range(3) for p in points], dtype=torch.float64)
    apart = torch.cdist(points, points)
    near = (apart > 0) & (apart < 2.1)  # edges have the length 2
    faces = [(i, j, k) for i in range(12) for j in range(i) for k in range(j) if near[i, j] & near[j, k] & near[i, k]]
    faces = torch.tensor(faces)
    for _ in range(times):
        edges = torch.cat([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).sort(1)[0]
        edges, which = edges.unique(dim=0, return_inverse=True)
        middles = (which + len(points)).view(3, -1)
        points = torch.cat([points, points[edges].mean(1)])
        (a, b, c), (ab, bc, ca) = faces.t(), middles
        faces = torch.cat([torch.stack(each, 1) for each in ((a, ab, ca), (b, bc, ab), (c, ca, bc), (ab, bc, ca))])
    points = F.normalize(points, dim=1)
    a, b, c = points[faces].unbind(1)
    turned = (torch.linalg.cross(b - a, c - a) * a).sum(1) < 0
    return points, torch.where(turned[:, None], faces.flip(1), faces)


def operators_of(vertices, faces, eigen):
    """(mass, evals, evecs, gradX, gradY) of a closed mesh, in fp64: the cotangent Laplacian's least eigenvalues, and
    sparse gradients in an orthonormal pair of tangents at each vertex. They are where `vertices` are."""
    count, corners = len(vertices), vertices[faces]
    opposite = corners.roll(-2, 1) - corners.roll(-1, 1)  # the edge opposite to each corner
    normals = torch.linalg.cross(opposite[:, 0], opposite[:, 1])
    areas = normals.norm(dim=1) / 2
    normals = normals / (2 * areas[:, None])
    mass = vertices.new_zeros(count).index_add_(0, faces.flatten(), (areas / 3).repeat_interleave(3))

    # The gradient on a face is the sum of normal x edge / (2 area) over its corners; at a vertex it is the mean of the
    # faces around it, weighted by their areas. The Laplacian of a face is area * gradient^T gradient.
    on_faces = torch.linalg.cross(normals[:, None].expand_as(opposite), opposite) / (2 * areas[:, None, None])
    laplacian = vertices.new_zeros(count, count)
    at_vertices = vertices.new_zeros(count, count, 3)
    of_vertices = vertices.new_zeros(count, 3)
    for i in range(3):
        of_vertices.index_add_(0, faces[:, i], areas[:, None] * normals)
        for j in range(3):
            at = faces[:, i], faces[:, j]
            laplacian.index_put_(at, areas * (on_faces[:, i] * on_faces[:, j]).sum(1), accumulate=True)
            at_vertices.index_put_(at, areas[:, None] * on_faces[:, j] / (3 * mass[at[0], None]), accumulate=True)
    of_vertices = F.normalize(of_vertices, dim=1)
    helper = F.one_hot(of_vertices.abs().argmin(1), 3).double()
    first = F.normalize(torch.linalg.cross(of_vertices, helper), dim=1)
    second = torch.linalg.cross(of_vertices, first)
    gradX, gradY = (torch.einsum("vwc,vc->vw", at_vertices, each).to_sparse() for each in (first, second))

    # L e = lambda M e is a symmetric problem for M^(1/2) e.
    root = mass.sqrt()
    evals, evecs = torch.linalg.eigh(laplacian / root[:, None] / root)
    return mass, evals[:eigen].clamp(min=0), evecs[:, :eigen] / root[:, None], gradX, gradY


def bumpy(seed, times=3):
    """(vertices, faces): an ellipsoid with bumps, another one for each seed."""
    vertices, faces = sphere(times)
    generator = torch.Generator().manual_seed(seed)
    waves = 3 * torch.randn(3, 5, generator=generator, dtype=torch.float64)
    phases = 6 * torch.rand(5, generator=generator, dtype=torch.float64)
    radii = 1 + 0.05 * torch.sin(vertices @ waves + phases).sum(1)
    stretch = 0.6 + 0.8 * torch.rand(3, generator=generator, dtype=torch.float64)
    return vertices * radii[:, None] * stretch, faces
