#include <cstring>

#include "isa/kernels.h"

namespace int4moe {

extern const Kernels kScalarW4A16, kScalarW4A8;
#ifdef INT4MOE_HAVE_AVX2
extern const Kernels kAvx2Int16W4A16, kAvx2W4A16, kAvx2W4A8;
#endif
#ifdef INT4MOE_HAVE_AVX2_VNNI
extern const Kernels kAvx2VnniW4A8;
#endif
#ifdef INT4MOE_HAVE_AVX512
extern const Kernels kAvx512Int16W4A16, kAvx512W4A16, kAvx512W4A8;
#endif
#ifdef INT4MOE_HAVE_AMX
extern const Kernels kAmxW4A16, kAmxFloatW4A16, kAmxW4A8;
#endif

namespace {

const Kernels* const kTable[] = {
    &kScalarW4A16, &kScalarW4A8,
#ifdef INT4MOE_HAVE_AVX2
    &kAvx2Int16W4A16, &kAvx2W4A16, &kAvx2W4A8,
#endif
#ifdef INT4MOE_HAVE_AVX2_VNNI
    &kAvx2VnniW4A8,
#endif
#ifdef INT4MOE_HAVE_AVX512
    &kAvx512Int16W4A16, &kAvx512W4A16, &kAvx512W4A8,
#endif
#ifdef INT4MOE_HAVE_AMX
    &kAmxW4A16, &kAmxFloatW4A16, &kAmxW4A8,
#endif
    nullptr,
};

}  // namespace

const Kernels* const* all_kernels() { return kTable; }

const Kernels* find_kernels(const char* isa, const char* compute, FloatType type, uint32_t features) {
  for (const Kernels* const* k = kTable; *k; ++k) {
    const Kernels& row = **k;
    if (!std::strcmp(row.isa, isa) && !std::strcmp(row.compute, compute) && (row.types & type_bit(type)) &&
        (row.features & features) == row.features) {
      return *k;
    }
  }
  return nullptr;
}

}  // namespace int4moe
