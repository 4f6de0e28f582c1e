#pragma once

/// The git commit this was built from, with "-dirty" if the tree had changes; "unknown" outside
/// git.
const char* build_commit();
