/* Fused GPU operators, to be called from C, C++ or whatever else calls C. Plain C99.
 *
 * Every function that returns an int returns FK_OK or one of the codes of fk_status; then
 * fk_last_error() has a sentence that says why. What is refused is refused before anything is
 * written.
 *
 * A description starts with its own size, sizeof the struct as the caller has compiled it, and says
 * what is to be computed. The size says which fields the caller knows, so that a later version of
 * this header can have more. In a struct that is shorter than the library's the fields behind its
 * end count as 0, and 0 is the default of each field that may be missing: fk_product has to have
 * the fields up to depth, fk_gating those up to hidden, fk_gradients those up to width, each other
 * struct all that are declared here. Of a struct that is longer than the library's, all that the
 * library does not know has to be 0. A size is a multiple of 8, at most 4096. Other sizes are
 * refused with FK_BAD_ARGUMENT.
 *
 * The caller brings the workspace: device memory that starts at a multiple of 256 bytes and has at
 * least as many bytes as ..._workspace() says for this description on the current device. What it
 * holds before a call does not matter, and after the call it is undefined. Two calls that may run
 * at the same time need a workspace each.
 *
 * All pointers to operands and workspace are to memory of the current device (cudaMalloc) or
 * managed memory. A ..._forward() or ..._backward() puts its work on the given stream and returns
 * at once. It never prints, ends the program, allocates device memory or uses another stream, and
 * it waits for the device only while fk_tune() says so. It can be called from several threads, on
 * several streams at the same time, and while a stream is captured. (The first call of an operator
 * on a device loads its code, which may wait: it should come before the capture.) A stream of NULL
 * is CUDA's legacy default stream.
 *
 * The first call of a description in a thread and a stream makes a plan, which takes the host
 * several microseconds. A plan is for one description and one stream. Each thread keeps its last 64
 * plans, in host memory, until it ends. A plan holds no memory of the device: operands and
 * workspace may be others in each call. It belongs to the context in which it was made; after
 * cudaDeviceReset() calls plan anew. A caller can also keep plans of its own: fk_plan_create().
 *
 * If the environment variable FUSED_KERNELS_CAPABILITY is a compute capability, such as 8.0, a
 * plan takes the device for one of that: it computes in the ways, and with the shared memory, that
 * such a device has. A value above the device's own is refused with FK_BAD_DEVICE, another one with
 * FK_BAD_ARGUMENT.
 *
 * A process that fork() has made cannot use what its parent has begun with CUDA: there a call
 * returns FK_CUDA_ERROR. Of the library for the CPU it can, if no other thread of the parent was in
 * a call.
 *
 * Sizes and strides count elements. A stride of 0 says that rows are dense. Rows that are not dense
 * are a multiple of 16 bytes apart, at least as far as they are long, and at most 2^30 elements.
 * An operand is all memory from its first element to its last, at most 2^60 elements: what is
 * written must not overlap what is read even where the rows of one lie between those of the other.
 */
#ifndef FUSED_KERNELS_H
#define FUSED_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FK_API __attribute__((visibility("default")))
#else
#define FK_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* cudaStream_t is a pointer to it: this header needs none of CUDA's. */
struct CUstream_st;

#define FK_VERSION 1

/* What a function returns. */
enum fk_status {
  FK_OK = 0,
  FK_BAD_ARGUMENT = 1,  /* NULL, a description of a wrong size, an unknown type */
  FK_BAD_SHAPE = 2,     /* a size is less than 1, or too large */
  FK_BAD_ALIGNMENT = 3, /* a pointer is not aligned as the function asks */
  FK_OVERLAP = 4,       /* what is written overlaps what is read, or the workspace something else */
  FK_BAD_WORKSPACE = 5, /* the workspace is too small */
  FK_BAD_DEVICE = 6,    /* the GPU cannot run the operator, or a pointer is not of this GPU */
  FK_CUDA_ERROR = 7     /* a call of CUDA's failed, or there was no host memory */
};

/* The type of an operand's elements. Those of FK_TF32 and FK_TF32X3 are fp32, too, but a product
 * may round them on its way: fk_product_forward() says how. */
enum fk_type { FK_FLOAT16 = 1, FK_BFLOAT16 = 2, FK_FLOAT32 = 3, FK_TF32 = 4, FK_TF32X3 = 5 };

/* FK_VERSION of the library that is loaded. */
FK_API int fk_version(void);

/* A sentence about the last call of this thread that did not return FK_OK; "" before there is one.
 * It stays until another call of this thread fails. */
FK_API const char* fk_last_error(void);

/* Says in words which kernel, with tiles of which size, computed the result of this thread's last
 * call that launched something; "" before there is one. It stays until another call of this thread
 * launches something. The words are for people, and may change from version to version. */
FK_API const char* fk_last_way(void);

/* Switches on (1) or off (0) that a call tries several ways to compute its result and keeps the
 * fastest; at first it is off. While it is on, the first call of each description, in any thread,
 * launches several ways several times, with the operands that it is given: ways that need no more
 * workspace than the query says. It waits for its stream, and writes its results as ever. The
 * fastest way is kept for this description on this device. Where the stream is captured nothing is
 * tried. With 0, calls use what was found, and for other descriptions the way that should be the
 * fastest.
 * Errors: FK_BAD_ARGUMENT if `on` is another number. */
FK_API int fk_tune(int on);

/* A product of two matrices, or a batch of such products. */
typedef struct fk_product {
  size_t size; /* sizeof(fk_product) */
  int type;    /* FK_FLOAT16, FK_BFLOAT16, FK_FLOAT32, FK_TF32 or FK_TF32X3 */
  int64_t rows, cols, depth;
  int64_t a_stride, b_stride, c_stride; /* from a row to the next; 0: dense */
  int transpose_a, transpose_b;         /* 1: memory has the factor's transpose; 0: the factor */
  int64_t batch;                        /* how many products; 0: one */
  int64_t a_batch_stride, b_batch_stride,
      c_batch_stride; /* from a matrix to the next; of a and b 0: one for all of the batch */
} fk_product;

/* How many bytes of workspace fk_product_forward() needs on the current device.
 * Written: bytes. Errors: as fk_product_forward(), without those of operands. */
FK_API int fk_product_workspace(const fk_product* product, size_t* bytes);

/* c = a b, as lessons 2 (fp32) and 3 have it, for each of a batch. Shapes: a (rows, depth), b
 * (depth, cols), c (rows, cols); all row-major. With transpose_a memory has a as (depth, rows), and
 * with transpose_b it has b as (cols, depth): strides are from one of these rows to the next. Each
 * size is at least 1; rows is at most 2^30, cols at most 2^26, depth at most 2^30, of FK_FLOAT32
 * 2^24; batch is at most 2^20. With a batch of one its strides are not looked at. Else each is at
 * most 2^40, and a multiple of 16 bytes or, where rows are dense, of the rows' length; matrices of
 * c may lie one after another, or side by side, but not overlap. A factor that is transposed is
 * copied into the workspace first, unless the way says otherwise. Type: that of the description for
 * all three; added up in fp32. The last three types are fp32 in memory. FK_FLOAT32 is multiplied in
 * fp32. FK_TF32 is multiplied on tensor cores, which get the elements of a and b rounded to TF32:
 * 11 bits instead of 24, of which the first is a 1 that is not stored. FK_TF32X3 gives them each
 * element as the sum of two such numbers, in three products. Take the sum of the absolute values of
 * the products that an element of c adds up. The element differs from the exact one by at most that
 * sum times depth * 2^-24 with FK_FLOAT32, times 2^-10 + depth * 2^-25 with FK_TF32, and times
 * 2^-18 + depth * 2^-29 with FK_TF32X3. With FK_TF32X3 an infinity in a row of a makes that row of
 * c NaN. Alignment: each pointer to 16 bytes. Written: c, which must not overlap a or b. Device:
 * compute capability 8.0 and newer; for FK_FLOAT32 any that the library is built for. */
FK_API int fk_product_forward(const fk_product* product, const void* a, const void* b, void* c,
                              void* workspace, size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_product_bias_forward() needs on the current device.
 * Written: bytes. Errors: as fk_product_bias_forward(), without those of operands. */
FK_API int fk_product_bias_workspace(const fk_product* product, size_t* bytes);

/* c = a b + bias: fk_product_forward() with a bias (cols) of the description's type, which is added
 * to each row of c, the same for all of the batch. It may be NULL, for zeros. In FK_FLOAT16 and
 * FK_BFLOAT16 a b may be rounded to the type before the bias is added; the sum is rounded after it.
 * All else is as there. Written: c, which must not overlap an operand. */
FK_API int fk_product_bias_forward(const fk_product* product, const void* a, const void* b,
                                   const void* bias, void* c, void* workspace,
                                   size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_product_backward() needs on the current device.
 * Written: bytes. Errors: as fk_product_backward(), without those of operands. */
FK_API int fk_product_backward_workspace(const fk_product* product, size_t* bytes);

/* The gradients of fk_product_bias_forward(), those of the sum of all elements of d_c * c: d_a =
 * d_c b^T and d_b = a^T d_c for each of the batch, and d_bias, the sum of all rows of d_c. Shapes:
 * d_c that of c, with its strides; d_a and d_b (batch, rows, cols) as a and b lie in memory,
 * transposed where these are, and dense. Where one a or b is for all of the batch, its gradient is
 * the sum of what d_a or d_b has for each. Each of d_a, d_b and d_bias may be NULL, and is not
 * computed then. rows, cols and depth are at most 2^26, of FK_FLOAT32 2^24. Type: that of the
 * description for all; multiplied as there, and rows of d_c are added up in fp32. Other sizes,
 * alignment and device: as forward. Written: d_a, d_b and d_bias, which must not overlap an
 * operand. */
FK_API int fk_product_backward(const fk_product* product, const void* d_c, const void* a,
                               const void* b, void* d_a, void* d_b, void* d_bias, void* workspace,
                               size_t workspace_bytes, struct CUstream_st* stream);

/* What the gated layer's first product goes through, with Phi the distribution function of the
 * normal distribution. */
enum fk_gate {
  FK_GATE_SIGMOID = 0,   /* 1 / (1 + exp(-s)): GLU */
  FK_GATE_SILU = 1,      /* s / (1 + exp(-s)): SwiGLU */
  FK_GATE_GELU = 2,      /* s Phi(s), by erf: GEGLU */
  FK_GATE_GELU_TANH = 3, /* s (1 + tanh(sqrt(2 / pi) (s + 0.044715 s^3))) / 2 */
  FK_GATE_RELU = 4,      /* max(s, 0): ReGLU */
  FK_GATE_NONE = 5       /* s: a bilinear layer */
};

/* The gated layer. */
typedef struct fk_gating {
  size_t size; /* sizeof(fk_gating) */
  int type;    /* any of fk_type */
  int64_t rows, inputs, hidden;
  int64_t x_stride, out_stride; /* from a row to the next; 0: dense */
  int gate;                     /* one of fk_gate; 0: a sigmoid */
  /* Of fk_gating_two_forward() and its gradients alone; for others all three are 0. */
  int64_t value_inputs, value_stride; /* of y, as inputs and x_stride of x; 0: inputs; dense */
  int gated_values; /* 1: values have the gate's function, too; 0: they have not */
} fk_gating;

/* How many bytes of workspace fk_gating_forward() needs on the current device.
 * Written: bytes. Errors: as fk_gating_forward(), without those of operands. */
FK_API int fk_gating_workspace(const fk_gating* gating, size_t* bytes);

/* out = gate(s) * v with s = x w1 + b1 and v = x w2 + b2, where the gate is one of fk_gate, such as
 * the sigmoid of lessons 5 and 6. Shapes: x (rows, inputs), w1 and w2 (inputs, hidden), b1 and b2
 * (hidden), out (rows, hidden); all row-major, weights and biases dense. Each bias may be NULL,
 * whether the other one is or not, and is zeros then. Each size is at least 1; rows and inputs are
 * at most 2^30, of FK_FLOAT32 inputs at most 2^24; hidden is at most 2^21 - 1024. Type: that of the
 * description for all; added up in fp32. FK_FLOAT16 and FK_BFLOAT16 are computed by one kernel,
 * which rounds only out: what it has for the gate is off by some roundings of fp32, for
 * FK_GATE_GELU by 2^-17 of the gate and 2^-28. There s * v may not be beyond fp32's range, unless
 * the gate is a sigmoid. The other types are not fused: s and v are two products of
 * fk_product_forward(), which says what these are off by, and a kernel makes out of them.
 * Alignment: each pointer to 16 bytes. Written: out, which must not overlap an operand. Device:
 * compute capability 8.0 and newer; for FK_FLOAT32 any that the library is built for. */
FK_API int fk_gating_forward(const fk_gating* gating, const void* x, const void* w1, const void* w2,
                             const void* b1, const void* b2, void* out, void* workspace,
                             size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_gating_two_forward() needs on the current device.
 * Written: bytes. Errors: as fk_gating_two_forward(), without those of operands. */
FK_API int fk_gating_two_workspace(const fk_gating* gating, size_t* bytes);

/* The same of two inputs: out = gate(s) * v, or gate(s) * gate(v) if gated_values is 1, with s = x
 * w1 + b1 and v = y w2 + b2. Shapes: x (rows, inputs), w1 (inputs, hidden), y (rows, value_inputs),
 * w2 (value_inputs, hidden); where value_inputs is 0, y has as many columns as x. inputs and
 * value_inputs together are at most 2^30. In FK_FLOAT16 and FK_BFLOAT16 one kernel computes both
 * products. All else: as fk_gating_forward(). */
FK_API int fk_gating_two_forward(const fk_gating* gating, const void* x, const void* y,
                                 const void* w1, const void* w2, const void* b1, const void* b2,
                                 void* out, void* workspace, size_t workspace_bytes,
                                 struct CUstream_st* stream);

/* How many bytes of workspace fk_gating_two_kept_forward() needs on the current device.
 * Written: bytes. Errors: as fk_gating_two_kept_forward(), without those of operands. */
FK_API int fk_gating_two_kept_workspace(const fk_gating* gating, size_t* bytes);

/* The same, which also keeps what its gradients need: s_slopes = gate'(s) * v and v_slopes =
 * gate(s), or, if gated_values is 1, s_slopes = gate'(s) * gate(v) and v_slopes = gate(s) *
 * gate'(v). Shapes: s_slopes and v_slopes (rows, hidden), dense. In types of 2 bytes s and v are
 * rounded to the type before their gates, but not on compute capability 9.0 where hidden is a
 * multiple of 8. All else: as fk_gating_two_forward(). Written: out, s_slopes and v_slopes. */
FK_API int fk_gating_two_kept_forward(const fk_gating* gating, const void* x, const void* y,
                                      const void* w1, const void* w2, const void* b1,
                                      const void* b2, void* out, void* s_slopes, void* v_slopes,
                                      void* workspace, size_t workspace_bytes,
                                      struct CUstream_st* stream);

/* How many elements neighbours of three dimensions are apart. All three 0: dense. */
typedef struct fk_strides {
  int64_t batch, row, head;
} fk_strides;

/* Attention. */
typedef struct fk_attention {
  size_t size; /* sizeof(fk_attention) */
  int type;    /* FK_FLOAT16 or FK_BFLOAT16 */
  int causal;  /* 0 or 1 */
  int64_t batch, queries, keys, heads, kv_heads, width;
  fk_strides q_strides, k_strides, v_strides, out_strides;
  float scale; /* of the logits, such as 1 / sqrt(width); positive */
} fk_attention;

/* How many bytes of workspace fk_attention_forward() needs on the current device.
 * Written: bytes. Errors: as fk_attention_forward(), without those of operands. */
FK_API int fk_attention_workspace(const fk_attention* attention, size_t* bytes);

/* out = softmax(scale q k^T) v for each head, as the bonus lesson on attention has it. Shapes: q
 * and out (batch, queries, heads, width), k and v (batch, keys, kv_heads, width); elements of width
 * are neighbours, strides say where the other dimensions lie: (batch, heads, queries, width) is as
 * good. Head h of q reads head h / (heads / kv_heads) of k and v. With causal, query s sees the
 * keys t <= s + keys - queries; a query that sees none gets zeros. log_sums (batch, heads, queries,
 * dense) may be NULL: the logarithm of each query's sum of exp(scale q k), -inf without a key. A
 * key that causal hides has the weight 0, by which its row of v is multiplied: a NaN or an infinity
 * there can make the results of other queries NaN. Each size is at least 1, heads a multiple of
 * kv_heads, width at most 256; batch * heads * queries and batch * kv_heads * keys are at most
 * 2^30; scale is positive and finite. Types: that of the description for q, k, v and out; fp32 for
 * log_sums; added up in fp32. Results in the range of the type's subnormal numbers, for bf16 below
 * 2^-126, have as few bits as these. Alignment: each pointer to 16 bytes; strides to nothing, but
 * where width and all strides are multiples of 8 it is faster. Written: out and log_sums, which
 * must not overlap an operand. Device: compute capability 8.0 and newer, for FK_FLOAT16 7.5. */
FK_API int fk_attention_forward(const fk_attention* attention, const void* q, const void* k,
                                const void* v, void* out, float* log_sums, void* workspace,
                                size_t workspace_bytes, struct CUstream_st* stream);

/* The gradients of attention. */
typedef struct fk_attention_gradients {
  size_t size; /* sizeof(fk_attention_gradients) */
  int type;    /* FK_FLOAT16 or FK_BFLOAT16 */
  int causal;  /* 0 or 1 */
  int64_t batch, queries, keys, heads, kv_heads, width;
  fk_strides q_strides, k_strides, v_strides, out_strides;
  fk_strides d_out_strides, d_q_strides, d_k_strides, d_v_strides;
  float scale;           /* of the logits, as forward had it */
  int64_t deterministic; /* 1: d_q has the same bits in each call; 0: perhaps not */
} fk_attention_gradients;

/* How many bytes of workspace fk_attention_backward() needs on the current device.
 * Written: bytes. Errors: as fk_attention_backward(), without those of operands. */
FK_API int fk_attention_backward_workspace(const fk_attention_gradients* attention, size_t* bytes);

/* The gradients of fk_attention_forward(), which has written out and log_sums. For each head, with
 * P = exp(scale q k^T - log_sums), 0 where causal hides a key, D = the sum of d_out * out over each
 * row, and dS = P * (d_out v^T - D): d_q = scale dS k, d_k = scale dS^T q and d_v = P^T d_out,
 * where d_k and d_v are added up over the heads of q that share one of k and v. Shapes: those of
 * forward; d_out that of out, each gradient that of what it is the gradient of; strides of each say
 * where it lies. width is a multiple of 8, at most 256, and strides are multiples of 8. batch *
 * heads * queries, with queries rounded up to a multiple of 128, is at most 2^30; other sizes,
 * scale and type: as forward. P and dS are rounded to the type before they are multiplied, so that
 * in fp16 no dS may be beyond its range; all is added up in fp32. The parts of d_q of blocks of
 * keys are added up in whatever order they come, so its last bits can differ from call to call, or,
 * with deterministic, in the order of the keys: that takes longer where there are few queries and
 * many keys, and a little longer with causal. There blocks wait for blocks of lower numbers, and
 * rely on it that these start first, as on GPUs so far. A log_sum beyond 2^10 is off by up to
 * 2^-14 and more in fp32, and so is, relative to its size, each P of its query. A NaN or an
 * infinity in a row that causal hides can make gradients NaN. Alignment: each pointer to 16 bytes.
 * Written: d_q, d_k and d_v, which must not overlap an operand. Device: compute capability 8.0 and
 * newer. */
FK_API int fk_attention_backward(const fk_attention_gradients* attention, const void* d_out,
                                 const void* q, const void* k, const void* v, const void* out,
                                 const float* log_sums, void* d_q, void* d_k, void* d_v,
                                 void* workspace, size_t workspace_bytes,
                                 struct CUstream_st* stream);

/* Spatial diffusion on a mesh, or on several. */
typedef struct fk_diffusion {
  size_t size; /* sizeof(fk_diffusion) */
  int type;    /* any of fk_type */
  int64_t meshes, vertices, eigen, width;
} fk_diffusion;

/* How many bytes of workspace fk_diffusion_forward() needs on the current device.
 * Written: bytes. Errors: as fk_diffusion_forward(), without those of operands. */
FK_API int fk_diffusion_workspace(const fk_diffusion* diffusion, size_t* bytes);

/* spectral = exp(-evalues times) * (basis^T (mass x)) and out = basis spectral for each mesh, as
 * lesson 7 has it. Shapes: x and out (meshes, vertices, width), basis (meshes, vertices, eigen),
 * mass (meshes, vertices), evalues (meshes, eigen), times (width), spectral (meshes, eigen,
 * width); all dense. Each size is at least 1; eigen and width are at most 32768, meshes at most
 * 65535; meshes * vertices and meshes * eigen are at most 2^30. Type: that of the description
 * for all; added up in fp32. With FK_FLOAT32, FK_TF32 and FK_TF32X3 products are multiplied as
 * fk_product_forward() says, which also says what they are off by; a sum over the vertices has
 * these as its depth. In FK_FLOAT16 and FK_BFLOAT16 mass * basis or mass * x is rounded before
 * it is multiplied, and so is spectral: in fp16 none may be beyond its range, and masses below
 * 2^-14 have fewer bits. FK_BFLOAT16 with eigen and width that are multiples of 8, at most 256
 * and 512, has kernels of its own, which on compute capability 9.0 add up in another order in
 * each call; all other results are the same in each. Alignment: each pointer to 16 bytes.
 * Written: spectral and out, which must not overlap an operand. Device: compute capability 8.0
 * and newer; for FK_FLOAT32 any that the library is built for. On 9.0 the blocks of the kernel
 * of its own start together, and so a call in another stream waits until there is room for all. */
FK_API int fk_diffusion_forward(const fk_diffusion* diffusion, const void* x, const void* basis,
                                const void* mass, const void* evalues, const void* times,
                                void* spectral, void* out, void* workspace, size_t workspace_bytes,
                                struct CUstream_st* stream);

/* How many bytes of workspace fk_diffusion_backward() needs on the current device.
 * Written: bytes. Errors: as fk_diffusion_backward(), without those of operands. */
FK_API int fk_diffusion_backward_workspace(const fk_diffusion* diffusion, size_t* bytes);

/* The gradients of fk_diffusion_forward(), as lesson 7 has them. With s = d_spectral + basis^T
 * d_out: d_times = -(evalues s spectral), added up over eigen and meshes, and d_x = mass * (basis
 * (exp(-evalues times) * s)). Shapes: d_out and d_x those of out and x, d_spectral that of
 * spectral, which is what forward has written, d_times that of times. Sizes, type, alignment and
 * device: as forward; in the 16-bit types exp(-evalues times) * s is rounded. Written: d_x and
 * d_times, which must not overlap an operand. */
FK_API int fk_diffusion_backward(const fk_diffusion* diffusion, const void* d_out,
                                 const void* d_spectral, const void* basis, const void* mass,
                                 const void* evalues, const void* times, const void* spectral,
                                 void* d_x, void* d_times, void* workspace, size_t workspace_bytes,
                                 struct CUstream_st* stream);

/* How many bytes of workspace fk_diffusion_ragged_forward() needs on the current device.
 * Written: bytes. Errors: as fk_diffusion_ragged_forward(), without those of operands. */
FK_API int fk_diffusion_ragged_workspace(const fk_diffusion* diffusion, size_t* bytes);

/* fk_diffusion_forward() of meshes that have different numbers of vertices, in one launch. The
 * description's `vertices` are those of all meshes together, which lie one after another in x
 * and out (vertices, width), basis (vertices, eigen) and mass (vertices). offsets (meshes + 1),
 * int32_t on the device: mesh m has the vertices from offsets[m] to offsets[m + 1] - 1. They
 * begin with 0, do not decrease, and end with `vertices`; a mesh may have none, and then its
 * spectral is 0. That is not looked at: with other offsets results are undefined, but nothing
 * outside of the operands is read or written. Each size is at least 1; vertices is at most 2^30;
 * other sizes and shapes, type, alignment and device: as there. Results are the same in each
 * call. Written: spectral and out, which must not overlap an operand. */
FK_API int fk_diffusion_ragged_forward(const fk_diffusion* diffusion, const void* x,
                                       const void* basis, const void* mass, const void* evalues,
                                       const void* times, const void* offsets, void* spectral,
                                       void* out, void* workspace, size_t workspace_bytes,
                                       struct CUstream_st* stream);

/* How many bytes of workspace fk_diffusion_ragged_backward() needs on the current device.
 * Written: bytes. Errors: as fk_diffusion_ragged_backward(), without those of operands. */
FK_API int fk_diffusion_ragged_backward_workspace(const fk_diffusion* diffusion, size_t* bytes);

/* The gradients of fk_diffusion_ragged_forward(): as fk_diffusion_backward(), with operands and
 * offsets that lie as there. Written: d_x and d_times, which must not overlap an operand. */
FK_API int fk_diffusion_ragged_backward(const fk_diffusion* diffusion, const void* d_out,
                                        const void* d_spectral, const void* basis, const void* mass,
                                        const void* evalues, const void* times,
                                        const void* spectral, const void* offsets, void* d_x,
                                        void* d_times, void* workspace, size_t workspace_bytes,
                                        struct CUstream_st* stream);

/* The type of labels. */
enum fk_label_type { FK_LABEL_INT64 = 0, FK_LABEL_INT32 = 1 };

/* softmax(x w). */
typedef struct fk_softmax {
  size_t size; /* sizeof(fk_softmax) */
  int type;    /* FK_FLOAT16, FK_BFLOAT16 or FK_FLOAT32 */
  int64_t rows, inputs, classes;
  int label_type; /* one of fk_label_type; where there are no labels 0 */
} fk_softmax;

/* How many bytes of workspace fk_softmax_forward() needs on the current device.
 * Written: bytes. Errors: as fk_softmax_forward(), without those of operands. */
FK_API int fk_softmax_workspace(const fk_softmax* softmax, size_t* bytes);

/* probs = softmax(x w), row by row, as lesson 9 has it. Shapes: x (rows, inputs), w (inputs,
 * classes), probs (rows, classes); all row-major and dense. Each size is at least 1; rows and
 * inputs are at most 2^30, classes at most 65535 * 4096. A logit of -inf has the probability 0; a
 * row of only -inf becomes NaN. Type: that of the description for all three. FK_FLOAT32 is
 * multiplied in fp32, or as accurately by three products in TF32. FK_FLOAT16 and FK_BFLOAT16 are
 * added up in fp32, and stay so until probs are rounded: a logit may be beyond the range of fp16.
 * Alignment: each pointer to 16 bytes. Written: probs, which must not overlap an operand. Device:
 * compute capability 8.0 and newer; for FK_FLOAT32 any that the library is built for. */
FK_API int fk_softmax_forward(const fk_softmax* softmax, const void* x, const void* w, void* probs,
                              void* workspace, size_t workspace_bytes, struct CUstream_st* stream);

/* Gradient features on a mesh, or on several. */
typedef struct fk_gradients {
  size_t size; /* sizeof(fk_gradients) */
  int type;    /* any of fk_type */
  int64_t vertices, eigen, width;
  int64_t meshes; /* 0: one */
} fk_gradients;

/* How many bytes of workspace fk_gradients_forward() needs on the current device.
 * Written: bytes. Errors: as fk_gradients_forward(), without those of operands. */
FK_API int fk_gradients_workspace(const fk_gradients* gradients, size_t* bytes);

/* out = tanh(xr ar + xi ai), element by element, with xr = gr x, xi = gi x, ar = xr lr^T - xi
 * li^T and ai = xi lr^T + xr li^T for each mesh, as lesson 8 has it. Shapes: x (meshes, eigen,
 * width), gr and gi (meshes, vertices, eigen), lr and li (width, width), out (meshes, vertices,
 * width); all row-major and dense. Each size is at least 1; eigen and width are at most 32768,
 * meshes at most 65535; meshes * vertices and meshes * eigen are at most 2^30. Type: that of the
 * description for all; added up in fp32. With FK_FLOAT32, FK_TF32 and FK_TF32X3 products are
 * multiplied as fk_product_forward() says; they are x lr^T and x li^T, and gr and gi times x and
 * these two. In FK_FLOAT16 and FK_BFLOAT16 x lr^T and x li^T are rounded in between, so that in
 * fp16 none may be beyond its range. FK_BFLOAT16 of one mesh with eigen and width that are
 * multiples of 8, eigen at most 256, has kernels of its own, whose tanh is off by up to 2^-11 of
 * itself. Alignment: each pointer to 16 bytes. Written: out, which must not overlap an operand.
 * Device: compute capability 8.0 and newer; for FK_FLOAT32 any that the library is built for. */
FK_API int fk_gradients_forward(const fk_gradients* gradients, const void* x, const void* gr,
                                const void* gi, const void* lr, const void* li, void* out,
                                void* workspace, size_t workspace_bytes,
                                struct CUstream_st* stream);

/* How many bytes of workspace fk_gradients_backward() needs on the current device.
 * Written: bytes. Errors: as fk_gradients_backward(), without those of operands. */
FK_API int fk_gradients_backward_workspace(const fk_gradients* gradients, size_t* bytes);

/* The gradients of fk_gradients_forward(), as lesson 8 has them. With g = d_out * (1 - out^2), P
 * = g * xr, Q = g * xi, R = g * ar and S = g * ai: d_lr = P^T xr + Q^T xi, d_li = Q^T xr - P^T
 * xi and d_x = gr^T (R + P lr + Q li) + gi^T (S - P li + Q lr). Shapes: d_out that of out, d_x,
 * d_lr and d_li those of x, lr and li; d_lr and d_li are added up over the meshes. Sizes, type,
 * alignment and device: as forward; in the 16-bit types P, Q, R, S and the sums over vertices of
 * P and Q are rounded in between. The result is the same in each call. Written: d_x, d_lr and
 * d_li, which must not overlap an operand. */
FK_API int fk_gradients_backward(const fk_gradients* gradients, const void* d_out, const void* x,
                                 const void* gr, const void* gi, const void* lr, const void* li,
                                 void* d_x, void* d_lr, void* d_li, void* workspace,
                                 size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_gradients_ragged_forward() needs on the current device.
 * Written: bytes. Errors: as fk_gradients_ragged_forward(), without those of operands. */
FK_API int fk_gradients_ragged_workspace(const fk_gradients* gradients, size_t* bytes);

/* fk_gradients_forward() of meshes that have different numbers of vertices, in one launch: gr
 * and gi are (vertices, eigen) and out (vertices, width), with the vertices of all meshes, and
 * offsets (meshes + 1), int32_t on the device, are as fk_diffusion_ragged_forward() has them.
 * Sizes, type, alignment and device: as fk_gradients_forward(), with vertices at most 2^30.
 * Written: out, which must not overlap an operand. */
FK_API int fk_gradients_ragged_forward(const fk_gradients* gradients, const void* x, const void* gr,
                                       const void* gi, const void* lr, const void* li,
                                       const void* offsets, void* out, void* workspace,
                                       size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_gradients_ragged_backward() needs on the current device.
 * Written: bytes. Errors: as fk_gradients_ragged_backward(), without those of operands. */
FK_API int fk_gradients_ragged_backward_workspace(const fk_gradients* gradients, size_t* bytes);

/* The gradients of fk_gradients_ragged_forward(): as fk_gradients_backward(), with operands and
 * offsets that lie as there. Written: d_x, d_lr and d_li, which must not overlap an operand. */
FK_API int fk_gradients_ragged_backward(const fk_gradients* gradients, const void* d_out,
                                        const void* x, const void* gr, const void* gi,
                                        const void* lr, const void* li, const void* offsets,
                                        void* d_x, void* d_lr, void* d_li, void* workspace,
                                        size_t workspace_bytes, struct CUstream_st* stream);

/* Where the blades of a multivector are. */
enum fk_layout {
  FK_BLADES_FIRST = 0, /* tensors are (blades, batch, features) */
  FK_BLADES_LAST = 1   /* tensors are (batch, features, blades) */
};

/* In which order they are. A word is a set of basis vectors that ascend. */
enum fk_order {
  FK_ORDER_GRADE = 0,     /* by grade, those of a grade by their vectors as bits of a number */
  FK_ORDER_BITS = 1,      /* by the vectors as bits of a number, e1 the lowest */
  FK_ORDER_SHORTLEX = 2,  /* by grade, those of a grade as words in a dictionary */
  FK_ORDER_NULL_FIRST = 3 /* FK_ORDER_SHORTLEX, where vectors that square to 0 come before e1 */
};

/* A gated, weighted product of multivectors, and its norm. */
typedef struct fk_clifford {
  size_t size; /* sizeof(fk_clifford) */
  int type;    /* FK_FLOAT16, FK_BFLOAT16 or FK_FLOAT32 */
  int p, q, r; /* how many basis vectors square to 1, to -1 and to 0 */
  int normed;  /* 0 or 1 */
  int64_t batch, features;
  int gate;        /* 0: GELU's, 1: none */
  int unweighted;  /* 0; or 1: every weight is 1, and w and d_w are NULL */
  int weight_type; /* of w and d_w: 0, which is `type`; or FK_FLOAT32 */
  int unused;      /* is not read */
  int layout;      /* fk_layout */
  int order;       /* fk_order */
} fk_clifford;

/* How many bytes of workspace fk_clifford_forward() needs on the current device.
 * Written: bytes. Errors: as fk_clifford_forward(), without those of operands. */
FK_API int fk_clifford_workspace(const fk_clifford* clifford, size_t* bytes);

/* The layer of lesson 10: z is a weighted product of the gated inputs x' = x gate(x_1) and y' = y
 * gate(y_1), and out is z with each grade divided by its root mean square if the description's
 * field `normed` is 1, else z itself. x_1 is the scalar of x, and gate(s) = (1 + erf(s / sqrt 2)) /
 * 2; or 1 if `gate` is 1. With <u>_c for the part of u that has grade c, z = sum over grades a, b,
 * c of w[a,c,b] <<x'>_a <y'>_b>_c. If `unweighted` is 1, each w[a,c,b] is 1; without the gate z is
 * the geometric product x y then. If `normed` is 1, for each grade c out_c = z_c / sqrt(m_c +
 * 1e-6), where m_c is the mean over features of the sum of the squares of z_c's coefficients.
 * Algebras: all (p, q, r) with 1 <= p + q + r = n <= 5. They have 2^n blades, and for n = 1 to 5
 * and r = 0 there are 4, 10, 20, 35 and 56 triples (a, c, b) of grades whose products are not all
 * 0; with r > 0 some have none, and (3, 0, 1) has 34. Shapes: x, y and out (blades, batch,
 * features) or, as `layout` says, (batch, features, blades); w (features, triples); all row-major
 * and dense. Blades are in the `order`, triples ordered by a, then c, then b. In
 * FK_ORDER_NULL_FIRST a word has its null vectors first, so that (3, 0, 1), whose e4 is called e0
 * there, has e01 = e0 e1 = -e14; r > 0 has such signs alone. What another layout or order costs:
 * without weights and norm nothing; else x, y and out are copied, through the workspace.
 * Each size is at least 1; features is at most 8192, of 16 blades 4096, of 32 blades 2048; batch *
 * features is at most 2^30. Types: that of the description for x, y and out; for w the same, or
 * fp32 if `weight_type` says so; all is computed in fp32, and a result is rounded once. What is
 * beyond fp16's range becomes infinite there. Ways: FK_FLOAT32 with weights has kernels of its own
 * for (2, 0, 0), (3, 0, 0), (3, 0, 1), (1, 3, 0) and (4, 1, 0); all else is computed by kernels
 * that take any signature, in which a product of basis vectors that is 0 is multiplied by that 0,
 * so that an infinity there makes results NaN. Alignment: each pointer to 16 bytes. w has to be
 * NULL if `unweighted` is 1. Written: out, which must not overlap an operand. Device: any that the
 * library is built for. */
FK_API int fk_clifford_forward(const fk_clifford* clifford, const void* x, const void* y,
                               const void* w, void* out, void* workspace, size_t workspace_bytes,
                               struct CUstream_st* stream);

/* How many bytes of workspace fk_clifford_backward() needs on the current device.
 * Written: bytes. Errors: as fk_clifford_backward(), without those of operands. */
FK_API int fk_clifford_backward_workspace(const fk_clifford* clifford, size_t* bytes);

/* The gradients of fk_clifford_forward(), as lesson 10 has them: those of the sum of all elements
 * of d_out * out, with respect to x, y and w. Shapes: d_out that of out, d_x, d_y and d_w those of
 * x, y and w. Types: d_out, d_x and d_y as x, d_w as w; d_w is added up in fp32, and rounded once.
 * Algebras, sizes, alignment and device: as forward. The result is the same in each call. w and d_w
 * have to be NULL if `unweighted` is 1. Written: d_x, d_y and d_w, which must not overlap an
 * operand. */
FK_API int fk_clifford_backward(const fk_clifford* clifford, const void* d_out, const void* x,
                                const void* y, const void* w, void* d_x, void* d_y, void* d_w,
                                void* workspace, size_t workspace_bytes,
                                struct CUstream_st* stream);

/* How many bytes of workspace fk_clifford_connected_forward() needs on the current device.
 * Written: bytes. Errors: as fk_clifford_connected_forward(), without those of operands. */
FK_API int fk_clifford_connected_workspace(const fk_clifford* clifford, size_t* bytes);

/* The layer of the bonus lesson on multivectors, mixed by matrices of weights: as
 * fk_clifford_forward(), but each w[a,c,b] is a matrix, which mixes the features of the product.
 * Algebras: (p, q, r) is (2, 0, 0) or (3, 0, 0). Shapes: x, y and out (blades, batch, features), w
 * (triples, features, features), whose rows are features of the product and whose columns are those
 * of the result; all row-major and dense. Order of blades and triples: as there. Each size is at
 * least 1; features is at most 8192, batch * features at most 2^30. `gate`, `unweighted` and
 * `weight_type` are 0. Type: fp32; products and weights are rounded to TF32, and added up in fp32.
 * Alignment: each pointer to 16 bytes. Written: out, which must not overlap an operand. Device:
 * compute capability 8.0 and newer. On 9.0 the blocks of a kernel start together, and so a call in
 * another stream waits until there is room for all. */
FK_API int fk_clifford_connected_forward(const fk_clifford* clifford, const void* x, const void* y,
                                         const void* w, void* out, void* workspace,
                                         size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_clifford_connected_backward() needs on the current device.
 * Written: bytes. Errors: as fk_clifford_connected_backward(), without those of operands. */
FK_API int fk_clifford_connected_backward_workspace(const fk_clifford* clifford, size_t* bytes);

/* The gradients of fk_clifford_connected_forward(): those of the sum of all elements of d_out *
 * out, with respect to x, y and w. It computes the result again, which it keeps in its workspace.
 * Shapes: d_out that of out, d_x, d_y and d_w those of x, y and w. Algebras, sizes, type, alignment
 * and device: as forward; gradients of z are rounded to TF32, too. Written: d_x, d_y and d_w, which
 * must not overlap an operand. */
FK_API int fk_clifford_connected_backward(const fk_clifford* clifford, const void* d_out,
                                          const void* x, const void* y, const void* w, void* d_x,
                                          void* d_y, void* d_w, void* workspace,
                                          size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_clifford_connected_kept_forward() needs on the current device.
 * Written: bytes. Errors: as fk_clifford_connected_kept_forward(), without those of operands. */
FK_API int fk_clifford_connected_kept_workspace(const fk_clifford* clifford, size_t* bytes);

/* fk_clifford_connected_forward() that keeps what its gradients need. Shapes: inverse_norms (n + 1,
 * batch), of each grade and row 1 / sqrt(m_c + 1e-6). Type: fp32. Without a norm inverse_norms is
 * not written. All else: as there. Written: out and inverse_norms. */
FK_API int fk_clifford_connected_kept_forward(const fk_clifford* clifford, const void* x,
                                              const void* y, const void* w, void* out,
                                              void* inverse_norms, void* workspace,
                                              size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_clifford_connected_kept_backward() needs on the current device.
 * Written: bytes. Errors: as fk_clifford_connected_kept_backward(), without those of operands. */
FK_API int fk_clifford_connected_kept_backward_workspace(const fk_clifford* clifford,
                                                         size_t* bytes);

/* fk_clifford_connected_backward(), given the result and the norms that
 * fk_clifford_connected_kept_forward() has written: so forward's multiplications, a third of all,
 * are not computed again. Without a norm neither is read. All else: as there. Written: d_x, d_y and
 * d_w, which must not overlap an operand. */
FK_API int fk_clifford_connected_kept_backward(const fk_clifford* clifford, const void* d_out,
                                               const void* x, const void* y, const void* w,
                                               const void* out, const void* inverse_norms,
                                               void* d_x, void* d_y, void* d_w, void* workspace,
                                               size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_clifford_layer_forward() needs on the current device.
 * Written: bytes. Errors: as fk_clifford_layer_forward(), without those of operands. */
FK_API int fk_clifford_layer_workspace(const fk_clifford* clifford, size_t* bytes);

/* fk_clifford_forward() of x and of y, which the call computes from x: y_k = x_k mix[grade of
 * k]^T for each blade k, to which bias is added where k is the scalar. Shapes: mix (n + 1,
 * features, features), a matrix for each grade, whose rows are features of y; bias (features), or
 * NULL; x, y, w and out as there. `gate`, `unweighted`, `weight_type`, `layout` and `order` are 0.
 * Type: fp32; x and mix are rounded to TF32, and added up in fp32. Algebras, sizes, alignment: as
 * there. Written: y, which the gradients need, and out; neither may overlap an operand. Device:
 * compute capability 8.0 and newer. */
FK_API int fk_clifford_layer_forward(const fk_clifford* clifford, const void* x, const void* mix,
                                     const void* bias, const void* w, void* y, void* out,
                                     void* workspace, size_t workspace_bytes,
                                     struct CUstream_st* stream);

/* How many bytes of workspace fk_clifford_layer_backward() needs on the current device.
 * Written: bytes. Errors: as fk_clifford_layer_backward(), without those of operands. */
FK_API int fk_clifford_layer_backward_workspace(const fk_clifford* clifford, size_t* bytes);

/* The gradients of fk_clifford_layer_forward(), which has written y: those of the sum of all
 * elements of d_out * out, with respect to x, mix, bias and w. Shapes: d_out that of out, each
 * gradient that of what it is the gradient of. bias and d_bias may each be NULL. Algebras, sizes,
 * type, alignment and device: as forward; gradients of y are rounded to TF32 where they are
 * multiplied. The result is the same in each call. Written: d_x, d_mix, d_bias and d_w, which must
 * not overlap an operand. */
FK_API int fk_clifford_layer_backward(const fk_clifford* clifford, const void* d_out, const void* x,
                                      const void* y, const void* mix, const void* bias,
                                      const void* w, void* d_x, void* d_mix, void* d_bias,
                                      void* d_w, void* workspace, size_t workspace_bytes,
                                      struct CUstream_st* stream);

/* How many bytes of workspace fk_gating_backward() needs on the current device.
 * Written: bytes. Errors: as fk_gating_backward(), without those of operands. */
FK_API int fk_gating_backward_workspace(const fk_gating* gating, size_t* bytes);

/* The gradients of fk_gating_forward(). With s = x w1 + b1, v = x w2 + b2, d_s = d_out * v *
 * gate'(s) and d_v = d_out * gate(s): d_x = d_s w1^T + d_v w2^T, d_w1 = x^T d_s, d_w2 = x^T d_v,
 * and d_b1 and d_b2 are the sums of the rows of d_s and d_v. gate' is the slope of the gate, which
 * of FK_GATE_RELU is 0 at 0. Shapes: d_out that of out, each gradient that of what it is the
 * gradient of; rows of x are x_stride apart, those of d_out out_stride, and all gradients are
 * dense. Of b1, b2, d_b1 and d_b2 each may be NULL: a bias is zeros then, and a gradient is not
 * written. inputs is at most 2^26; of FK_FLOAT32 rows and inputs are at most 2^24; other sizes,
 * type, alignment and device: as forward. In FK_FLOAT16 and FK_BFLOAT16 x w1, x w2, d_s and d_v are
 * rounded to the type in between, so that none may be beyond its range; in the other types all
 * products are as fk_product_forward() has them. Written: d_x, d_w1, d_w2, d_b1 and d_b2, which
 * must not overlap an operand. */
FK_API int fk_gating_backward(const fk_gating* gating, const void* d_out, const void* x,
                              const void* w1, const void* w2, const void* b1, const void* b2,
                              void* d_x, void* d_w1, void* d_w2, void* d_b1, void* d_b2,
                              void* workspace, size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_gating_two_backward() needs on the current device.
 * Written: bytes. Errors: as fk_gating_two_backward(), without those of operands. */
FK_API int fk_gating_two_backward_workspace(const fk_gating* gating, size_t* bytes);

/* The gradients of fk_gating_two_forward(). With d_s and d_v as fk_gating_backward() has them, or,
 * if gated_values is 1, d_s = d_out * gate(v) * gate'(s) and d_v = d_out * gate(s) * gate'(v): d_x
 * = d_s w1^T, d_y = d_v w2^T, d_w1 = x^T d_s, d_w2 = y^T d_v. Shapes: each gradient that of what it
 * is the gradient of; of value_inputs what is said of inputs there. All else: as
 * fk_gating_backward(), of both inputs. Written: d_x, d_y, d_w1, d_w2, d_b1 and d_b2. */
FK_API int fk_gating_two_backward(const fk_gating* gating, const void* d_out, const void* x,
                                  const void* y, const void* w1, const void* w2, const void* b1,
                                  const void* b2, void* d_x, void* d_y, void* d_w1, void* d_w2,
                                  void* d_b1, void* d_b2, void* workspace, size_t workspace_bytes,
                                  struct CUstream_st* stream);

/* How many bytes of workspace fk_gating_two_kept_backward() needs on the current device.
 * Written: bytes. Errors: as fk_gating_two_kept_backward(), without those of operands. */
FK_API int fk_gating_two_kept_backward_workspace(const fk_gating* gating, size_t* bytes);

/* The same, given what fk_gating_two_kept_forward() has written: d_s = d_out * s_slopes and d_v =
 * d_out * v_slopes. So forward's products, a third of all, are not computed again, and b1 and b2
 * are not read. In types of 2 bytes d_s and d_v are rounded to the type, and d_b1 and d_b2 may be
 * sums of what is rounded. All else: as fk_gating_two_backward(). */
FK_API int fk_gating_two_kept_backward(const fk_gating* gating, const void* d_out, const void* x,
                                       const void* y, const void* w1, const void* w2,
                                       const void* b1, const void* b2, const void* s_slopes,
                                       const void* v_slopes, void* d_x, void* d_y, void* d_w1,
                                       void* d_w2, void* d_b1, void* d_b2, void* workspace,
                                       size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_softmax_backward() needs on the current device.
 * Written: bytes. Errors: as fk_softmax_backward(), without those of operands. */
FK_API int fk_softmax_backward_workspace(const fk_softmax* softmax, size_t* bytes);

/* The gradients of fk_softmax_forward(), which has written probs. With g = probs * (d_probs - the
 * sum of d_probs * probs over each row): d_x = g w^T and d_w = x^T g. Shapes: d_probs that of
 * probs, d_x and d_w those of x and w. Each size is at least 1; rows and classes are at most 2^24,
 * inputs at most 2^26. Type: that of the description for all, multiplied as in forward. g is
 * computed in fp32, and rounded to the type before the products: in fp16 what is below 2^-25
 * becomes 0, so scale losses as for PyTorch's own fp16. Alignment and device: as forward. Written:
 * d_x and d_w, which must not overlap an operand. */
FK_API int fk_softmax_backward(const fk_softmax* softmax, const void* d_probs, const void* x,
                               const void* w, const void* probs, void* d_x, void* d_w,
                               void* workspace, size_t workspace_bytes, struct CUstream_st* stream);

/* How many bytes of workspace fk_cross_entropy_forward() needs on the current device.
 * Written: bytes. Errors: as fk_cross_entropy_forward(), without those of operands. */
FK_API int fk_cross_entropy_workspace(const fk_softmax* softmax, size_t* bytes);

/* The cross-entropy of softmax(x w) and labels: losses[b] = log_sums[b] - logits[b][labels[b]],
 * with logits = x w and log_sums[b] = log of the sum of exp(logits[b][c]) over all classes c. Where
 * logits are large, a log_sum has been rounded; losses are computed relative to the largest logit,
 * and have not. A label is a class from 0 on; where it is none, such as -100, the row's loss is 0.
 * Shapes: x (rows, inputs), w (inputs, classes), labels, losses and log_sums (rows), logits (rows,
 * classes); all row-major and dense. Each size is at least 1; rows and classes are at most 2^24,
 * inputs at most 2^26. Type: that of the description for x and w, multiplied as
 * fk_softmax_forward() has it; labels are int64_t or int32_t, as label_type says. Losses, logits
 * and log_sums are fp32 for each type. So the loss is that of logits which have not been rounded,
 * as where PyTorch casts logits to fp32 before its cross-entropy; they take 4 bytes each.
 * Alignment: each pointer to 16 bytes. Written: losses; and, for the gradients, logits and
 * log_sums. None of them may overlap an operand. Device: as fk_softmax_forward(). */
FK_API int fk_cross_entropy_forward(const fk_softmax* softmax, const void* x, const void* w,
                                    const void* labels, void* losses, void* logits, void* log_sums,
                                    void* workspace, size_t workspace_bytes,
                                    struct CUstream_st* stream);

/* How many bytes of workspace fk_cross_entropy_backward() needs on the current device.
 * Written: bytes. Errors: as fk_cross_entropy_backward(), without those of operands. */
FK_API int fk_cross_entropy_backward_workspace(const fk_softmax* softmax, size_t* bytes);

/* The gradients of fk_cross_entropy_forward(), which has written logits and log_sums. With g[b][c]
 * = d_losses[b] (exp(logits[b][c] - log_sums[b]) - (1 if c is labels[b])), and 0 in a row whose
 * label is no class: d_x = g w^T and d_w = x^T g. Where a log_sum is large, the row's sum is
 * computed once more, relative to its largest logit. Shapes: d_losses that of losses, d_x and d_w
 * those of x and w. Types: d_losses are fp32, d_x and d_w as x and w; g is rounded to their type as
 * fk_softmax_backward() says. Sizes, other types, alignment and device: as forward. Written: d_x
 * and d_w, which must not overlap an operand. */
FK_API int fk_cross_entropy_backward(const fk_softmax* softmax, const void* d_losses, const void* x,
                                     const void* w, const void* labels, const void* logits,
                                     const void* log_sums, void* d_x, void* d_w, void* workspace,
                                     size_t workspace_bytes, struct CUstream_st* stream);

/* Of which function a plan is. */
enum fk_function {
  FK_PRODUCT_FORWARD = 1,
  FK_GATING_FORWARD = 2,
  FK_GATING_BACKWARD = 3,
  FK_ATTENTION_FORWARD = 4,  /* with the operands q, k, v, out */
  FK_ATTENTION_LOG_SUMS = 5, /* fk_attention_forward() with the operands q, k, v, out, log_sums */
  FK_DIFFUSION_FORWARD = 6,
  FK_DIFFUSION_BACKWARD = 7,
  FK_SOFTMAX_FORWARD = 8,
  FK_SOFTMAX_BACKWARD = 9,
  FK_GRADIENTS_FORWARD = 10,
  FK_GRADIENTS_BACKWARD = 11,
  FK_CLIFFORD_FORWARD = 12,
  FK_CLIFFORD_BACKWARD = 13,
  FK_CLIFFORD_CONNECTED_FORWARD = 14,
  FK_CLIFFORD_CONNECTED_BACKWARD = 15,
  FK_CROSS_ENTROPY_FORWARD = 16,
  FK_CROSS_ENTROPY_BACKWARD = 17,
  FK_ATTENTION_BACKWARD = 18,
  FK_PRODUCT_BIAS_FORWARD = 19,
  FK_PRODUCT_BACKWARD = 20,
  FK_DIFFUSION_RAGGED_FORWARD = 21,
  FK_DIFFUSION_RAGGED_BACKWARD = 22,
  FK_GRADIENTS_RAGGED_FORWARD = 23,
  FK_GRADIENTS_RAGGED_BACKWARD = 24,
  FK_GATING_TWO_FORWARD = 25,
  FK_GATING_TWO_BACKWARD = 26,
  FK_CLIFFORD_CONNECTED_KEPT_FORWARD = 27,
  FK_CLIFFORD_CONNECTED_KEPT_BACKWARD = 28,
  FK_CLIFFORD_LAYER_FORWARD = 29,
  FK_CLIFFORD_LAYER_BACKWARD = 30,
  FK_GATING_TWO_KEPT_FORWARD = 31,
  FK_GATING_TWO_KEPT_BACKWARD = 32
};

/* A plan that the caller owns, for programs that want to say when something is planned, and how
 * long it is kept. It uses no plan that calls have kept and no way that fk_tune() has found, and
 * leaves none for them. It fixes the function, the description, the device and the stream: another
 * size, type, stride or scale needs another plan. From run to run operands and workspace may be
 * others. It holds host memory only. One thread at a time may use a plan, not always the same one;
 * several threads may use a plan each at the same time. */
typedef struct fk_plan fk_plan;

/* Makes a plan for a description, a device and a stream. function: one of fk_function. description:
 * that which the function takes; it is copied. device: a number from 0 on, as cudaSetDevice() takes
 * it. If it is not the current device, this function, fk_plan_run() and fk_plan_tune() make it so
 * until they return. stream: of that device; it may be captured.
 * Written: plan, which fk_plan_destroy() has to be given in the end. Errors: those of the function,
 * without those of operands; FK_BAD_ARGUMENT if there is no such function, or plan is NULL;
 * FK_BAD_DEVICE if there is no such device. */
FK_API int fk_plan_create(int function, const void* description, int device,
                          struct CUstream_st* stream, fk_plan** plan);

/* How many bytes of workspace fk_plan_run() needs, which are as many as the function's own query
 * says. Written: bytes. Errors: FK_BAD_ARGUMENT if plan or bytes is NULL. */
FK_API int fk_plan_workspace(const fk_plan* plan, size_t* bytes);

/* Says in words in which way the plan computes, as fk_last_way() says it of a call; "" if plan is
 * NULL. It stays until the plan is tuned or destroyed. */
FK_API const char* fk_plan_way(const fk_plan* plan);

/* Does what a call of the plan's function does: it puts the work on the plan's stream, and returns
 * at once. operands: `count` pointers, those that the function has between description and
 * workspace, in that order. They have to be aligned as the function asks. fk_tune() changes nothing
 * here.
 * Errors: those of the function that come from operands; FK_BAD_ARGUMENT if plan or operands is
 * NULL, or count is not that of the function; FK_BAD_DEVICE if the thread uses another context of
 * the device than when the plan was made, such as after cudaDeviceReset(). */
FK_API int fk_plan_run(fk_plan* plan, void* const* operands, size_t count, void* workspace,
                       size_t workspace_bytes);

/* As fk_plan_run(), but it first tries several ways to compute the result, as a call does while
 * fk_tune() is on. It launches them with these operands and waits for the stream. From then on the
 * plan computes in the fastest way.
 * Errors: as fk_plan_run(), and FK_BAD_ARGUMENT if the stream is captured. */
FK_API int fk_plan_tune(fk_plan* plan, void* const* operands, size_t count, void* workspace,
                        size_t workspace_bytes);

/* Frees a plan. NULL is no plan, and nothing happens. Work that has been put on the stream goes on,
 * and a graph that was captured can still be launched: they do not need the plan. */
FK_API void fk_plan_destroy(fk_plan* plan);

#ifdef __cplusplus
}
#endif

#endif /* FUSED_KERNELS_H */
