// Are the results right?
#pragma once

#include <functional>

#include "common/results.h"
#include "common/verify/inputs.h"

namespace common {

/// Every selected row, or those of them that `which` picks, launched by `launch` from outputs that
/// are poisoned with NaN, is compared with the reference. Called before rows are timed or counted,
/// and after it with the launches that were timed: what is right must stay right. A row that cannot
/// be launched, or that changes guards or inputs, is wrong, too, says so, and is not launched
/// again. With `explain` a row with wrong results says which elements are wrong.
void verify(Table& table, Inputs& inputs, const std::function<void(Row&)>& launch, bool explain,
            const std::function<bool(const Row&)>& which = {});

}  // namespace common
