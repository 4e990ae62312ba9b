// Decodes every kernel of files of PTX, for .ci/run: that the interpreter knows all their instructions.
#include <cstdio>
#include <fstream>
#include <iterator>

#include "../emulator.h"

int main(int argc, char** argv) {
  int kernels = 0, failures = 0;
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i]);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    emulator::Module module(text);
    constexpr std::string_view kEntry = ".entry ";
    for (size_t at = 0; (at = text.find(kEntry, at)) != text.npos; ++kernels) {
      at += kEntry.size();
      const std::string name = text.substr(at, text.find('(', at) - at);
      try {
        module.Find(name);
      } catch (const emulator::Error& e) {
        std::printf("%s: %s: %s\n", argv[i], name.c_str(), e.what());
        ++failures;
      }
    }
  }
  std::printf("the interpreter decodes %d of %d kernels\n", kernels - failures, kernels);
  return kernels == 0 || failures > 0;
}
