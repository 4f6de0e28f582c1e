"""What the C header operators/include/fused_kernels.h declares: its constants and structs."""

import ctypes

FK_VERSION = 1
(FK_OK, FK_BAD_ARGUMENT, FK_BAD_SHAPE, FK_BAD_ALIGNMENT, FK_OVERLAP, FK_BAD_WORKSPACE, FK_BAD_DEVICE,
 FK_CUDA_ERROR) = range(8)  # fk_status
FK_FLOAT16, FK_BFLOAT16, FK_FLOAT32, FK_TF32, FK_TF32X3 = 1, 2, 3, 4, 5  # fk_type
FK_LABEL_INT64, FK_LABEL_INT32 = 0, 1  # fk_label_type
(FK_PRODUCT_FORWARD, FK_GATING_FORWARD, FK_GATING_BACKWARD, FK_ATTENTION_FORWARD, FK_ATTENTION_LOG_SUMS,
 FK_DIFFUSION_FORWARD, FK_DIFFUSION_BACKWARD, FK_SOFTMAX_FORWARD, FK_SOFTMAX_BACKWARD, FK_GRADIENTS_FORWARD,
 FK_GRADIENTS_BACKWARD, FK_CLIFFORD_FORWARD, FK_CLIFFORD_BACKWARD, FK_CLIFFORD_CONNECTED_FORWARD,
 FK_CLIFFORD_CONNECTED_BACKWARD, FK_CROSS_ENTROPY_FORWARD, FK_CROSS_ENTROPY_BACKWARD,
 FK_ATTENTION_BACKWARD, FK_PRODUCT_BIAS_FORWARD, FK_PRODUCT_BACKWARD, FK_DIFFUSION_RAGGED_FORWARD,
 FK_DIFFUSION_RAGGED_BACKWARD, FK_GRADIENTS_RAGGED_FORWARD, FK_GRADIENTS_RAGGED_BACKWARD, FK_GATING_TWO_FORWARD,
 FK_GATING_TWO_BACKWARD, FK_CLIFFORD_CONNECTED_KEPT_FORWARD, FK_CLIFFORD_CONNECTED_KEPT_BACKWARD,
 FK_CLIFFORD_LAYER_FORWARD, FK_CLIFFORD_LAYER_BACKWARD, FK_GATING_TWO_KEPT_FORWARD,
 FK_GATING_TWO_KEPT_BACKWARD) = range(1, 33)  # fk_function
(FK_GATE_SIGMOID, FK_GATE_SILU, FK_GATE_GELU, FK_GATE_GELU_TANH, FK_GATE_RELU, FK_GATE_NONE) = range(6)  # fk_gate
FK_BLADES_FIRST, FK_BLADES_LAST = 0, 1  # fk_layout
FK_ORDER_GRADE, FK_ORDER_BITS, FK_ORDER_SHORTLEX, FK_ORDER_NULL_FIRST = range(4)  # fk_order

INT, INT64, SIZE, POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p


def _struct(name, *fields):
    """A struct of the header: (C type, the names of fields of this type) for each of `fields`."""
    return type(name, (ctypes.Structure,), {
        "_fields_": [(field, kind) for kind, names in fields for field in names.split()]})


fk_strides = _struct("fk_strides", (INT64, "batch row head"))
fk_product = _struct("fk_product", (SIZE, "size"), (INT, "type"),
                     (INT64, "rows cols depth a_stride b_stride c_stride"), (INT, "transpose_a transpose_b"),
                     (INT64, "batch a_batch_stride b_batch_stride c_batch_stride"))
fk_gating = _struct("fk_gating", (SIZE, "size"), (INT, "type"), (INT64, "rows inputs hidden x_stride out_stride"),
                    (INT, "gate"), (INT64, "value_inputs value_stride"), (INT, "gated_values"))
fk_attention = _struct("fk_attention", (SIZE, "size"), (INT, "type causal"),
                       (INT64, "batch queries keys heads kv_heads width"),
                       (fk_strides, "q_strides k_strides v_strides out_strides"), (ctypes.c_float, "scale"))
fk_attention_gradients = _struct(
    "fk_attention_gradients", (SIZE, "size"), (INT, "type causal"),
    (INT64, "batch queries keys heads kv_heads width"),
    (fk_strides, "q_strides k_strides v_strides out_strides d_out_strides d_q_strides d_k_strides d_v_strides"),
    (ctypes.c_float, "scale"), (INT64, "deterministic"))
fk_diffusion = _struct("fk_diffusion", (SIZE, "size"), (INT, "type"), (INT64, "meshes vertices eigen width"))
fk_softmax = _struct("fk_softmax", (SIZE, "size"), (INT, "type"), (INT64, "rows inputs classes"), (INT, "label_type"))
fk_gradients = _struct("fk_gradients", (SIZE, "size"), (INT, "type"), (INT64, "vertices eigen width meshes"))
fk_clifford = _struct("fk_clifford", (SIZE, "size"), (INT, "type p q r normed"), (INT64, "batch features"),
                      (INT, "gate unweighted weight_type unused layout order"))
STRUCTS = {each.__name__: each for each in
           (fk_strides, fk_product, fk_gating, fk_attention, fk_attention_gradients, fk_diffusion, fk_softmax,
            fk_gradients, fk_clifford)}

__all__ = [name for name in vars() if name.startswith(("FK_", "fk_"))] + ["STRUCTS"]
