// llama.cpp running a whole model through its public interface, with its defaults (weights rearranged for its fastest
// kernels, flash attention where it chooses so). Asked one JSON object a line, as own_model.py: {"prefill": T} answers
// the seconds of a prompt of T tokens, {"decode": N, "context": C} those of N tokens after a prompt of C (1 unless given).
//
//   llama_model MODEL.gguf THREADS
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "llama.h"

namespace {

constexpr int kContext = 8192, kBatch = 2048;

struct Session {
  llama_context* context;
  int vocabulary;
  std::mt19937 rng{1};

  // As many random tokens, in one call where they fit a batch; the logits of the last one are computed.
  void feed(int count) {
    for (; count > kBatch; count -= kBatch) feed(kBatch);
    std::vector<llama_token> tokens(count);
    for (llama_token& token : tokens) token = rng() % vocabulary;
    if (llama_decode(context, llama_batch_get_one(tokens.data(), count)) != 0) {
      std::fprintf(stderr, "llama_decode failed at %d tokens\n", count);
      std::exit(1);
    }
    if (!llama_get_logits_ith(context, -1)) std::exit(1);  // waits for the result
  }
  void clear() { llama_memory_clear(llama_get_memory(context), true); }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  llama_log_set([](ggml_log_level level, const char* text, void*) {
    if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
  }, nullptr);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (!model) return 1;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = kContext;
  params.n_batch = kBatch;
  params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = std::atoi(argv[2]);
  llama_context* context = llama_init_from_model(model, params);
  if (!context) return 1;
  Session session{context, llama_vocab_n_tokens(llama_model_get_vocab(model))};
  std::printf("{\"ready\": true}\n");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) {
    const bool decode = line.find("\"decode\"") != std::string::npos;
    const int count = std::atoi(line.c_str() + line.find(':') + 1);
    session.clear();
    const size_t context = line.find("\"context\"");
    if (decode) session.feed(context == std::string::npos ? 1 : std::atoi(line.c_str() + line.find(':', context) + 1));
    const auto start = std::chrono::steady_clock::now();
    if (decode) {
      for (int i = 0; i < count; ++i) session.feed(1);
    } else {
      session.feed(count);
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    std::printf("{\"seconds\": %.6f}\n", taken.count());
    std::fflush(stdout);
  }
}
