// Prints comparison_text(FORMAT, FACTOR): what a lesson prints on a GPU when it compares two rows.
#include <cstdio>
#include <cstdlib>

#include "common/check.h"
#include "common/report/comparison.h"

using namespace common;

int main(int argc, char** argv) {
  if (argc != 3) fail(kBadUsage, "comparison FORMAT FACTOR");
  puts(comparison_text(argv[1], std::atof(argv[2])).c_str());
}
