// The C++ tests of the native core: every row of kernels of this build that this CPU runs. No framework, no Python, no
// OpenMP needed, so that it also runs statically linked on an emulated CPU and under sanitizers.
#include <cstdio>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "cases.h"
#include "core/cpu_features.h"
#include "kernels_test.h"

namespace tests {

using namespace int4moe;

const Kernels& scalar_row() { return *find_kernels("scalar", "w4a16", FloatType::kFloat32, 0); }

namespace {

struct Options {
  bool quick = false;
  std::vector<std::string> only, whole, require, without;
};

const char* const kUsage =
    "native_tests [--quick [--whole NAME]...] [--isa NAME]... [--require NAME]... [--without NAME]...\n"
    "  --quick         fewer batch sizes\n"
    "  --whole NAME    all batch sizes for rows of this instruction set\n"
    "  --isa NAME      test rows of this instruction set only\n"
    "  --require NAME  fail when a row of this instruction set cannot run here\n"
    "  --without NAME  fail when a row of this instruction set can run here\n";

bool parse(int count, char** words, Options& o) {
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--quick") {
      o.quick = true;
      continue;
    }
    auto* list = word == "--isa"       ? &o.only
                 : word == "--whole"   ? &o.whole
                 : word == "--require" ? &o.require
                 : word == "--without" ? &o.without
                                       : nullptr;
    if (!list || ++i == count) return false;
    list->push_back(words[i]);
  }
  return true;
}

bool named(const std::vector<std::string>& list, const char* isa) {
  for (const auto& name : list) {
    if (name == isa) return true;
  }
  return false;
}

void test_one(const Kernels& k, bool quick) {
  const Counts before = counts();
  test_row(k, quick);
  test_elementwise(k);
  test_layer(k);
  test_attention(k);
  test_dense(k);
  test_decode(k);
  test_latent(k);
  test_decode_latent(k);
  test_tiles_released(k);
  std::printf("%-44s %7ld checks, %ld failed\n", row_name(k).c_str(), counts().checks - before.checks,
              counts().failures - before.failures);
  std::fflush(stdout);
}

// Whether each ISA of `require` has all its rows here, and those of `without` none.
void test_presence(const Options& o) {
  for (const auto& isa : o.require) {
    bool any = false;
    for (const Kernels* const* k = all_kernels(); *k; ++k) {
      if (isa != (*k)->isa) continue;
      any = true;
      check(((*k)->features & cpu_features()) == (*k)->features, "%s can run here", row_name(**k).c_str());
    }
    check(any, "this build has rows for %s", isa.c_str());
  }
  for (const auto& isa : o.without) {
    for (const char* compute : {"w4a16", "w4a8"}) {
      for (const FloatType t : {FloatType::kFloat16, FloatType::kBFloat16, FloatType::kFloat32}) {
        check(!find_kernels(isa.c_str(), compute, t, cpu_features()), "%s/%s is not offered here", isa.c_str(), compute);
      }
    }
  }
}

int run(const Options& o) {
  test_presence(o);
  test_threads();
  test_memory();
  int rows = 0, skipped = 0;
  for (const Kernels* const* k = all_kernels(); *k; ++k) {
    if (!o.only.empty() && !named(o.only, (*k)->isa)) continue;
    if (((*k)->features & cpu_features()) != (*k)->features) {
      std::printf("%-44s skipped: this CPU or operating system lacks what it needs\n", row_name(**k).c_str());
      ++skipped;
      continue;
    }
    test_one(**k, o.quick && !named(o.whole, (*k)->isa));
    ++rows;
  }
  // Rows that compute the same integers. W4A16 on 16-bit activations does so in every row that has the instructions for it.
  for (const auto& [one, other, compute, type] :
       {std::tuple{"avx512", "amx", "w4a8", FloatType::kFloat32}, std::tuple{"avx2", "avx2_vnni", "w4a8", FloatType::kFloat32},
        std::tuple{"avx512", "amx", "w4a16", FloatType::kBFloat16}, std::tuple{"avx2", "avx512", "w4a16", FloatType::kBFloat16}}) {
    const Kernels* a = find_kernels(one, compute, type, cpu_features());
    const Kernels* b = find_kernels(other, compute, type, cpu_features());
    if (a && b && a->types == b->types) test_same_bits(*a, *b);
  }
  std::printf("%d rows tested, %d skipped, %ld checks, %ld failed\n", rows, skipped, counts().checks, counts().failures);
  return counts().failures ? 1 : 0;
}

}  // namespace
}  // namespace tests

int main(int count, char** words) {
  tests::Options options;
  if (!tests::parse(count, words, options)) {
    std::fputs(tests::kUsage, stderr);
    return 2;
  }
  return tests::run(options);
}
