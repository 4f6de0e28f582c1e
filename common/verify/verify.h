// Are the results right?
#pragma once

#include <functional>

#include "common/results.h"

namespace common {

/// Every selected row, launched by `launch`, from outputs that are poisoned with NaN, is compared
/// with the reference. Called before rows are timed, and after it with the launches that were
/// timed: what is right must stay right. With `explain` a wrong row says which elements are wrong.
void verify(Table& table, const std::function<void(Row&)>& launch, bool explain);

}  // namespace common
