"""The operators, one row each. From the rows come the types of the library's functions, the descriptions that it is
given, and what PyTorch is told: schemas, layouts of results without a call, gradients. Nothing here needs PyTorch; what
is checked here are a tensor's shape, strides and type."""

import dataclasses
import functools
import typing

from ._header import (FK_BFLOAT16, FK_FLOAT16, FK_FLOAT32, FK_GATE_GELU, FK_GATE_GELU_TANH, FK_GATE_NONE, FK_GATE_RELU,
                      FK_GATE_SIGMOID, FK_GATE_SILU, FK_LABEL_INT32, FK_LABEL_INT64, FK_TF32, FK_TF32X3, fk_attention,
                      fk_attention_gradients, fk_clifford, fk_diffusion, fk_gating, fk_gradients, fk_product, fk_softmax,
                      fk_strides)

# Numbers are part of what a plan is found by. So they are converted first: a tensor as a key would be compared by
# identity, and its first value would be used for ever. Of each type in a schema, the expression that converts:
PYTHON = {"bool": "bool({0})", "int": "operator.index({0})", "float?": "None if {0} is None else float({0})",
          "int[]": "tuple(map(operator.index, {0}))", "str": "{0}"}


@dataclasses.dataclass(eq=False)
class Operator:
    """A function of the library as an operator of tensors.

    A name in `reads` or `writes` that ends with ? may be None. A result with the name of a number, such as log_sums, is
    None unless that number is true; the gradient d_x is where the operand x is. The C function gets NULL for None."""

    name: str  # torch.ops.fused_kernels.NAME
    function: str  # of the library
    struct: type  # its description
    types: dict  # of operands and results: fk_type by the names of PyTorch's types
    reads: str  # operands, in the C function's order; gradients d_... come first
    writes: str  # results, in that order
    # The dimensions of each operand and result; x says them for d_x, too. A struct's field of the name of a dimension
    # has its size. One that ends with ? may be missing, as the first of a batch. What is not in `like` is contiguous.
    shapes: dict
    dtypes: dict = dataclasses.field(default_factory=dict)  # of those with other types: "int64", or several names
    like: dict = dataclasses.field(default_factory=dict)  # results that lie in memory as an operand does
    strides: dict = dataclasses.field(default_factory=dict)  # the fields for those that need not be contiguous
    first: str = ""  # operands that are looked at before the others, in this order
    # What is no tensor: name -> (type in the operator's schema, one of PYTHON, and the default).
    numbers: dict = dataclasses.field(default_factory=dict)
    given: typing.Callable = None  # numbers -> sizes of dimensions and fields; called before operands are looked at
    finish: typing.Callable = None  # (fields, operands, numbers) -> fields that are others; called after that
    autocast: typing.Callable = None  # numbers -> whether torch.autocast converts operands; None: it does not
    # The name of the row of the gradients; or a function (ctx, *gradients) -> gradients of all inputs; or None.
    backward: object = None
    # (calls, {operand: tensor}, numbers, incoming gradient, operands that need one) -> {result of the row of the
    # gradients: tensor}, by calls that have gradients themselves; None: there are no second derivatives.
    twice: typing.Callable = None
    refusal: str = ""  # what is said where an operand that has no gradient requires one
    returns: str = ""  # results in the order in which Python returns them, if it is not that of `writes`

    @functools.cached_property
    def operands(self):
        return tuple(each.rstrip("?") for each in self.reads.split())

    @functools.cached_property
    def results(self):
        return tuple(each.rstrip("?") for each in self.writes.split())

    @functools.cached_property
    def returned(self):
        return tuple(self.returns.split()) or self.results

    @functools.cached_property
    def order(self):
        """Operands as they are looked at."""
        first = [each for each in self.first.split() if each in self.operands]
        return *first, *(each for each in self.operands if each not in first)

    @functools.cached_property
    def optional(self):
        """Whether each operand may be None."""
        return tuple(each.endswith("?") for each in self.reads.split())

    @property
    def schema(self):
        """(Tensor x, Tensor? b, bool flag=True) -> (Tensor, Tensor)."""
        inputs = [f"Tensor{'?' * may_be_none} {name}" for name, may_be_none in zip(self.operands, self.optional)]
        inputs += [f"{kind} {name}={list(default) if isinstance(default, tuple) else default!r}"
                   for name, (kind, default) in self.numbers.items()]
        results = ", ".join(["Tensor"] * len(self.results))
        return f"({', '.join(inputs)}) -> {results if len(self.results) == 1 else f'({results})'}"

    def shape_of(self, name):
        """The names of its dimensions."""
        return self.shapes[name if name in self.shapes else name.removeprefix("d_")].split()

    def sizes_of(self, name, sizes):
        return tuple(sizes[each] for each in self.shape_of(name) if sizes[each] is not None)

    def is_written(self, name, operands, numbers):
        """Whether there is this result."""
        return bool(numbers.get(name, True)) and operands.get(name.removeprefix("d_"), self) is not None

    def sizes(self, operands, known=()):
        """The size of each dimension by its name, where those that are `known` are not asked for: of numbers or, if
        PyTorch traces a program, of symbols. Nothing is compared but the count of dimensions."""
        sizes = dict(known)
        for name in self.order:
            names = self.shape_of(name)
            if operands[name] is None or all(each in sizes for each in names):
                continue
            shape, count = tuple(operands[name].shape), len(names)
            if names[0].endswith("?") and sizes.get(names[0], self) is None:  # known to be missing
                names, count = names[1:], count - 1
            elif names[0].endswith("?") and names[0] not in sizes:
                check(len(shape) in (count - 1, count),
                      f"{name} has the shape {shape}; it has to have {count - 1} or {count} dimensions")
                if len(shape) < count:
                    sizes[names[0]], names, count = None, names[1:], count - 1
            check(len(shape) == count, f"{name} has the shape {shape}; it has to have {count} dimensions")
            for each, size in zip(names, shape):
                sizes.setdefault(each, size)
        return sizes

    def known(self, fields):
        """Those of these fields, which are `given`, that are dimensions."""
        return {each: fields[each] for names in self.shapes.values() for each in names.split() if each in fields}

    def check(self, operands, numbers):
        """(sizes, fields of a description) of operands that fit."""
        fields = self.given(**numbers) if self.given else {}
        sizes = self.sizes(operands, self.known(fields))
        first = operands[self.order[0]]
        fields |= {each.rstrip("?"): size for each, size in sizes.items() if size is not None} | numbers
        fields["type"] = type_of(self.order[0], first, self.types)
        for name in self.order:
            if operands[name] is not None:
                check_operand(name, operands[name], self.sizes_of(name, sizes), self.dtypes.get(name, nameof(first)))
                check(name in self.strides or operands[name].is_contiguous(),
                      f"{name} has the strides {operands[name].stride()}, but it has to be contiguous; call "
                      ".contiguous() if a copy is acceptable")
        return sizes, fields | (self.finish(fields, operands, numbers) if self.finish else {})

    def describe(self, fields, layouts):
        """The description. layouts: (sizes, strides) of operands and results, by their names."""
        fields = fields | {field: of_rows(name, *layouts[name]) if len(layouts[name][0]) == 2
                           else of_heads(name, *layouts[name])
                           for name, field in self.strides.items() if name in layouts}
        return self.struct(**{name: fields[name] for name, _ in self.struct._fields_[1:] if name in fields})

    def is_transposed(self, operand):
        """Whether results that are like this operand lie transposed. They are dense then; where it is None, they lie as
        torch.empty_like() has it."""
        return None


class Product(Operator):
    """Of matrices, or of batches of them, which may lie transposed: a description says how."""

    def is_transposed(self, operand):
        return lie("an operand", tuple(operand.shape), operand.stride())[0]

    def describe(self, fields, layouts):
        for name in ("a", "b"):
            transposed, stride, between = lie(name, *layouts[name])
            fields |= {f"transpose_{name}": transposed, f"{name}_stride": stride, f"{name}_batch_stride": between}
        fields["c_batch_stride"] = fields["rows"] * fields["cols"]
        return super().describe(fields, {})


# ---- What is checked, and what is said where it does not hold ------------------------------------------------------


def check(condition, sentence):
    if not condition:
        raise ValueError(sentence)


def nameof(tensor):
    """Of its type, such as float16."""
    return str(tensor.dtype).removeprefix("torch.")


def type_of(name, tensor, types):
    """What `types` has for the type of a tensor."""
    check(nameof(tensor) in types, f"{name} is torch.{nameof(tensor)}; it has to be torch.{' or torch.'.join(types)}")
    return types[nameof(tensor)]


def check_operand(name, tensor, shape, types):
    """types: their names, with spaces between them."""
    check(tuple(tensor.shape) == shape, f"{name} has the shape {tuple(tensor.shape)}; it has to be {shape}")
    check(0 not in shape, f"{name} has the shape {shape}; each dimension has to have at least 1 element")
    type_of(name, tensor, dict.fromkeys(types.split()))


def of_rows(name, sizes, strides):
    """How far rows of a matrix are apart, in elements; 0 for a single row."""
    (rows, cols), (by_row, by_col) = sizes, strides
    check((cols <= 1 or by_col == 1) and (rows <= 1 or by_row > 0),
          f"{name} has the strides {tuple(strides)}, but elements of a row have to be neighbours and rows have to "
          "have memory of their own; call .contiguous() if a copy is acceptable")
    return by_row if rows > 1 else 0


def lie(name, sizes, strides):
    """(whether memory has the transpose, how far rows in memory are apart, and how far matrices are) of a matrix, or of
    a batch of them: 0 for a single row, or a matrix that is all of the batch."""
    (rows, cols), (by_row, by_col) = sizes[-2:], strides[-2:]
    between = strides[0] if len(sizes) == 3 and sizes[0] > 1 else 0
    if (cols <= 1 or by_col == 1) and (rows <= 1 or by_row > 0):
        return False, by_row if rows > 1 else 0, between
    check((rows <= 1 or by_row == 1) and (cols <= 1 or by_col > 0),
          f"{name} has the strides {tuple(strides)}, but elements of a row or of a column have to be neighbours, and "
          "have memory of their own; call .contiguous() if a copy is acceptable")
    return True, by_col if cols > 1 else 0, between


def of_heads(name, sizes, strides):
    """The fk_strides of (batch, rows, heads, width)."""
    check((sizes[3] <= 1 or strides[3] == 1) and all(by > 0 for size, by in zip(sizes[:3], strides) if size > 1),
          f"{name} has the strides {tuple(strides)}, but elements of the last dimension have to be neighbours and no "
          "dimension may be expanded; call .contiguous() if a copy is acceptable")
    return fk_strides(*strides[:3])


# ---- What single rows need -----------------------------------------------------------------------------------------

HALF, BRAIN, SINGLE = {"float16": FK_FLOAT16}, {"bfloat16": FK_BFLOAT16}, {"float32": FK_FLOAT32}
LABELS = {"int64": FK_LABEL_INT64, "int32": FK_LABEL_INT32}
MATH = {"fp32": FK_FLOAT32, "tf32": FK_TF32, "tf32x3": FK_TF32X3}  # of operands in fp32
GATES = {"sigmoid": FK_GATE_SIGMOID, "silu": FK_GATE_SILU, "gelu": FK_GATE_GELU, "gelu_tanh": FK_GATE_GELU_TANH,
         "relu": FK_GATE_RELU, "none": FK_GATE_NONE}
# The algebras of the Clifford products: (p, q, r), how many basis vectors square to 1, to -1 and to 0 -> how many
# triples of grades there are.
TRIPLES = {(2, 0, 0): 10, (3, 0, 0): 20, (3, 0, 1): 34, (1, 3, 0): 35, (4, 1, 0): 56}


def type_of_product(fields, operands, numbers, left="a"):
    """left: the name of the left factor."""
    math = numbers["math"]
    check(math in MATH, f"math is {math!r}; it has to be {' or '.join(map(repr, MATH))}")
    check(math == "fp32" or fields["type"] == FK_FLOAT32,
          f"math is {math!r}, but {left} is {operands[left].dtype}; it has to be torch.float32")
    return {"type": MATH[math]} if fields["type"] == FK_FLOAT32 else {}


def type_and_gate(fields, operands, numbers):
    gate = numbers["gate"]
    check(gate in GATES, f"gate is {gate!r}; it has to be {' or '.join(map(repr, GATES))}")
    return {"gate": GATES[gate]} | type_of_product(fields, operands, numbers, "x")


def gradients_by_products(calls, operands, numbers, d, needed):
    """Those of a product, or of a batch of them. A gradient that is expanded, as that of a sum is, has to be copied."""
    a, b, math, d = operands["a"], operands["b"], numbers["math"], d.contiguous()
    return {"d_a": calls["product"](d, b.mT, math) if "a" in needed else None,
            "d_b": calls["product"](a.mT, d, math) if "b" in needed else None,
            "d_bias": d.flatten(0, -2).sum(0) if "bias" in needed else None}


def type_of_meshes(fields, operands, numbers):
    """Of a diffusion or of gradient features; where meshes differ in their sizes there are offsets."""
    if "ends" in fields:
        check(fields["ends"] == fields["meshes"] + 1,
              f"offsets has {fields['ends']} elements; of {fields['meshes']} meshes it has to have one more")
    return type_of_product(fields, operands, numbers, "basis" if "basis" in operands else "gr")


def type_of_labels(fields, operands, numbers):
    return {"label_type": LABELS[nameof(operands["labels"])]}


def scale_of_attention(fields, operands, numbers):
    return {"scale": max(fields["width"], 1)**-0.5 if numbers["scale"] is None else numbers["scale"]}


def algebra(signature, normed):
    check(signature in TRIPLES, f"the signature is {signature}; it has to be one of {', '.join(map(str, TRIPLES))}")
    return dict(zip("pqr", signature), blades=2**sum(signature), triples=TRIPLES[signature], grades=sum(signature) + 1)


# ---- The table -----------------------------------------------------------------------------------------------------


def gradients_of(forward, function, reads, writes, what, **others):
    """The row of the gradients of an operator; what is not said here is as there."""
    own = dict(name=f"{forward.name}_backward", function=function, reads=reads, writes=writes, returns="",
               first=forward.reads, like={}, strides={}, autocast=None, backward=None, twice=None,
               refusal=f"the library has no second derivative of {what}")
    return dataclasses.replace(forward, **own | others)


PRODUCT = Product(
    name="product", function="fk_product_forward", struct=fk_product, types=HALF | BRAIN | SINGLE,
    reads="a b", writes="c",
    shapes=dict(a="batch? rows depth", b="batch? depth cols", bias="cols", c="batch? rows cols"),
    strides=dict(a="a_stride", b="b_stride"), numbers=dict(math=("str", "fp32")), given=lambda **numbers: {"batch": 1},
    finish=type_of_product, autocast=lambda math: math == "fp32", backward="product_backward",
    twice=gradients_by_products)

PRODUCT_BIAS = dataclasses.replace(PRODUCT, name="product_bias", function="fk_product_bias_forward", reads="a b bias")

GATING = Operator(
    name="gating", function="fk_gating_forward", struct=fk_gating, types=HALF | BRAIN | SINGLE,
    reads="x w1 w2 b1? b2?", writes="out",
    shapes=dict(x="rows inputs", w1="inputs hidden", w2="inputs hidden", b1="hidden", b2="hidden", out="rows hidden"),
    strides=dict(x="x_stride"), numbers=dict(gate=("str", "sigmoid"), math=("str", "fp32")), finish=type_and_gate,
    autocast=lambda gate, math: math == "fp32", backward="gating_backward")

GATING_TWO = dataclasses.replace(
    GATING, name="gating_two", function="fk_gating_two_forward", reads="x y w1 w2 b1? b2?",
    shapes=GATING.shapes | dict(y="rows value_inputs", w2="value_inputs hidden"),
    strides=dict(x="x_stride", y="value_stride"), numbers=GATING.numbers | dict(gated_values=("bool", False)),
    autocast=lambda gate, math, gated_values: math == "fp32", backward="gating_two_backward")

GATING_TWO_KEPT = dataclasses.replace(
    GATING_TWO, name="gating_two_kept", function="fk_gating_two_kept_forward", writes="out s_slopes v_slopes",
    shapes=GATING_TWO.shapes | dict.fromkeys(("s_slopes", "v_slopes"), "rows hidden"),
    backward="gating_two_kept_backward")

ATTENTION = Operator(
    name="attention", function="fk_attention_forward", struct=fk_attention, types=HALF | BRAIN,
    reads="q k v", writes="out log_sums?",
    shapes=dict(q="batch queries heads width", k="batch keys kv_heads width", v="batch keys kv_heads width",
                out="batch queries heads width", log_sums="batch heads queries"),
    dtypes=dict(log_sums="float32"), like=dict(out="q"),
    strides=dict(q="q_strides", k="k_strides", v="v_strides", out="out_strides"),
    numbers=dict(causal=("bool", False), scale=("float?", None), log_sums=("bool", False)),
    finish=scale_of_attention, autocast=lambda *numbers: True, backward="attention_backward")

DIFFUSION = Operator(
    name="diffusion", function="fk_diffusion_forward", struct=fk_diffusion, types=HALF | BRAIN | SINGLE,
    reads="x basis mass evalues times", writes="spectral out", returns="out spectral",
    shapes=dict(x="meshes? vertices width", basis="meshes? vertices eigen", mass="meshes? vertices",
                evalues="meshes? eigen", times="width", spectral="meshes? eigen width", out="meshes? vertices width"),
    numbers=dict(math=("str", "fp32")), given=lambda math: {"meshes": 1}, finish=type_of_meshes,
    backward="diffusion_backward",
    refusal="the diffusion has no gradient of basis, mass or evalues; call detach() on them")


def ragged(row, shapes):
    """The same of meshes that differ in their sizes. Vertices are those of all meshes together."""
    name = f"{row.name}_ragged"
    return dataclasses.replace(
        row, name=name, function=row.function.replace("_forward", "_ragged_forward"), reads=f"{row.reads} offsets",
        shapes=dict(shapes, offsets="ends"), dtypes=dict(offsets="int32"), given=None, backward=f"{name}_backward")


DIFFUSION_RAGGED = ragged(DIFFUSION, dict(
    x="vertices width", basis="vertices eigen", mass="vertices", evalues="meshes eigen", times="width",
    spectral="meshes eigen width", out="vertices width"))

SOFTMAX = Operator(
    name="softmax", function="fk_softmax_forward", struct=fk_softmax, types=HALF | BRAIN | SINGLE, reads="x w",
    writes="probs",
    shapes=dict(x="rows inputs", w="inputs classes", probs="rows classes"), backward="softmax_backward")

CROSS_ENTROPY = Operator(
    name="cross_entropy", function="fk_cross_entropy_forward", struct=fk_softmax, types=HALF | BRAIN | SINGLE,
    reads="x w labels", writes="losses logits log_sums",
    shapes=dict(x="rows inputs", w="inputs classes", labels="rows", losses="rows", logits="rows classes",
                log_sums="rows"),
    dtypes=dict(labels=" ".join(LABELS), **dict.fromkeys(("losses", "logits", "log_sums", "d_losses"), "float32")),
    finish=type_of_labels, backward="cross_entropy_backward")

GRADIENT_FEATURES = Operator(
    name="gradient_features", function="fk_gradients_forward", struct=fk_gradients, types=HALF | BRAIN | SINGLE,
    reads="x gr gi lr li", writes="out",
    shapes=dict(x="meshes? eigen width", gr="meshes? vertices eigen", gi="meshes? vertices eigen", lr="width width",
                li="width width", out="meshes? vertices width"),
    numbers=dict(math=("str", "fp32")), given=lambda math: {"meshes": 1}, finish=type_of_meshes,
    backward="gradient_features_backward",
    refusal="the gradient features have no gradient of gr or gi; call detach() on them")

FEATURES_RAGGED = ragged(GRADIENT_FEATURES, dict(
    x="meshes eigen width", gr="vertices eigen", gi="vertices eigen", lr="width width", li="width width",
    out="vertices width"))

CLIFFORD = Operator(
    name="clifford", function="fk_clifford_forward", struct=fk_clifford, types=SINGLE, reads="x y w", writes="out",
    shapes=dict(x="blades batch features", y="blades batch features", w="features triples",
                out="blades batch features"),
    numbers=dict(signature=("int[]", (3, 0, 0)), normed=("bool", True)), given=algebra,
    backward="clifford_backward")

CLIFFORD_CONNECTED = dataclasses.replace(
    CLIFFORD, name="clifford_connected", function="fk_clifford_connected_forward",
    shapes=CLIFFORD.shapes | dict(w="triples features features"), backward="clifford_connected_backward")

CLIFFORD_CONNECTED_KEPT = dataclasses.replace(
    CLIFFORD_CONNECTED, name="clifford_connected_kept", function="fk_clifford_connected_kept_forward",
    writes="out inverse_norms", shapes=CLIFFORD_CONNECTED.shapes | dict(inverse_norms="grades batch"),
    backward="clifford_connected_kept_backward")

CLIFFORD_LAYER = dataclasses.replace(
    CLIFFORD, name="clifford_layer", function="fk_clifford_layer_forward", reads="x mix bias? w", writes="y out",
    returns="out y", shapes=CLIFFORD.shapes | dict(mix="grades features features", bias="features"),
    backward="clifford_layer_backward")

OPERATORS = {each.name: each for each in (
    PRODUCT,
    PRODUCT_BIAS,
    gradients_of(PRODUCT, "fk_product_backward", "d_c a b", "d_a d_b d_bias", "the product", first="a b",
                 like=dict(d_a="a", d_b="b"), strides=PRODUCT.strides,
                 numbers=PRODUCT.numbers | dict.fromkeys(("d_a", "d_b", "d_bias"), ("bool", True))),
    GATING,
    gradients_of(GATING, "fk_gating_backward", "d_out x w1 w2 b1? b2?", "d_x d_w1 d_w2 d_b1? d_b2?",
                 "the gated layer", strides=dict(x="x_stride", d_out="out_stride")),
    GATING_TWO,
    gradients_of(GATING_TWO, "fk_gating_two_backward", "d_out x y w1 w2 b1? b2?", "d_x d_y d_w1 d_w2 d_b1? d_b2?",
                 "the gated layer", strides=dict(x="x_stride", y="value_stride", d_out="out_stride")),
    GATING_TWO_KEPT,
    gradients_of(GATING_TWO_KEPT, "fk_gating_two_kept_backward", "d_out x y w1 w2 b1? b2? s_slopes v_slopes",
                 "d_x d_y d_w1 d_w2 d_b1? d_b2?", "the gated layer",
                 strides=dict(x="x_stride", y="value_stride", d_out="out_stride")),
    ATTENTION,
    gradients_of(ATTENTION, "fk_attention_backward", "d_out q k v out log_sums", "d_q d_k d_v", "attention",
                 struct=fk_attention_gradients, like=dict(d_q="q", d_k="k", d_v="v"),
                 strides={each: f"{each}_strides" for each in "q k v out d_out d_q d_k d_v".split()},
                 numbers=dict(list(ATTENTION.numbers.items())[:2]) | dict(deterministic=("bool", False))),
    DIFFUSION,
    gradients_of(DIFFUSION, "fk_diffusion_backward", "d_out d_spectral basis mass evalues times spectral",
                 "d_x d_times", "the diffusion", first="d_out basis mass evalues times"),
    DIFFUSION_RAGGED,
    gradients_of(DIFFUSION_RAGGED, "fk_diffusion_ragged_backward",
                 "d_out d_spectral basis mass evalues times spectral offsets", "d_x d_times", "the diffusion",
                 first="d_out basis mass evalues times"),
    SOFTMAX,
    gradients_of(SOFTMAX, "fk_softmax_backward", "d_probs x w probs", "d_x d_w", "softmax(x w)"),
    CROSS_ENTROPY,
    gradients_of(CROSS_ENTROPY, "fk_cross_entropy_backward", "d_losses x w labels logits log_sums", "d_x d_w",
                 "the cross-entropy of softmax(x w)"),
    GRADIENT_FEATURES,
    gradients_of(GRADIENT_FEATURES, "fk_gradients_backward", "d_out x gr gi lr li", "d_x d_lr d_li",
                 "the gradient features"),
    FEATURES_RAGGED,
    gradients_of(FEATURES_RAGGED, "fk_gradients_ragged_backward", "d_out x gr gi lr li offsets", "d_x d_lr d_li",
                 "the gradient features"),
    CLIFFORD,
    gradients_of(CLIFFORD, "fk_clifford_backward", "d_out x y w", "d_x d_y d_w", "the Clifford product"),
    CLIFFORD_CONNECTED,
    gradients_of(CLIFFORD_CONNECTED, "fk_clifford_connected_backward", "d_out x y w", "d_x d_y d_w",
                 "the fully connected Clifford product"),
    CLIFFORD_CONNECTED_KEPT,
    gradients_of(CLIFFORD_CONNECTED_KEPT, "fk_clifford_connected_kept_backward", "d_out x y w out inverse_norms",
                 "d_x d_y d_w", "the fully connected Clifford product"),
    CLIFFORD_LAYER,
    gradients_of(CLIFFORD_LAYER, "fk_clifford_layer_backward", "d_out x y mix bias? w", "d_x d_mix d_bias? d_w",
                 "the Clifford layer"),
)}
