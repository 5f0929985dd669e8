// Stands in for libFuzzer in ordinary builds: runs a fuzz target over its seed corpus and over mutations of it.
//
// Mutations are a pure function of the seed files and the count, so a failure repeats; the failing input is written to
// crash-<name> in the working directory when the target aborts. Usage: fuzz_<name> <mutations> <corpus folder>…
#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;
Bytes current;
std::string program;

// Keeps what broke the target. fopen in a signal handler is not async-signal-safe; the process is lost anyway.
void save_input(int signal) {
  const std::string path = "crash-" + program;
  if (std::FILE* file = std::fopen(path.c_str(), "wb")) {
    std::fwrite(current.data(), 1, current.size(), file);
    std::fclose(file);
    std::fprintf(stderr, "%s: the input that failed is in %s (%zu bytes)\n", program.c_str(), path.c_str(),
                 current.size());
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void run(Bytes input) {
  current = std::move(input);
  LLVMFuzzerTestOneInput(current.data(), current.size());
}

// One to eight small changes: flip, set, insert, erase, repeat a part, cut, take a part of another seed.
Bytes mutate(const std::vector<Bytes>& seeds, std::mt19937_64& random) {
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  Bytes out = seeds[below(seeds.size())];
  constexpr uint8_t kInteresting[] = {0,   1,   0x7F, 0x80, 0xFF, '"', '{', '}',  '[',  ']',
                                      ',', ':', '\\', '-',  '0',  '9', ' ', '\n', 0xC2, 0xF0};
  for (size_t change = 1 + below(8); change > 0; --change) {
    if (out.empty()) out.push_back(kInteresting[below(std::size(kInteresting))]);
    const size_t at = below(out.size());
    const auto position = [&](size_t i) { return out.begin() + static_cast<std::ptrdiff_t>(i); };
    const size_t size = std::min(out.size() - at, 1 + below(16));
    switch (below(7)) {
      case 0:
        out[at] ^= static_cast<uint8_t>(1u << below(8));
        break;
      case 1:
        out[at] = kInteresting[below(std::size(kInteresting))];
        break;
      case 2:
        out.insert(position(at), kInteresting[below(std::size(kInteresting))]);
        break;
      case 3:
        out.erase(position(at), position(at + size));
        break;
      case 4: {
        const Bytes part(position(at), position(at + size));
        out.insert(position(at), part.begin(), part.end());
        break;
      }
      case 5:
        out.resize(at);
        break;
      case 6: {
        const Bytes& other = seeds[below(seeds.size())];
        if (other.empty()) break;
        const size_t from = below(other.size());
        const size_t n = std::min(other.size() - from, 1 + below(64));
        out.insert(position(at), other.begin() + static_cast<std::ptrdiff_t>(from),
                   other.begin() + static_cast<std::ptrdiff_t>(from + n));
        break;
      }
    }
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  program = std::filesystem::path(argv[0]).filename().string();
  char* end = nullptr;
  const long n_mutations = argc > 1 ? std::strtol(argv[1], &end, 10) : -1;
  if (argc < 3 || n_mutations < 0 || *end != '\0') {
    std::fprintf(stderr, "usage: %s <mutations> <corpus folder>…\n", program.c_str());
    return 2;
  }
  std::vector<std::filesystem::path> files;
  for (int i = 2; i < argc; ++i) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(argv[i], error)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  if (files.empty()) {
    std::fprintf(stderr, "%s: no seed files; add some to the corpus folder\n", program.c_str());
    return 2;
  }
  std::vector<Bytes> seeds;
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  for (const int signal : {SIGABRT, SIGSEGV, SIGFPE, SIGBUS, SIGILL}) std::signal(signal, save_input);
  run({});
  for (const Bytes& seed : seeds) run(seed);
  std::mt19937_64 random(1);
  for (long i = 0; i < n_mutations; ++i) run(mutate(seeds, random));
  std::printf("%s: %zu seeds, %ld mutations, no failure\n", program.c_str(), seeds.size(), n_mutations);
  return 0;
}
