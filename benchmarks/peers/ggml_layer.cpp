// llama.cpp's ggml: the operations that its graph runs for one MoE layer between the router and the residual
// (mul_mat_id for up and gate, swiglu, mul_mat_id for down, weighting, sum). Speaks run.py's protocol.
//
//   ggml_layer --hidden=2048 --intermediate=768 --experts=128 --top-k=8 --threads=2 --type=q4_0 [--plain]
#include <sys/times.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

// Defined by ggml-cpu without a public header: the buffer type that rearranges rows for its fastest kernels, which
// llama.cpp itself uses by default.
ggml_backend_buffer_type_t ggml_backend_cpu_repack_buffer_type(void);

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kDistinct = 4;  // experts that are really random; the others are copies in memory of their own

struct Options {
  int hidden = 0, intermediate = 0, experts = 0, top_k = 0, threads = 0;
  ggml_type type = GGML_TYPE_Q4_0;
  bool repack = true;
  std::string refusal;
};

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const auto eq = arg.find('=');
    const std::string key = arg.substr(0, eq), value = eq == std::string::npos ? "" : arg.substr(eq + 1);
    if (key == "--hidden") o.hidden = std::stoi(value);
    else if (key == "--intermediate") o.intermediate = std::stoi(value);
    else if (key == "--experts") o.experts = std::stoi(value);
    else if (key == "--top-k") o.top_k = std::stoi(value);
    else if (key == "--threads") o.threads = std::stoi(value);
    else if (key == "--plain") o.repack = false;
    else if (key == "--group-size") continue;  // the types have groups of their own
    else if (key == "--type" && value == "q4_0") o.type = GGML_TYPE_Q4_0;
    else if (key == "--type" && value == "q4_1") o.type = GGML_TYPE_Q4_1;
    else if (key == "--type" && value == "q4_K") o.type = GGML_TYPE_Q4_K;
    else if (key == "--asym") { if (o.type == GGML_TYPE_Q4_0) o.refusal = "Q4_0 is symmetric"; }
    else if (key == "--act-order") o.refusal = "ggml has no act-order";
    else o.refusal = "unknown argument " + arg;
  }
  return o;
}

struct Ticks {
  double busy, own;  // seconds of the whole machine and of this process
};

Ticks ticks() {
  const double hertz = sysconf(_SC_CLK_TCK);
  std::ifstream stat("/proc/stat");
  std::string word;
  double user, nice, system, idle, iowait, irq, softirq, steal;
  stat >> word >> user >> nice >> system >> idle >> iowait >> irq >> softirq >> steal;
  struct tms t;
  times(&t);
  return {(user + nice + system + irq + softirq + steal) / hertz, (t.tms_utime + t.tms_stime) / hertz};
}

// As routing_count in the package's timing module.
int routing_count(int tokens) { return std::max(5, std::min(61, 256 / tokens)); }

struct Weights {
  ggml_tensor* tensor[3];                     // gate, up [hidden, intermediate, experts]; down the other way round
  std::vector<std::vector<float>> dense[3];  // of the distinct experts
};

Weights make_weights(const Options& o, std::mt19937& rng) {
  Weights w;
  ggml_context* ctx = ggml_init({8 * ggml_tensor_overhead(), nullptr, true});
  const int rows[3] = {o.intermediate, o.intermediate, o.hidden}, columns[3] = {o.hidden, o.hidden, o.intermediate};
  for (int k = 0; k < 3; ++k) w.tensor[k] = ggml_new_tensor_3d(ctx, o.type, columns[k], rows[k], o.experts);
  ggml_backend_buffer_type_t place = o.repack ? ggml_backend_cpu_repack_buffer_type() : ggml_backend_cpu_buffer_type();
  if (!ggml_backend_alloc_ctx_tensors_from_buft(ctx, place)) std::exit(3);
  std::normal_distribution<float> normal;
  const int distinct = std::min(kDistinct, o.experts);
  for (int k = 0; k < 3; ++k) {
    const size_t count = size_t(rows[k]) * columns[k], bytes = ggml_nbytes(w.tensor[k]) / o.experts;
    std::vector<char> all(bytes * o.experts);
    std::vector<float> values(count);
    for (int e = 0; e < distinct; ++e) {
      for (float& v : values) v = normal(rng) / std::sqrt(float(columns[k]));
      ggml_quantize_chunk(o.type, values.data(), all.data() + e * bytes, 0, rows[k], columns[k], nullptr);
      w.dense[k].emplace_back(count);
      ggml_get_type_traits(o.type)->to_float(all.data() + e * bytes, w.dense[k].back().data(), count);
    }
    for (int e = distinct; e < o.experts; ++e) std::memcpy(&all[e * bytes], &all[(e % distinct) * bytes], bytes);
    ggml_backend_tensor_set(w.tensor[k], all.data(), 0, all.size());
  }
  return w;
}

// The layer's graph for one number of tokens, with its inputs and output.
struct Graph {
  ggml_context* ctx;
  ggml_cgraph* graph;
  ggml_gallocr_t memory;
  ggml_tensor *x, *ids, *weights, *out;

  Graph(const Options& o, const Weights& w, ggml_backend_t backend, int tokens) {
    ctx = ggml_init({256 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true});
    x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, o.hidden, 1, tokens);
    ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, o.top_k, tokens);
    weights = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, o.top_k, tokens);
    for (ggml_tensor* t : {x, ids, weights}) ggml_set_input(t);
    ggml_tensor* up = ggml_mul_mat_id(ctx, w.tensor[1], x, ids);
    ggml_tensor* gate = ggml_mul_mat_id(ctx, w.tensor[0], x, ids);
    ggml_tensor* down = ggml_mul_mat_id(ctx, w.tensor[2], ggml_swiglu_split(ctx, gate, up), ids);
    ggml_tensor* each = ggml_mul(ctx, down, weights);
    out = nullptr;
    for (int k = 0; k < o.top_k; ++k) {
      ggml_tensor* one = ggml_view_2d(ctx, each, o.hidden, tokens, each->nb[2], k * each->nb[1]);
      out = out ? ggml_add(ctx, out, one) : one;
    }
    if (o.top_k == 1) out = ggml_cont(ctx, out);
    ggml_set_output(out);
    graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    memory = ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend));
    if (!ggml_gallocr_alloc_graph(memory, graph)) std::exit(3);
  }
  ~Graph() {
    ggml_gallocr_free(memory);
    ggml_free(ctx);
  }
  Graph(const Graph&) = delete;
};

struct Inputs {
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
};

Inputs make_inputs(const Options& o, int tokens, std::mt19937& rng) {
  Inputs in;
  std::normal_distribution<float> normal;
  in.x.resize(size_t(tokens) * o.hidden);
  for (float& v : in.x) v = normal(rng);
  in.weights.assign(size_t(tokens) * o.top_k, 1.0f / o.top_k);
  std::vector<int32_t> order(o.experts);
  for (int e = 0; e < o.experts; ++e) order[e] = e;
  for (int t = 0; t < tokens; ++t) {
    for (int k = 0; k < o.top_k; ++k) std::swap(order[k], order[k + rng() % (o.experts - k)]);
    in.ids.insert(in.ids.end(), order.begin(), order.begin() + o.top_k);
  }
  return in;
}

// ggml may reuse the inputs' memory within a run, so they are set before each.
void set_inputs(const Graph& g, const Inputs& in) {
  ggml_backend_tensor_set(g.x, in.x.data(), 0, in.x.size() * 4);
  ggml_backend_tensor_set(g.ids, in.ids.data(), 0, in.ids.size() * 4);
  ggml_backend_tensor_set(g.weights, in.weights.data(), 0, in.weights.size() * 4);
}

// Relative error of token 0 against the dequantised weights in double precision.
double error_of(const Options& o, const Weights& w, const Inputs& in, const std::vector<float>& out) {
  std::vector<double> expected(o.hidden, 0.0), h(o.intermediate);
  for (int k = 0; k < o.top_k; ++k) {
    const int d = in.ids[k] % int(w.dense[0].size());
    for (int i = 0; i < o.intermediate; ++i) {
      double gate = 0, up = 0;
      for (int j = 0; j < o.hidden; ++j) {
        gate += double(w.dense[0][d][size_t(i) * o.hidden + j]) * in.x[j];
        up += double(w.dense[1][d][size_t(i) * o.hidden + j]) * in.x[j];
      }
      h[i] = gate / (1 + std::exp(-gate)) * up;
    }
    for (int i = 0; i < o.hidden; ++i) {
      double sum = 0;
      for (int j = 0; j < o.intermediate; ++j) sum += w.dense[2][d][size_t(i) * o.intermediate + j] * h[j];
      expected[i] += sum * in.weights[k];
    }
  }
  double wrong = 0, norm = 0;
  for (int i = 0; i < o.hidden; ++i) {
    wrong += (out[i] - expected[i]) * (out[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(wrong / norm);
}

int number_after(const std::string& line, const char* key) {
  const auto at = line.find(key);
  return at == std::string::npos ? 0 : std::atoi(line.c_str() + line.find(':', at) + 1);
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  if (!o.refusal.empty()) {
    std::printf("{\"ready\": false, \"reason\": \"%s\"}\n", o.refusal.c_str());
    return 0;
  }
  std::mt19937 rng(1);
  ggml_backend_t backend = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(backend, o.threads);
  Weights weights = make_weights(o, rng);
  {
    Graph graph(o, weights, backend, 2);
    const Inputs in = make_inputs(o, 2, rng);
    set_inputs(graph, in);
    ggml_backend_graph_compute(backend, graph.graph);
    std::vector<float> out(o.hidden);
    ggml_backend_tensor_get(graph.out, out.data(), 0, out.size() * 4);
    const char* isa = ggml_cpu_has_avx512() ? "avx512" : ggml_cpu_has_avx2() ? "avx2" : "sse";
    std::printf("{\"ready\": true, \"name\": \"ggml %s%s\", \"error\": %.3e, \"isa\": \"%s\"}\n",
                ggml_type_name(o.type), o.repack ? " repacked" : "", error_of(o, weights, in, out), isa);
    std::fflush(stdout);
    for (auto& one : weights.dense) std::vector<std::vector<float>>().swap(one);
  }
  std::string line;
  while (std::getline(std::cin, line)) {
    const int tokens = number_after(line, "\"tokens\"");
    const auto at = line.find("\"seconds\"");
    const double seconds = at == std::string::npos ? 0.4 : std::atof(line.c_str() + line.find(':', at) + 1);
    Graph graph(o, weights, backend, tokens);
    std::vector<Inputs> inputs;
    for (int i = 0; i < routing_count(tokens); ++i) inputs.push_back(make_inputs(o, tokens, rng));
    const auto once = [&](size_t i) {
      set_inputs(graph, inputs[i % inputs.size()]);
      const auto start = Clock::now();
      ggml_backend_graph_compute(backend, graph.graph);
      return std::chrono::duration<double>(Clock::now() - start).count();
    };
    once(0);
    std::vector<double> taken;
    const Ticks before = ticks();
    const auto start = Clock::now();
    double elapsed;
    do {
      taken.push_back(once(taken.size() + 1));
      elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    } while (elapsed < seconds);
    const Ticks after = ticks();
    const double others = (after.busy - before.busy) - (after.own - before.own);
    std::printf("{\"times\": [");
    for (size_t i = 0; i < taken.size(); ++i) std::printf("%s%.9f", i ? ", " : "", taken[i]);
    std::printf("], \"foreign\": %.4f}\n", std::max(0.0, others / (elapsed * sysconf(_SC_NPROCESSORS_ONLN))));
    std::fflush(stdout);
  }
}
