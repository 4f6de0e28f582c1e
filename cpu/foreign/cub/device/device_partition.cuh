// See device_select.cuh.

#pragma once

#include <cub/device/device_select.cuh>
