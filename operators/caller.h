// What an operator is given by whoever calls it, beside its operands.
#pragma once

#include <cuda_runtime.h>

#include "common/choose/ways.h"
#include "operators/operands.h"

namespace operators {

using common::in_turn, common::Search, common::Way, common::way_id, common::WayId, common::Ways;

/// Memory, where to launch, and which ways are wanted.
struct Caller {
  Workspace workspace;
  cudaStream_t stream = nullptr;  ///< where ways launch
  /// Whether a launch has the device for itself, as in a lesson's table. Only then may a block wait
  /// for one of a higher number: elsewhere other launches may hold the room that the second one
  /// needs, and wait for a block of their own as well. A block may always wait for one of a lower
  /// number, which has started before it, and for those of its cluster, which start together.
  bool alone = true;
  Search search = {.all = true};

  /// For a step of an operator: the id that is searched for is one of the whole operator's.
  Caller of_step() const { return {workspace, stream, alone, {.all = search.all}}; }
};

}  // namespace operators
