// PTX's text, taken apart.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace emulator {

constexpr std::string_view kSpace = " \t\n\r";

inline std::string Trim(std::string_view s) {
  const size_t begin = s.find_first_not_of(kSpace);
  return begin == s.npos ? "" : std::string(s.substr(begin, s.find_last_not_of(kSpace) + 1 - begin));
}

// At separators outside of brackets, without the space around the parts. Nothing is no part.
inline std::vector<std::string> Split(std::string_view text, char separator = ',') {
  std::vector<std::string> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    const char c = i < text.size() ? text[i] : separator;
    depth += (c == '{' || c == '[' || c == '(') - (c == '}' || c == ']' || c == ')');
    if (c != separator || depth > 0) continue;
    if (std::string part = Trim(text.substr(begin, i - begin)); !part.empty()) parts.push_back(std::move(part));
    begin = i + 1;
  }
  return parts;
}

}  // namespace emulator
