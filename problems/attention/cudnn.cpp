#include "problems/attention/cudnn.h"

#ifndef CUDA_CPU

#include <dlfcn.h>

#include <array>
#include <limits>
#include <stdexcept>
#include <vector>

namespace problems {

namespace {

// ---- What is used of the interface that cudnn_graph.h declares --------------------------------

using Handle = struct cudnnContext*;
using Descriptor = void*;
using Status = int;  // 0: success

enum class Kind : int {
  engine = 2,
  engine_config = 3,
  heuristics = 4,
  plan = 5,
  pointwise = 0,
  pointwise_operation = 13,
  graph = 15,
  variant_pack = 16,
  tensor = 17,
  matmul = 18,
  matmul_operation = 19,
  reduction = 21,
  reduction_operation = 22,
  reshape_operation = 31,
};

enum class Attribute : int {
  pointwise_mode = 0,
  pointwise_precision = 1,
  pointwise_axis = 9,
  heuristics_mode = 200,
  heuristics_graph = 201,
  heuristics_results = 202,
  config_engine = 300,
  plan_handle = 400,
  plan_config = 401,
  plan_workspace = 402,
  pointwise_descriptor = 750,
  pointwise_x = 751,
  pointwise_b = 752,
  pointwise_y = 753,
  pointwise_t = 758,
  graph_handle = 800,
  graph_operations = 801,
  tensor_alignment = 900,
  tensor_type = 901,
  tensor_dimensions = 902,
  tensor_strides = 903,
  tensor_id = 906,
  tensor_is_virtual = 907,
  tensor_is_by_value = 908,
  pack_ids = 1000,
  pack_pointers = 1001,
  pack_workspace = 1003,
  engine_index = 1301,
  matmul_precision = 1500,
  matmul_a = 1520,
  matmul_b = 1521,
  matmul_c = 1522,
  matmul_descriptor = 1523,
  reduction_operator = 1600,
  reduction_precision = 1601,
  reduction_x = 1610,
  reduction_y = 1611,
  reduction_descriptor = 1612,
  reshape_x = 2200,
  reshape_y = 2201,
};

enum class DataType : int { fp32 = 0, fp16 = 2, int32 = 4, bf16 = 9, boolean = 11 };
enum class Pointwise : int {
  add = 0,
  multiply = 1,
  divide = 6,
  subtract = 9,
  exp = 13,
  log = 15,
  identity = 21,
  not_less = 303,
  index = 501,
  select = 601,
};
enum class Reduction : int { add = 0, max = 3 };
enum class Heuristic : int { fallback = 2, a = 3 };

/// What an attribute is: cuDNN's number for each type.
template <typename T>
inline constexpr int kTypeCode = -1;
template <>
inline constexpr int kTypeCode<Handle> = 0;
template <>
inline constexpr int kTypeCode<DataType> = 1;
template <>
inline constexpr int kTypeCode<bool> = 2;
template <>
inline constexpr int kTypeCode<int64_t> = 3;
template <>
inline constexpr int kTypeCode<Heuristic> = 8;
template <>
inline constexpr int kTypeCode<Pointwise> = 14;
template <>
inline constexpr int kTypeCode<Reduction> = 18;
constexpr int kPointers = 6, kDescriptors = 15;

/// The least that has all of this, and those whose attention is known to be wrong.
constexpr size_t kLeastVersion = 90000, kWrongVersions[] = {91000, 91001};
/// Before it, the mask is the least finite number.
constexpr size_t kMasksWithInfinity = 91000;
/// From the first on a gradient's graph begins its sums of dQ with zeros itself; before the second
/// it has to mask what lies behind the keys, unless their number is a multiple of 128.
constexpr size_t kZeroesSums = 90600, kGradientsOfAnyKeys = 91600;

// ---- The library -------------------------------------------------------------------------------

/// Whatever cuDNN refuses ends up in CudnnAttention::missing().
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Library {
  size_t (*version)() = nullptr;
  void (*last_error)(char*, size_t) = nullptr;
  Status (*create)(Handle*) = nullptr;
  Status (*destroy)(Handle) = nullptr;
  Status (*set_stream)(Handle, cudaStream_t) = nullptr;
  Status (*create_descriptor)(Kind, Descriptor*) = nullptr;
  Status (*destroy_descriptor)(Descriptor) = nullptr;
  Status (*finalize)(Descriptor) = nullptr;
  Status (*set)(Descriptor, Attribute, int type, int64_t count, const void*) = nullptr;
  Status (*get)(Descriptor, Attribute, int type, int64_t most, int64_t* count, void*) = nullptr;
  Status (*execute)(Handle, Descriptor plan, Descriptor variant_pack) = nullptr;

  /// It stays loaded until the program ends, as others may use it.
  Library() {
    void* library = nullptr;
    for (const char* name : {"libcudnn.so.9", "libcudnn_graph.so.9", "libcudnn.so"}) {
      if (!library) library = dlopen(name, RTLD_NOW);
    }
    if (!library) throw Refused("there is no libcudnn.so.9");
    const auto find = [&](auto& function, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw Refused(std::string("libcudnn.so.9 has no ") + name);
    };
    find(version, "cudnnGetVersion");
    if (version() < kLeastVersion) throw Refused("it is older than 9");
    find(last_error, "cudnnGetLastErrorString");
    find(create, "cudnnCreate");
    find(destroy, "cudnnDestroy");
    find(set_stream, "cudnnSetStream");
    find(create_descriptor, "cudnnBackendCreateDescriptor");
    find(destroy_descriptor, "cudnnBackendDestroyDescriptor");
    find(finalize, "cudnnBackendFinalize");
    find(set, "cudnnBackendSetAttribute");
    find(get, "cudnnBackendGetAttribute");
    find(execute, "cudnnBackendExecute");
  }

  void check(Status status, const char* what) const {
    if (status != 0) throw Refused(why(status, what));
  }
  std::string why(Status status, const char* what) const {
    char text[512] = "";
    last_error(text, sizeof text);
    const std::string all = text;
    // Its first line.
    const std::string first = all.substr(0, all.find('\n'));
    return std::string(what) + ": " + (first.empty() ? "" : first + ", ") + "status " +
           std::to_string(status);
  }
};

/// A descriptor of the library's, with its attributes.
class Object {
 public:
  Object(const Library& library, Kind kind) : library_(&library) {
    library.check(library.create_descriptor(kind, &descriptor_), "cudnnBackendCreateDescriptor");
  }
  Object(Object&& other) noexcept
      : library_(other.library_), descriptor_(std::exchange(other.descriptor_, nullptr)) {}
  Object& operator=(Object&&) = delete;
  ~Object() {
    if (descriptor_) library_->destroy_descriptor(descriptor_);
  }
  Descriptor get() const { return descriptor_; }

  template <typename T>
  Object& set(Attribute attribute, const T& value) {
    return set(attribute, kTypeCode<T>, 1, &value);
  }
  template <typename T>
  Object& set(Attribute attribute, const std::vector<T>& values) {
    return set(attribute, kTypeCode<T>, static_cast<int64_t>(values.size()), values.data());
  }
  Object& set(Attribute attribute, const Object& other) {
    return set(attribute, kDescriptors, 1, &other.descriptor_);
  }
  Object& set(Attribute attribute, const std::vector<Object>& others) {
    std::vector<Descriptor> descriptors;
    for (const Object& each : others) descriptors.push_back(each.descriptor_);
    return set(attribute, kDescriptors, static_cast<int64_t>(descriptors.size()),
               descriptors.data());
  }
  Object& set(Attribute attribute, int type, int64_t count, const void* values) {
    library_->check(library_->set(descriptor_, attribute, type, count, values),
                    "cudnnBackendSetAttribute");
    return *this;
  }
  Object& finalize() {
    library_->check(library_->finalize(descriptor_), "cudnnBackendFinalize");
    return *this;
  }

  int64_t number(Attribute attribute) const {
    int64_t value = 0, count = 0;
    library_->check(library_->get(descriptor_, attribute, kTypeCode<int64_t>, 1, &count, &value),
                    "cudnnBackendGetAttribute");
    return value;
  }
  /// Those that an attribute refers to, of which there may be none.
  std::vector<Object> objects(Attribute attribute, Kind kind) const {
    int64_t count = 0;
    library_->check(library_->get(descriptor_, attribute, kDescriptors, 0, &count, nullptr),
                    "cudnnBackendGetAttribute");
    std::vector<Object> result;
    std::vector<Descriptor> descriptors;
    for (int64_t i = 0; i < count; ++i) {
      descriptors.push_back(result.emplace_back(*library_, kind).descriptor_);
    }
    if (count > 0) {
      library_->check(
          library_->get(descriptor_, attribute, kDescriptors, count, &count, descriptors.data()),
          "cudnnBackendGetAttribute");
    }
    while (static_cast<int64_t>(result.size()) > count) result.pop_back();
    return result;
  }

 private:
  const Library* library_;
  Descriptor descriptor_ = nullptr;
};

// ---- Attention as a graph of operations --------------------------------------------------------

using Extents = std::vector<int64_t>;

/// What a graph reads and writes has these names.
enum Id : int64_t {
  kQ = 1,
  kK,
  kV,
  kOut,
  kLse,
  kScale,
  kMask,
  kQueries,
  kKeys,
  kOne,
  kGradOut,
  kGradQ,
  kGradK,
  kGradV,
  kRowSums,
  kQuerySums,
  kFirstVirtual,
};

/// A matrix for each head of each batch element: (batch, heads, rows, columns).
struct Layout {
  Extents extents, strides;
};
Layout dense(int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  return {{batch, heads, rows, columns}, {heads * rows * columns, rows * columns, columns, 1}};
}

/// The operations in a row. A tensor is virtual if it is only passed from one operation to the
/// next: cuDNN recognizes the whole as attention, and keeps these on the chip.
class Graph {
 public:
  explicit Graph(const Library& library) : library_(library) {}

  /// In memory, or a number that the host passes.
  const Object& operand(Id id, DataType type, const Layout& layout, bool by_value = false) {
    return tensor(id, type, layout, false, by_value);
  }
  const Object& number(Id id, DataType type) { return operand(id, type, dense(1, 1, 1, 1), true); }
  const Object& between(const Layout& layout, DataType type = DataType::fp32) {
    return tensor(next_++, type, layout, true, false);
  }

  void matmul(const Object& a, const Object& b, const Object& c) {
    const Object& how =
        keep(Kind::matmul).set(Attribute::matmul_precision, DataType::fp32).finalize();
    operation(Kind::matmul_operation)
        .set(Attribute::matmul_descriptor, how)
        .set(Attribute::matmul_a, a)
        .set(Attribute::matmul_b, b)
        .set(Attribute::matmul_c, c)
        .finalize();
  }
  /// y = x `mode` b; for select b where t is false.
  void pointwise(Pointwise mode, const Object& x, const Object* b, const Object* t, const Object& y,
                 DataType precision = DataType::fp32) {
    const Object& how = keep(Kind::pointwise)
                            .set(Attribute::pointwise_mode, mode)
                            .set(Attribute::pointwise_precision, precision)
                            .finalize();
    apply(how, x, b, t, y);
  }
  /// y = the index of each element's row (axis 2) or column (3)
  void index(int64_t axis, const Object& x, const Object& y) {
    const Object& how = keep(Kind::pointwise)
                            .set(Attribute::pointwise_mode, Pointwise::index)
                            .set(Attribute::pointwise_precision, DataType::fp32)
                            .set(Attribute::pointwise_axis, axis)
                            .finalize();
    apply(how, x, nullptr, nullptr, y);
  }
  /// Of each row.
  void reduce(Reduction reduction, const Object& x, const Object& y) {
    const Object& how = keep(Kind::reduction)
                            .set(Attribute::reduction_precision, DataType::fp32)
                            .set(Attribute::reduction_operator, reduction)
                            .finalize();
    operation(Kind::reduction_operation)
        .set(Attribute::reduction_descriptor, how)
        .set(Attribute::reduction_x, x)
        .set(Attribute::reduction_y, y)
        .finalize();
  }

  /// The same elements with other extents, strides or another type.
  void reshape(const Object& x, const Object& y) {
    operation(Kind::reshape_operation)
        .set(Attribute::reshape_x, x)
        .set(Attribute::reshape_y, y)
        .finalize();
  }

  Object finished(Handle handle) const {
    Object graph(library_, Kind::graph);
    if (handle) graph.set(Attribute::graph_handle, handle);
    graph.set(Attribute::graph_operations, operations_).finalize();
    return graph;
  }

 private:
  const Object& tensor(int64_t id, DataType type, const Layout& layout, bool is_virtual,
                       bool by_value) {
    return keep(Kind::tensor)
        .set(Attribute::tensor_type, type)
        .set(Attribute::tensor_dimensions, layout.extents)
        .set(Attribute::tensor_strides, layout.strides)
        .set(Attribute::tensor_id, id)
        .set(Attribute::tensor_alignment, int64_t{16})
        .set(Attribute::tensor_is_virtual, is_virtual)
        .set(Attribute::tensor_is_by_value, by_value)
        .finalize();
  }
  void apply(const Object& how, const Object& x, const Object* b, const Object* t,
             const Object& y) {
    Object& result = operation(Kind::pointwise_operation)
                         .set(Attribute::pointwise_descriptor, how)
                         .set(Attribute::pointwise_x, x)
                         .set(Attribute::pointwise_y, y);
    if (b) result.set(Attribute::pointwise_b, *b);
    if (t) result.set(Attribute::pointwise_t, *t);
    result.finalize();
  }
  Object& keep(Kind kind) { return *kept_.emplace_back(std::make_unique<Object>(library_, kind)); }
  Object& operation(Kind kind) { return operations_.emplace_back(library_, kind); }

  const Library& library_;
  int64_t next_ = kFirstVirtual;
  std::vector<std::unique_ptr<Object>> kept_;
  std::vector<Object> operations_;
};

/// The layouts of attention's tensors, as cuDNN numbers them.
struct Layouts {
  Layout of_queries, of_keys, transposed, square, transposed_square, row;
  explicit Layouts(const AttentionShape& shape) {
    const auto& [batch, queries, keys, heads, kv_heads, width, causal] = shape;
    of_queries = {{batch, heads, queries, width},
                  {queries * heads * width, width, heads * width, 1}};
    of_keys = {{batch, kv_heads, keys, width},
               {keys * kv_heads * width, width, kv_heads * width, 1}};
    transposed = {{batch, kv_heads, width, keys},
                  {keys * kv_heads * width, width, 1, kv_heads * width}};
    square = dense(batch, heads, queries, keys);
    transposed_square = {{batch, heads, keys, queries},
                         {heads * queries * keys, queries * keys, 1, keys}};
    row = dense(batch, heads, queries, 1);
  }
};

/// The logits, of which the mask has taken what a query does not see. It is the one that cuDNN
/// recognizes: the query's row is moved by keys - queries, where these differ, and sees the columns
/// that are not behind it.
const Object& masked(Graph& graph, const AttentionShape& shape, const Layout& square,
                     const Object& logits) {
  // One query sees all keys.
  if (!shape.causal || shape.queries == 1) return logits;
  const Object* rows = &graph.between(square, DataType::int32);
  const Object& columns = graph.between(square, DataType::int32);
  graph.index(2, logits, *rows);
  graph.index(3, logits, columns);
  if (shape.queries != shape.keys) {
    const Object &later = graph.between(square, DataType::int32),
                 &moved = graph.between(square, DataType::int32);
    graph.pointwise(Pointwise::add, *rows, &graph.number(kKeys, DataType::int32), nullptr, later,
                    DataType::int32);
    graph.pointwise(Pointwise::subtract, later, &graph.number(kQueries, DataType::int32), nullptr,
                    moved, DataType::int32);
    rows = &moved;
  }
  const Object &sees = graph.between(square, DataType::boolean), &result = graph.between(square);
  graph.pointwise(Pointwise::not_less, *rows, &columns, nullptr, sees, DataType::boolean);
  graph.pointwise(Pointwise::select, logits, &graph.number(kMask, DataType::fp32), &sees, result);
  return result;
}

/// In the order that cuDNN recognizes.
void describe_attention(Graph& graph, const AttentionShape& shape, DataType type) {
  const auto& [of_queries, of_keys, transposed, square, transposed_square, row] = Layouts(shape);

  const Object &logits = graph.between(square), &scaled = graph.between(square);
  graph.matmul(graph.operand(kQ, type, of_queries), graph.operand(kK, type, transposed), logits);
  graph.pointwise(Pointwise::multiply, logits, &graph.number(kScale, DataType::fp32), nullptr,
                  scaled);
  const Object& seen = masked(graph, shape, square, scaled);
  const Object &largest = graph.between(row), &difference = graph.between(square),
               &weights = graph.between(square), &sum = graph.between(row);
  graph.reduce(Reduction::max, seen, largest);
  graph.pointwise(Pointwise::subtract, seen, &largest, nullptr, difference);
  graph.pointwise(Pointwise::exp, difference, nullptr, nullptr, weights);
  graph.reduce(Reduction::add, weights, sum);
  const Object &log_of_sum = graph.between(row), &lse = graph.operand(kLse, DataType::fp32, row);
  graph.pointwise(Pointwise::log, sum, nullptr, nullptr, log_of_sum);
  graph.pointwise(Pointwise::add, largest, &log_of_sum, nullptr, lse);
  const Object& p = graph.between(square, type);
  graph.pointwise(Pointwise::divide, weights, &sum, nullptr, p);
  graph.matmul(p, graph.operand(kV, type, of_keys), graph.operand(kOut, type, of_queries));
}

/// The gradients, again in the order that cuDNN recognizes. D and the sums of dQ are no virtual
/// tensors: they lie in the workspace.
void describe_gradients(Graph& graph, const AttentionShape& shape, DataType type) {
  const auto& [of_queries, of_keys, transposed, square, transposed_square, row] = Layouts(shape);
  const Layout all_keys = dense(shape.batch, shape.heads, shape.keys, shape.width);
  const Layout all_queries = dense(shape.batch, shape.heads, shape.queries, shape.width);
  const auto between = [&](Pointwise mode, const Object& x, const Object* b,
                           const Layout& layout) -> const Object& {
    const Object& y = graph.between(layout);
    graph.pointwise(mode, x, b, nullptr, y);
    return y;
  };
  // The product with `right`, of which each head of K and V gets the sum over its heads of Q.
  const auto add_up = [&](const Object& left, const Object& right, Id id) {
    const Object& result = graph.operand(id, type, of_keys);
    if (shape.heads == shape.kv_heads) return graph.matmul(left, right, result);
    const Object& of_each = graph.between(all_keys, type);
    graph.matmul(left, right, of_each);
    graph.reduce(Reduction::add, of_each, result);
  };
  const Object &Q = graph.operand(kQ, type, of_queries), &K = graph.operand(kK, type, transposed),
               &d_out = graph.operand(kGradOut, type, of_queries),
               &scale = graph.number(kScale, DataType::fp32);

  // Without dropout D's factor is one.
  const Object &terms = between(Pointwise::multiply, d_out, &graph.operand(kOut, type, of_queries),
                                all_queries),
               &sum = graph.between(row), &D = graph.operand(kRowSums, DataType::fp32, row);
  graph.reduce(Reduction::add, terms, sum);
  graph.pointwise(Pointwise::multiply, sum, &graph.number(kOne, DataType::fp32), nullptr, D);

  const Object& logits = graph.between(square);
  graph.matmul(Q, K, logits);
  const Object &scaled = between(Pointwise::multiply, logits, &scale, square),
               &without_sum = between(Pointwise::subtract, scaled,
                                      &graph.operand(kLse, DataType::fp32, row), square),
               &P = between(Pointwise::exp, masked(graph, shape, square, without_sum), nullptr,
                            square),
               &P_transposed = graph.between(transposed_square, type);
  graph.reshape(P, P_transposed);
  add_up(P_transposed, d_out, kGradV);

  const Object& dP = graph.between(square);
  graph.matmul(d_out, graph.operand(kV, type, transposed), dP);
  const Object &less = between(Pointwise::subtract, dP, &D, square),
               &of_logits = between(Pointwise::multiply, less, &P, square),
               &dS = between(Pointwise::multiply, of_logits, &scale, square),
               &dS_transposed = graph.between(transposed_square, type);
  graph.reshape(dS, dS_transposed);
  add_up(dS_transposed, Q, kGradK);

  const Object &K_rows = graph.between(of_keys),
               &sums = graph.operand(kQuerySums, DataType::fp32, all_queries);
  graph.reshape(K, K_rows);
  graph.matmul(dS, K_rows, sums);
  graph.pointwise(Pointwise::identity, sums, nullptr, nullptr,
                  graph.operand(kGradQ, type, of_queries));
}

}  // namespace

struct CudnnAttention::Plans {
  static constexpr size_t kMost = 4;

  Library library;
  Handle handle = nullptr;
  Pass pass;
  bool is_masked, is_moved;
  // Numbers that the host passes.
  float scale, one = 1, mask = -std::numeric_limits<float>::infinity();
  int32_t queries, keys;
  struct Plan {
    Object plan;
    std::string name;
  };
  std::vector<Plan> plans;
  // Of the workspace: what a plan needs, and behind it the gradients' D, and sums of dQ.
  size_t plan_bytes = 0, row_bytes = 0, sum_bytes = 0;
  // The last ones launched with.
  mutable Memory memory{};
  mutable std::unique_ptr<Object> pack;

  Plans(const AttentionShape& shape, Pass pass)
      : pass(pass),
        is_masked(shape.causal && shape.queries > 1),
        is_moved(is_masked && shape.queries != shape.keys),
        scale(shape.scale()),
        queries(static_cast<int32_t>(shape.queries)),
        keys(static_cast<int32_t>(shape.keys)) {
    if (pass == Pass::forward) return;
    row_bytes = aligned(shape.rows() * sizeof(float));
    sum_bytes = shape.query_elements() * sizeof(float);
  }
  Plans(const Plans&) = delete;
  Plans& operator=(const Plans&) = delete;
  ~Plans() {
    plans.clear();
    pack.reset();
    if (handle) library.destroy(handle);
  }

  static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }
  size_t workspace_bytes() const { return aligned(plan_bytes) + row_bytes + sum_bytes; }

  std::string version() const {
    const size_t number = library.version();
    return std::to_string(number / 10000) + "." + std::to_string(number / 100 % 100) + "." +
           std::to_string(number % 100);
  }

  void build(const AttentionShape& shape, Type type) {
    const size_t number = library.version();
    for (const size_t wrong : kWrongVersions) {
      if (number == wrong) throw Refused("the attention of this version is known to be wrong");
    }
    if (number < kMasksWithInfinity) mask = std::numeric_limits<float>::lowest();
    if (type != Type::bf16 && type != Type::fp16) throw Refused("it has fp16 and bf16 alone");
    if (shape.causal && shape.queries > shape.keys) {
      throw Refused("it has no causal attention of more queries than keys");
    }
    if (shape.width % 8 != 0) throw Refused("its heads have widths of multiples of 8");
    if (pass == Pass::backward &&
        number < (shape.keys % 128 == 0 ? kZeroesSums : kGradientsOfAnyKeys)) {
      throw Refused("the gradients of this version need other graphs");
    }
    library.check(library.create(&handle), "cudnnCreate");
    Graph operations(library);
    const auto describe = pass == Pass::forward ? describe_attention : describe_gradients;
    describe(operations, shape, type == Type::bf16 ? DataType::bf16 : DataType::fp16);
    const Object graph = operations.finished(handle);
    std::string why = "cuDNN proposes no kernel";
    for (const Heuristic mode : {Heuristic::a, Heuristic::fallback}) {
      if (plans.empty()) add_plans(graph, mode, why);
    }
    if (plans.empty()) throw Refused(why);
  }

  void add_plans(const Object& graph, Heuristic mode, std::string& why) {
    std::vector<Object> configs;
    try {
      Object heuristics(library, Kind::heuristics);
      heuristics.set(Attribute::heuristics_graph, graph)
          .set(Attribute::heuristics_mode, mode)
          .finalize();
      configs = heuristics.objects(Attribute::heuristics_results, Kind::engine_config);
    } catch (const Refused& refused) {
      why = refused.what();
    }
    for (const Object& config : configs) {
      if (plans.size() == kMost) return;
      try {
        Object plan(library, Kind::plan);
        plan.set(Attribute::plan_handle, handle).set(Attribute::plan_config, config).finalize();
        plan_bytes =
            std::max(plan_bytes, static_cast<size_t>(plan.number(Attribute::plan_workspace)));
        std::string name = "cuDNN " + version() + ", engine " + engine_of(config);
        plans.push_back({std::move(plan), std::move(name)});
      } catch (const Refused& refused) {
        why = refused.what();
      }
    }
  }

  static std::string engine_of(const Object& config) {
    const std::vector<Object> engines = config.objects(Attribute::config_engine, Kind::engine);
    if (engines.empty()) return "?";
    return std::to_string(engines.front().number(Attribute::engine_index));
  }

  /// The pointers of a launch. They are kept, as they rarely change.
  Object& pack_of(const Memory& wanted) const {
    if (pack && memory == wanted) return *pack;
    std::vector<int64_t> ids = {kQ, kK, kV, kOut, kLse, kScale};
    std::vector<const void*> pointers = {wanted.Q,   wanted.K,   wanted.V,
                                         wanted.out, wanted.lse, &scale};
    const auto add = [&](Id id, const void* pointer) {
      ids.push_back(id);
      pointers.push_back(pointer);
    };
    if (is_masked) add(kMask, &mask);
    if (is_moved) add(kQueries, &queries), add(kKeys, &keys);
    if (pass == Pass::backward) {
      char* const row_sums = static_cast<char*>(wanted.workspace) + aligned(plan_bytes);
      add(kOne, &one), add(kGradOut, wanted.d_out), add(kGradQ, wanted.dQ);
      add(kGradK, wanted.dK), add(kGradV, wanted.dV);
      add(kRowSums, row_sums), add(kQuerySums, row_sums + row_bytes);
    }
    pack = std::make_unique<Object>(library, Kind::variant_pack);
    pack->set(Attribute::pack_workspace, kPointers, 1, &wanted.workspace)
        .set(Attribute::pack_pointers, kPointers, static_cast<int64_t>(pointers.size()),
             pointers.data())
        .set(Attribute::pack_ids, ids)
        .finalize();
    memory = wanted;
    return *pack;
  }
};

CudnnAttention::CudnnAttention(const AttentionShape& shape, Type type, Pass pass) {
  try {
    plans_ = std::make_unique<Plans>(shape, pass);
    version_ = plans_->version();
    plans_->build(shape, type);
  } catch (const Refused& refused) {
    missing_ = refused.what();
    plans_.reset();
  }
}

CudnnAttention::~CudnnAttention() = default;

int CudnnAttention::plans() const { return static_cast<int>(plans_->plans.size()); }
std::string CudnnAttention::name_of(int plan) const { return plans_->plans[plan].name; }
size_t CudnnAttention::workspace_bytes() const { return plans_->workspace_bytes(); }

void CudnnAttention::launch(int plan, const Memory& memory, cudaStream_t stream) const {
  const Library& library = plans_->library;
  try {
    const Object& pack = plans_->pack_of(memory);
    library.check(library.set_stream(plans_->handle, stream), "cudnnSetStream");
    library.check(library.execute(plans_->handle, plans_->plans[plan].plan.get(), pack.get()),
                  "cudnnBackendExecute");
  } catch (const Refused& refused) {
    call_failed("cuDNN", __FILE__, __LINE__, refused.what());
  }
}

}  // namespace problems

#else  // CUDA_CPU

namespace problems {

struct CudnnAttention::Plans {};

CudnnAttention::CudnnAttention(const AttentionShape&, Type, Pass)
    : missing_("cuDNN runs on a GPU alone") {}
CudnnAttention::~CudnnAttention() = default;
int CudnnAttention::plans() const { return 0; }
std::string CudnnAttention::name_of(int) const { return {}; }
size_t CudnnAttention::workspace_bytes() const { return 0; }
void CudnnAttention::launch(int, const Memory&, cudaStream_t) const {}

}  // namespace problems

#endif  // CUDA_CPU
