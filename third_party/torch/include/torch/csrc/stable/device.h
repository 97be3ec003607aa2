#pragma once

#include <torch/csrc/stable/device_inl.h>
#include <torch/csrc/stable/device_struct.h>
