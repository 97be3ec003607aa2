#pragma once

#include <torch/csrc/stable/generator_inl.h>
#include <torch/csrc/stable/generator_struct.h>
