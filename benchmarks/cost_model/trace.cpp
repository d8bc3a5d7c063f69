// The instructions of one call of a kernel in the order in which they run: `trace ISA COMPUTE TOKENS BLOCKS COLUMNS GROUP
// GATHERED HEAVY_TAILS ZEROS` writes, for each, the program counter and the 16 general registers (17 little-endian uint64)
// to standard output. A child runs the call step by step; tile instructions, which this CPU need not have, are stepped over:
// nothing that a kernel branches on depends on what is in a tile. It needs AVX-512 VNNI.
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/cpu_features.h"
#include "core/layout.h"
#include "isa/kernels.h"

using namespace int4moe;

namespace {

template <class T>
T* aligned(size_t count) {
  return static_cast<T*>(std::aligned_alloc(4096, (count * sizeof(T) + 4095) / 4096 * 4096));
}

// Length of a VEX instruction of the tile group, three bytes of prefix, in 64-bit mode.
int tile_length(const unsigned char* code) {
  const int mod = code[4] >> 6, sib = mod != 3 && (code[4] & 7) == 4;
  const int displacement = mod == 1 ? 1 : mod == 2 ? 4 : mod == 0 && (sib ? code[5] & 7 : code[4] & 7) == 5 ? 4 : 0;
  return 5 + sib + displacement;
}

[[noreturn]] void fail(const char* what) {
  std::perror(what);
  std::exit(1);
}

void record(pid_t child) {
  int status;
  waitpid(child, &status, 0);  // before the call
  for (;;) {
    user_regs_struct r;
    if (ptrace(PTRACE_GETREGS, child, nullptr, &r)) fail("ptrace");
    const uint64_t row[17] = {r.rip, r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi,
                              r.r8,  r.r9,  r.r10, r.r11, r.r12, r.r13, r.r14, r.r15};
    if (fwrite(row, sizeof(row), 1, stdout) != 1) fail("write");
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr)) fail("ptrace");
    waitpid(child, &status, 0);
    if (!WIFSTOPPED(status)) fail("the call ended");
    if (WSTOPSIG(status) == SIGUSR1) break;  // after the call
    if (WSTOPSIG(status) == SIGSEGV || WSTOPSIG(status) == SIGBUS) fail("the call failed");
    if (WSTOPSIG(status) != SIGILL) continue;  // a step, or a stop from outside
    unsigned char code[16];
    for (size_t i = 0; i < sizeof(code); i += 8) {
      const long word = ptrace(PTRACE_PEEKTEXT, child, r.rip + i, nullptr);
      std::memcpy(code + i, &word, 8);
    }
    if (code[0] != 0xc4) fail("not a tile instruction");
    r.rip += tile_length(code);
    if (ptrace(PTRACE_SETREGS, child, nullptr, &r)) fail("ptrace");
  }
  kill(child, SIGKILL);
}

}  // namespace

int main(int count, char** words) {
  if (count != 10) return 2;
  const auto number = [&](int word) { return std::atoi(words[word]); };
  const int tokens = number(3), blocks = number(4), columns = number(5);
  const bool gathered = number(7);
  const Kernels* k = find_kernels(words[1], words[2], FloatType::kBFloat16, ~0u);
  if (!k || !(cpu_features() & kAvx512Vnni)) {
    std::fprintf(stderr, "trace: no such kernel in this build, or a CPU without AVX-512 VNNI\n");
    return 3;
  }
  Dims d;
  d.rows = blocks * kBlockRows;
  d.columns = columns;
  d.group_size = number(6);
  d.zeros = number(9);
  const Layout layout(1, Dims{}, d, Dims{});
  auto* blob = aligned<uint8_t>(layout.total_bytes());
  std::memset(blob, 0x11, layout.total_bytes());
  Matrix m = layout.matrix(blob, 0, kUp);
  m.heavy_tails = number(8);
  const size_t stride = k->row_bytes(m);
  auto* rows = aligned<uint8_t>(stride * size_t(tokens));
  std::vector<float> x(size_t(columns), 1.0f);
  std::vector<int32_t> index;
  for (int t = 0; t < tokens; ++t) {
    k->prepare(m, x.data(), rows + stride * size_t(t));
    index.push_back(tokens - 1 - t);
  }
  auto* out = aligned<float>(size_t(tokens) * d.rows);
  const Rows all{rows, stride, gathered ? index.data() : nullptr, tokens};
  const pid_t child = fork();
  if (child < 0) fail("fork");
  if (!child) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr)) fail("ptrace");
    raise(SIGSTOP);
    k->multiply(m, 0, blocks, all, out, size_t(d.rows), blob);
    raise(SIGUSR1);
    _exit(0);
  }
  record(child);
  return 0;
}
