// cooperative_groups::inclusive_scan() and exclusive_scan().
#pragma once
#include "cooperative_groups.h"
