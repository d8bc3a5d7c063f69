#include <cstring>

#include "isa/kernels.h"

namespace int4moe {

extern const Kernels kScalarW4A16, kScalarW4A8;
#ifdef INT4MOE_HAVE_AVX2
extern const Kernels kAvx2W4A16, kAvx2W4A8;
#endif

namespace {

const Kernels* const kTable[] = {
    &kScalarW4A16, &kScalarW4A8,
#ifdef INT4MOE_HAVE_AVX2
    &kAvx2W4A16,   &kAvx2W4A8,
#endif
    nullptr,
};

}  // namespace

const Kernels* const* all_kernels() { return kTable; }

const Kernels* find_kernels(const char* isa, const char* compute) {
  for (const Kernels* const* k = kTable; *k; ++k) {
    if (!std::strcmp((*k)->isa, isa) && !std::strcmp((*k)->compute, compute)) return *k;
  }
  return nullptr;
}

}  // namespace int4moe
